"""Run folders to rows and back: what is kept, what is left out and why, and that nothing changes on the way through the file."""

import copy
import functools
import json
from pathlib import Path

import pytest

from dpx import config
from dpx.config import recipes
from dpx.declaration import ConfigError
from dpx.pages import read_runs
from dpx.pages.read_runs import Run
from dpx_papers.report import collect, rows
from tests.report import made

SWEEP = "laptop_anil_batch_sweep"


@functools.cache
def _composed(*overrides: str) -> dict:
    return config.resolved(recipes.compose(["+experiment=laptop/anil_batch_sweep", "hydra/sweeper=basic", *overrides]))


def _plain(*overrides: str) -> dict:
    return copy.deepcopy(_composed(*overrides))


_points = functools.cache(recipes.points)


def _point(index: int) -> list[str]:
    """Overrides of one point of the recipe as it stands."""
    return _points("laptop/anil_batch_sweep")[index]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two points of the recipe, one run outside it, one unfinished run."""
    found = tmp_path_factory.mktemp("outputs")
    made.folder(found, SWEEP, _plain(*_point(0)), 0.2)
    made.folder(found, SWEEP, _plain(*_point(-1)), 0.4)
    made.folder(found, SWEEP, _plain(*_point(0), "optimizer.beta1=0.5"), 0.9)
    (found / f"{SWEEP}-0000000000" / "private").mkdir(parents=True)
    (found / "mckenna_grid-0000000000").mkdir()
    return found


def test_finished_points_are_collected_and_others_named(outputs: Path, tmp_path: Path) -> None:
    found, unfinished = read_runs.collect(outputs, ("laptop_anil_",))
    assert unfinished == [f"{SWEEP}-0000000000: not finished, or not readable (FileNotFoundError)"]
    kept, strays = collect.merged([], found)
    assert len(strays) == 1 and "not a point of its recipe: optimizer.beta1=0.5, not 0.75" in strays[0]
    rows.write(tmp_path / "results.csv", kept)
    runs = rows.read(tmp_path / "results.csv")
    assert [run.finals["heldout/mlm_accuracy"] for run in runs] in ([0.2, 0.4], [0.4, 0.2])
    assert all("batch_schedule.size=" in run.point and "replicate" not in run.point for run in runs)


def test_a_run_is_read_back_as_it_was(outputs: Path, tmp_path: Path) -> None:
    found, _ = read_runs.collect(outputs, ("laptop_anil_",))
    rows.write(tmp_path / "results.csv", found)
    read = rows.read(tmp_path / "results.csv")
    assert [run.facts for run in read] == [run.facts for run in rows.labelled(found)]
    rows.write(tmp_path / "again.csv", read)
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "results.csv").read_bytes()
    run = next(run for run in read if run.finals["heldout/mlm_accuracy"] == 0.4)
    assert run.config["mechanism"] == "DpSgd" and run.config["noise"] == "TargetEpsilon" and run.config["noise.epsilon"] == "5.36"
    assert run.facts["guarantee"] == "dp" and run.facts["epsilon/rdp"] == "5.36" and run.facts["commit"] == "0123456789ab"
    assert run.curves["heldout/mlm_accuracy"] == ((50, 0.2), (100, 0.4))
    # 100 steps in windows of 3, each the mean of its steps and named by its last.
    assert len(run.curves["grad/snr"]) == 34 and run.curves["grad/snr"][0] == (3, pytest.approx((1 + 1 / 2 + 1 / 3) / 3))
    assert run.curves["weights/matrices"][0][1] == 5.0, "biases are not decayed and not counted"
    assert run.finals["train/expected_examples"] == 6400 and run.finals["train/examples_per_s"] == 200


def test_collecting_twice_changes_nothing(outputs: Path, tmp_path: Path) -> None:
    found, _ = read_runs.collect(outputs, ("laptop_anil_",))
    once, _ = collect.merged([], found)
    rows.write(tmp_path / "results.csv", once)
    first = (tmp_path / "results.csv").read_bytes()
    again, _ = collect.merged(rows.read(tmp_path / "results.csv"), found)
    rows.write(tmp_path / "results.csv", again)
    assert (tmp_path / "results.csv").read_bytes() == first


def test_rows_of_a_folder_that_is_gone_stay_while_their_recipe_stands(outputs: Path) -> None:
    found, _ = read_runs.collect(outputs, ("laptop_anil_",))
    kept, _ = collect.merged(found, [])
    assert len({run.run for run in kept}) == 2
    gone = [Run("laptop_anil_nowhere", "1", "-", 0, {"steps": "3"}, {}, {}, {})]
    assert collect.merged(gone, [])[0] == []


def test_runs_of_another_corpus_than_the_latest_are_left_out_and_named(tmp_path: Path) -> None:
    """A recipe leaves the corpus open; the rows say which it was, without the place where it lay."""
    for number, (checksum, at) in enumerate([("aaaa", "2026-01-01"), ("bbbb", "2026-01-02"), ("bbbb", "2026-01-03")]):
        corpus = ["data=text", f"data.source.paths=[/some/where/{checksum}.jsonl.gz]"]
        folder = made.folder(tmp_path, SWEEP, _plain(*_point(number), *corpus), 0.1 * number, corpus=checksum * 16)
        (folder / "private" / "status.json").write_text(json.dumps({"train": {"state": "finished", "at": at}}))
    found, _ = read_runs.collect(tmp_path, ("laptop_anil_",))
    values = {value for run in found for _, _, value in run.rows()}
    assert "bbbb.jsonl.gz (bbbbbbbbbbbb)" in values and not any("/some/where" in value for value in values)
    kept, left_out = collect.merged([], found)
    assert [line.partition(": ")[2] for line in left_out] == [
        "trained on aaaa.jsonl.gz (aaaaaaaaaaaa), not on bbbb.jsonl.gz (bbbbbbbbbbbb)"
    ]
    assert len({run.run for run in kept}) == 2


def test_windows_are_means_named_by_their_last_step() -> None:
    assert read_runs.windowed([(1, 1.0), (2, 3.0), (3, 5.0)], 2) == [(2, 2.0), (3, 5.0)]
    assert read_runs.windowed([], 4) == []


def test_points_name_what_differs() -> None:
    runs = [Run("x", name, "-", 0, {"lr": "1", "size": size}, {}, {}, {}) for name, size in (("a", "128"), ("b", "32"))]
    assert [(run.run, run.point) for run in rows.labelled(runs)] == [("b", "size=32"), ("a", "size=128")]
    assert [run.point for run in rows.labelled(runs[:1])] == ["-"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "a: [", "\x00"], ids=repr)
def test_a_spoiled_folder_is_named_and_the_others_are_read(text: str, tmp_path: Path) -> None:
    plain = _plain(*_point(0))
    made.folder(tmp_path, SWEEP, plain, 0.2)
    spoiled = []
    for number, file in enumerate(("release/config.yaml", "release/privacy.json", "private/results.json", "private/metrics.jsonl")):
        folder = made.folder(tmp_path, f"{SWEEP}-{number}", plain, 0.4)
        (folder / file).write_text(text)
        spoiled.append(folder.name)
    found, left_out = read_runs.collect(tmp_path, ("laptop_anil_",))
    assert found and sorted(line.partition(":")[0] for line in left_out) == sorted(spoiled)


def test_one_path_is_one_corpus(tmp_path: Path) -> None:
    plain = _plain(*_point(0))
    for paths in ("text/some.txt", ["text/some.txt"]):
        plain["data"]["source"] = {"_target_": "dpx.data.sources.TextFiles", "paths": paths}
        made.folder(tmp_path, SWEEP, plain, 0.2)
    found, _ = read_runs.collect(tmp_path, ("laptop_anil_",))
    assert {run.facts["corpus"] for run in found} == {f"some.txt ({'0' * 12})"}


def test_a_warm_up_is_compared_in_steps_however_a_config_gives_it() -> None:
    given = [read_runs.knobs_of({"steps": 300, "lr_schedule": {"warmup_steps": warm_up}}) for warm_up in (60, 0.2, 0.1)]
    assert [collect._stray(one, [given[1]]) for one in given] == [
        None,
        None,
        "not a point of its recipe: lr_schedule.warmup_steps=30, not 60",
    ]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("a,b\n1,2\n", "columns"),
        ("{head}\nx,1,-,0,heldout/loss\n", "line 2: is cut short"),
        ("{head}\nx,1,-,0,heldout/loss,final,5.0,6.0\n", "line 2: is cut short"),
        ("{head}\nx,1,-,0,heldout/loss,final,5.0\nx,1,-,zero,heldout/loss,final,5.0\n", "line 3: is cut short"),
        ("{head}\nx,1,-,0,heldout/loss,last,5.0\n", "line 2: is cut short"),
        ("{head}\nx,1,-,0,heldout/loss,final,five\n", "line 2: is cut short"),
    ],
)
def test_a_file_that_is_no_results_is_refused(text: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text(text.format(head=",".join(rows.COLUMNS)))
    with pytest.raises(ConfigError, match=key):
        rows.read(tmp_path / "results.csv")


def test_the_folder_of_a_chain_without_a_statement_that_can_be_read_is_named(tmp_path):
    statement = tmp_path / "legal_best-0123456789" / "release" / "chain.json"
    statement.parent.mkdir(parents=True)
    statement.write_text("{}")
    found, (line,) = read_runs.collect(tmp_path, ("legal_best-",))
    assert found == [] and "was written with the format number None, not 3" in line
