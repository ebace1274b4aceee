"""Tables of runs hold numbers as numbers, and the keys that differ as columns."""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import dpx
from dpx import packages
from dpx.console import Console
from dpx.declaration import ConfigError
from dpx.files.results import Results, interval, write_results
from dpx.files.run_folder import RunFolder
from dpx.launch.sweep_tables import Outcome, write_table
from dpx.pages import run_table
from tests.processes import Answer, answers, head_run


def made_outputs(place: Path) -> Path:
    """A folder of two runs that were measured."""
    for number, rate in enumerate((1e-3, 2e-3)):
        folder = RunFolder(place / "outputs" / f"run-{number}")
        folder.made_release()
        config = f"name: run\nsteps: 5\nlr_schedule: {{learning_rate: {rate}}}\nmodel: {{layers: [1, {number}]}}\nmicrobatch: {number}\n"
        (folder.release / "config.yaml").write_text(config)
        accuracy = 0.25 + number / 4
        results = Results(steps=5, metric="accuracy", heldout={"accuracy": accuracy}, baselines={}, rows=200)
        write_results(folder.made_private(), results)
    return place / "outputs"


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    return made_outputs(tmp_path)


def test_records_are_numbers_with_intervals_and_the_keys_that_differ(outputs: Path) -> None:
    first, second = dpx.runs(outputs)
    low, high = interval(0.25, 200)
    measured = {
        "run": "run-0",
        "state": "not trained",
        "steps": 5,
        "metric": "accuracy",
        "value": 0.25,
        "low": low,
        "high": high,
        "rows": 200,
    }
    stated = {"guarantee": None, "epsilon": None, "delta": None}
    assert first == measured | stated | {"lr_schedule.learning_rate": 1e-3, "model.layers": "[1, 0]"}
    assert second["value"] == 0.5 and second["lr_schedule.learning_rate"] == 2e-3
    assert [one["run"] for one in dpx.runs(outputs, "*-1")] == ["run-1"]
    with pytest.raises(ConfigError, match="holds no run of this name"):
        dpx.runs(outputs, "other")


def test_files_hold_what_the_records_hold(outputs: Path, tmp_path: Path) -> None:
    records = dpx.runs(outputs)
    for ending in run_table.FORMATS:
        run_table.write(records, tmp_path / f"runs{ending}")
    assert json.loads((tmp_path / "runs.json").read_text()) == records
    rows: list[dict[str, Any]] = list(csv.DictReader((tmp_path / "runs.csv").read_text().splitlines()))
    assert [float(one["low"]) for one in rows] == [one["low"] for one in records]
    from pyarrow import parquet

    assert parquet.read_table(tmp_path / "runs.parquet").to_pylist() == records
    assert list(records.to_pandas()["value"]) == [0.25, 0.5]


def test_what_cannot_be_written_is_one_line(outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = dpx.runs(outputs)
    with pytest.raises(ConfigError, match=r"runs.xlsx: is not a table that dpx writes. End the name with .csv, .json, .parquet"):
        run_table.write(records, tmp_path / "runs.xlsx")
    monkeypatch.setattr(run_table, "is_installed", lambda package: False)
    with pytest.raises(ConfigError, match="needs pandas, which is not installed. Install the extra hub"):
        records.to_pandas()
    with pytest.raises(ConfigError, match="needs pyarrow, which is not installed. Install the extra hub"):
        run_table.write(records, tmp_path / "runs.parquet")
    assert set(packages.PACKAGES) >= {"hub"}


# Command lines, each in a folder of its own, and all in one process.
LISTED = ["--json", "job=list", "list.what=runs", "list.to=runs.csv"]
OF_RECIPES, UNNAMED = ["job=list", "list.to=runs.csv"], ["job=list", "list.what=runs", "list.to="]
PLANS = ["--json", "-m", *head_run(2), "job=plan", "replicate=0,1"]
SWEEP = ["--json", "-m", *head_run(1), "lr_schedule.learning_rate=0.01,-1,0.02"]
SEARCH = [*SWEEP, "name=searched", "tune=search", "tune.trials=2", "hydra/sweeper=basic", "hydra/callbacks=search"]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Answer, Path]]:
    """What each command line came to, and where."""
    places = {name: tmp_path_factory.mktemp(name) for name in ("listed", "of_recipes", "unnamed", "plans")}
    made_outputs(places["listed"])
    told = answers(list(zip(places.values(), [LISTED, OF_RECIPES, UNNAMED, PLANS], strict=True)))
    return dict(zip(places, zip(told, places.values(), strict=True), strict=True))


