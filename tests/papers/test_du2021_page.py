"""Laptop verdicts of Du and Mi 2021 on made-up runs, and the tables of Table 2 in miniature from rows as `runs.sh` leaves them."""

import dataclasses
import functools
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dpx.pages.read_runs import Run
from dpx_papers.report import analyses, collect
from dpx_papers.report.sizes import LAPTOP
from tests.report import made

judged = functools.partial(made.verdict, "du2021")
MINIATURE = Path(__file__).parents[2] / "experiments" / "du2021" / "miniature" / "table.py"


def run(name: str, accuracy: float, replicate: int = 0, **config) -> Run:
    finals = {"heldout/accuracy": accuracy, "baseline/most_frequent_class": 0.5}
    found = made.run(name, 0.0, replicate, finals=finals, **{"data__name": "glue_sst2"} | config)
    return dataclasses.replace(found, facts=found.facts | {"epsilon/pld": "31.4"})


def states(number: str, runs: list[Run], **tables: Any) -> list[str]:
    return [part.state for part in judged(number, runs, **tables).parts]


def test_without_evidence_nothing_is_judged() -> None:
    found = {item.number: judged(item.number).state for item in made.declared("du2021").items}
    assert list(found) == [f"F{number}" for number in range(1, 22)] and set(found.values()) == {"not run"}


@pytest.mark.parametrize(("accuracy", "expected"), [(0.8, "pass"), (0.71, "fail")])
def test_without_privacy_is_above_every_run_with_noise_on_the_same_task(accuracy: float, expected: str) -> None:
    noisy = [run(f"dpfp_table2_eps{target}", 0.7 + 0.01 * target, number) for target in (3, 8) for number in range(3)]
    other_task = [run("dpfp_table2_eps3", 0.99, data__name="glue_mrpc")]
    plain = [run("dpfp_table2_nonprivate", accuracy, number) for number in range(3)]
    assert states("F1", [*noisy, *other_task, *plain])[0] == expected
    assert states("F1", [*noisy, *plain[:2]])[0] == "not run", "three replicates are needed"


def test_less_noise_scores_no_lower_within_noise_and_the_frozen_encoder_lower() -> None:
    first, frozen = ([run(name, value, n) for n, value in enumerate((0.70, 0.71))] for name in ("dpfp_table2_eps3", "dpfp_frozen_encoder"))
    second = [run("dpfp_table2_eps8", value, n) for n, value in enumerate((0.69, 0.72))]
    assert states("F7", [*first, *second]) == ["pass"]
    assert states("F7", [*first, *(run("dpfp_table2_eps8", 0.6, n) for n in range(2))]) == ["fail"]
    assert states("F17", [*first, *second, *frozen])[0] == "fail"
    assert states("F17", [*first, *second, run("dpfp_frozen_encoder", 0.5)])[0] == "pass"


def _grid(name: str, knob: str, best: float, values: tuple[float, ...]) -> list[Run]:
    """Accuracy falls with the distance of the knob from `best`; the smallest of three rates is best."""
    return [
        run(name, 0.8 - 0.1 * abs(values.index(value) - values.index(best)) - rate, 0, **{"lr_schedule__learning_rate": rate, knob: value})
        for value in values
        for rate in (5e-4, 2e-3, 8e-3)
    ]


def test_the_figures() -> None:
    sizes, norms = (8.0, 32.0, 128.0), (0.1, 0.4, 1.0)
    assert states("F9", _grid("dpfp_fig1_batch_lr", "batch_schedule__size", 8.0, sizes)) == ["pass", "pass"]
    assert states("F9", _grid("dpfp_fig1_batch_lr", "batch_schedule__size", 128.0, sizes)) == ["fail", "pass"]
    for best, expected in ((1.0, "pass"), (0.1, "fail")):
        runs = [one for _ in range(3) for one in _grid("dpfp_fig2_clip", "clip__clipping_norm", best, norms)]
        assert states("F10", runs) == [expected]
    for falls, expected in ((False, "pass"), (True, "fail")):
        accuracy = dict(zip((1, 4, 32), (0.5, 0.6, 0.7)[:: -1 if falls else 1], strict=True))
        runs = [
            run("dpfp_fig3_microbatch", value + 0.001 * n, n, mechanism__micro_batches=m) for m, value in accuracy.items() for n in range(3)
        ]
        assert states("F11", runs) == [expected]


