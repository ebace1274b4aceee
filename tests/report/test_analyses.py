"""Tables of analyses and benchmarks: the latest of each is kept, those of one experiment are joined."""

import json
import os
from pathlib import Path

from dpx_papers.report import analyses

NAME = "laptop_mckenna_table4_throughput"


def _benchmark(outputs: Path, number: int, model: str, speed: float) -> None:
    folder = outputs / f"{NAME}-{number}" / "private"
    folder.mkdir(parents=True)
    (folder / "benchmark.json").write_text(json.dumps({"name": NAME, "rows": [{"model": model, "examples_per_s": speed}]}))
    os.utime(folder / "benchmark.json", (number, number))


def _analysis(outputs: Path, number: int, value: float) -> None:
    folder = outputs / f"anil_accounting-{number}" / "release"
    folder.mkdir(parents=True)
    tables = [{"name": "t", "title": "T", "rows": [{"x": value}], "notes": ["n"]}, {"name": "empty", "title": "", "rows": [], "notes": []}]
    (folder / "analysis.json").write_text(json.dumps({"name": "anil_accounting", "tables": tables}))
    os.utime(folder / "analysis.json", (number, number))


def test_of_a_sweep_of_benchmarks_the_latest_of_each_model_counts(tmp_path: Path) -> None:
    for number, (model, speed) in enumerate([("tiny", 3.0), ("mini", 2.0), ("tiny", 4.0)]):
        _benchmark(tmp_path / "outputs", number, model, speed)
    assert analyses.fill(tmp_path / "outputs", tmp_path, ("laptop_mckenna_",)) == []
    table = analyses.read(tmp_path)[NAME]["benchmark"]
    assert dict(table.rows) == {"tiny": 4.0, "mini": 2.0}


def test_the_latest_analysis_counts_and_empty_tables_are_left_out(tmp_path: Path) -> None:
    for number, value in ((2, 2.0), (1, 1.0)):
        _analysis(tmp_path / "outputs", number, value)
    _analysis(tmp_path / "outputs", 3, 3.0)
    assert analyses.fill(tmp_path / "outputs", tmp_path, ("anil_",)) == []
    (found,) = analyses.read(tmp_path)["anil_accounting"].values()
    assert found.rows == ((3.0,),) and found.title == "T" and found.notes == ("n",)


def test_tables_of_another_paper_and_runs_that_trained_are_not_copied(tmp_path: Path) -> None:
    _analysis(tmp_path / "outputs", 1, 1.0)
    (tmp_path / "outputs" / "mckenna_grid-0" / "private").mkdir(parents=True)
    assert analyses.fill(tmp_path / "outputs", tmp_path, ("mckenna_",)) == [] and analyses.read(tmp_path) == {}


def test_a_document_without_rows_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / f"{NAME}-0" / "private"
    folder.mkdir(parents=True)
    (folder / "benchmark.json").write_text("{}")
    (line,) = analyses.fill(tmp_path / "outputs", tmp_path, (NAME,))
    assert "benchmark.json" in line and "rows" in line