def test_list_writes_the_table(answered: dict[str, tuple[Answer, Path]]) -> None:
    listed, place = answered["listed"]
    assert listed.returncode == 0, listed
    (line,) = listed.stdout.splitlines()
    table = list(csv.DictReader((place / "runs.csv").read_text().splitlines()))
    assert json.loads(line)["answer"] == dpx.runs(place / "outputs")
    assert [float(one["lr_schedule.learning_rate"]) for one in table] == [1e-3, 2e-3]


def test_a_table_of_recipes_and_a_table_without_a_format_are_refused(answered: dict[str, tuple[Answer, Path]]) -> None:
    refused, unnamed = answered["of_recipes"][0], answered["unnamed"][0]
    assert unnamed.refusal() == "error: list.to=: is not a table that dpx writes. End the name with .csv, .json, .parquet."
    assert refused.refusal() == "error: list.to=runs.csv: a table is written of runs. Add list.what=runs, or leave list.to out."


def test_under_json_a_sweep_prints_json_lines_alone(answered: dict[str, tuple[Answer, Path]]) -> None:
    sweep, _ = answered["plans"]
    assert sweep.returncode == 0, sweep
    assert [json.loads(line)["state"] for line in sweep.stdout.splitlines()] == ["finished"] * 2
    assert "[HYDRA] Launching" in sweep.stderr


# Slow: it trains four runs; the table of points is written below, and searches are trained in tests/tuning.
@pytest.mark.slow
def test_a_sweep_and_a_search_write_the_table_beside_their_points(tmp_path: Path) -> None:
    place = tmp_path
    sweep, searched = answers([(place, SWEEP), (place, SEARCH)], trains_alike=True)
    assert (sweep.returncode, searched.returncode) == (2, 2), "a rate below 0 is refused"
    records = [json.loads(one) for one in sweep.stdout.splitlines()]
    for name in ("private/sweep-main.csv", "studies/searched/private/trials.csv"):
        table = list(csv.DictReader((place / "outputs" / name).read_text().splitlines()))
        assert [float(one["lr_schedule.learning_rate"]) for one in table] == [0.01, 0.02]
        assert all(0 <= float(one["low"]) <= float(one["value"]) <= float(one["high"]) <= 1 and one["state"] == "finished" for one in table)
        assert [one["epsilon"] for one in table] == [str(one["epsilon"]) for one in dpx.runs(place / "outputs", "main-*")]
    assert [one["state"] for one in records] == ["finished", "failed", "finished"]


def test_a_table_has_every_point_that_has_a_config_once_one_of_them_trained(outputs: Path) -> None:
    points = [Outcome(outputs / f"run-{number}", (f"replicate={number}",), "failed") for number in range(3)]
    write_table(points, Console())
    assert not (outputs / "private").exists()
    write_table([dataclasses.replace(points[0], state="finished", score=0.5), *points[1:]], Console())
    table = list(csv.DictReader((outputs / "private" / "sweep-run.csv").read_text().splitlines()))
    assert [one["run"] for one in table] == ["run-0", "run-1"]


def test_the_measurements_of_a_run_are_records(outputs: Path) -> None:
    with pytest.raises(ConfigError, match="holds no measurements"):
        run_table.metrics(outputs / "run-0")
    (outputs / "run-0" / "private" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.5}\n{"step": 2, "heldout/loss": 2.0}\n')
    measured = run_table.metrics(outputs / "run-0")
    assert measured.columns == ["step", "train/loss", "heldout/loss"] and measured[1]["heldout/loss"] == 2.0