def test_runs_of_one_recipe_on_two_data_are_both_kept_and_each_on_its_latest_text() -> None:
    found = [run("dpfp_table2_eps3", 0.7, n, data__name=name) for n, name in enumerate(("glue_sst2", "glue_mrpc", "glue_sst2"))]
    for one, (corpus, at) in zip(found, (("old", "1"), ("mrpc", "2"), ("new", "3")), strict=True):
        one.facts.update(corpus=corpus, at=at)
        one.config.clear()
        one.config["data.name"] = "glue_mrpc" if corpus == "mrpc" else "glue_sst2"
    reasons = collect.strays(found)
    assert list(reasons) == [found[0].key] and reasons[found[0].key] == "trained on old, not on new"


@pytest.fixture(scope="module")
def miniature() -> ModuleType:
    spec = importlib.util.spec_from_file_location("miniature_table", MINIATURE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _row(task: str, setting: str, replicate: int, accuracy: str, **more: str) -> dict[str, str]:
    named = {"name": f"{task}_{setting}_{replicate}", "task": task, "setting": setting, "replicate": str(replicate)}
    return named | {"accuracy": accuracy, "guarantee": "none", "noise_multiplier": "0.36", "epsilon": "", "unsupported": ""} | more


def test_the_miniatures_tables_are_means_in_order_and_words_only_where_they_were_counted(miniature, tmp_path) -> None:
    watched = {"steps_watched": "2", "words": "30", "recovered": "30", "wrong": "0"}
    rows = [_row("mrpc", "none", 1, "0.7"), _row("sst2", "dpfp_4.33", 1, "0.6", **watched), _row("sst2", "dpfp_4.33", 2, "0.8")]
    settings, runs = miniature.of_settings(rows).as_json()["rows"], miniature.of_runs(rows)
    assert [(row["task"], row["runs"], row["accuracy"]) for row in settings] == [
        ("SST-2", 2, "70 ± 14 % (n = 2) [66.9 % to 72.9 %; 872 rows]"),
        ("MRPC", 1, "70 % [65.4 % to 74.2 %; 408 rows]"),
    ]
    assert settings[0]["words of a batch that a step shows"] == "30 of 30 in 2 steps, 0 wrong"
    assert [(row["words_recovered"], row["target"]) for row in runs.as_json()["rows"]] == [
        (1.0, "second target"),
        (None, "second target"),
        (None, "no noise"),
    ]
    analyses.write(tmp_path, "dpfp_table2_eps3", [runs.as_json()])
    assert analyses.read(tmp_path)["dpfp_table2_eps3"]["miniature_runs"].as_json()["rows"] == runs.as_json()["rows"]
    noted = states("F6", [], size=LAPTOP, miniature_runs=runs.as_json()["rows"])
    assert noted == ["not run", "not run", "pass", "pass"]
    missed = [row | {"words_recovered": 0.9} if row["words_recovered"] else row for row in runs.as_json()["rows"]]
    assert states("F6", [], size=LAPTOP, miniature_runs=missed)[2] == "fail"


def test_a_step_that_ran_twice_is_counted_once(miniature, tmp_path) -> None:
    lines = ["sst2_none_1,0,3,10,9,0", "sst2_none_1,1,3,20,20,1", "sst2_none_1,0,3,10,10,0"]
    (tmp_path / "words.csv").write_text("\n".join(lines) + "\n")
    assert miniature.shown_words(tmp_path / "words.csv") == {
        "sst2_none_1": {"steps_watched": "2", "words": "30", "recovered": "30", "wrong": "1"}
    }
