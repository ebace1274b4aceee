"""Arithmetic on the printed rows of Du and Mi 2021, and the sizes of their data."""

import csv
import dataclasses
from pathlib import Path

import pytest

from dpx import config
from dpx.config import recipes
from dpx.declaration import ConfigError
from dpx.job.report import Analyse
from dpx_papers.du2021 import table2
from dpx_papers.report.rows import read_published

PUBLISHED = Path(__file__).parents[2] / "experiments" / "du2021" / "published.csv"


def rows(table):
    return table.as_json()["rows"]


def declared(name, **changes):
    job = config.build(recipes.compose([f"+experiment={name}"]))[1]
    assert isinstance(job, Analyse)
    return dataclasses.replace(job.analysis, **changes)


def test_every_item_of_the_paper_is_in_the_file_and_each_name_is_a_recipe_or_planned():
    lines = read_published(PUBLISHED)
    assert {line.item for line in lines} == {f"F{number}" for number in range(1, 22)}
    assert {line.experiment for line in lines if line.item in ("F13", "F15", "F18", "F19", "F20", "F21")} <= set(recipes.names())


def test_all_seventeen_printed_means_are_those_of_their_five_scores():
    scores = table2.scores(str(PUBLISHED))
    assert len(scores) == 17
    assert all(table2.mean(row) == pytest.approx(row["mean"], abs=0.0051) for row in scores.values())


def test_a_row_that_lacks_a_task_is_refused(tmp_path):
    lines = list(csv.reader(PUBLISHED.read_text().splitlines()))
    short = [line for line in lines if line[2] != "BERT-base, no privacy, QQP"]
    with (tmp_path / "published.csv").open("w", newline="") as file:
        csv.writer(file).writerows(short)
    with pytest.raises(ConfigError, match="BERT-base, no privacy: is not a whole row"):
        table2.scores(str(tmp_path / "published.csv"))


def test_the_gap_falls_with_size_and_the_text_is_not_the_table():
    analysis = declared("dpfp_model_size_gap", published=str(PUBLISHED))
    gaps, claims, reverse, verdicts = map(rows, analysis())
    by_point = {(row["model"], row["printed_epsilon"]): row["mean_gap"] for row in gaps}
    assert by_point[("BERT-base", 3)] == pytest.approx(1.83, abs=5e-3) and by_point[("RoBERTa-large", 8)] == pytest.approx(0.67, abs=5e-3)
    assert claims[0]["from_table_2"] == pytest.approx(1.15) and claims[0]["printed"] == 0.58
    assert [(row["model"], row["task"]) for row in reverse][:2] == [("BERT-base", "QNLI"), ("RoBERTa-base", "MNLI-mm")]
    assert [row["state"] for row in verdicts] == ["pass", "fail", "fail"]


def test_the_headline_follows_from_the_table():
    analysis = declared("dpfp_headline", published=str(PUBLISHED))
    headline, _, verdicts = map(rows, analysis())
    assert [row["from_table_2"] for row in headline] == [pytest.approx(91.338), pytest.approx(3.81), pytest.approx(0.906)]
    assert {row["state"] for row in verdicts} == {"pass"}


def test_sizes_are_printed_beside_glues_and_files_that_are_missing_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("DPX_DATA", str(tmp_path))
    (tmp_path / "sst2").mkdir()
    (tmp_path / "sst2" / "train.tsv").write_text("sentence\tlabel\na cold film\t0\nwarm\t1\n")
    analysis = declared("dpfp_table3_datasets")
    subjects = [one for one in analysis.subjects if one.task in ("SST-2", "QNLI")]
    option = recipes.option("data", "glue_sst2")
    here = dataclasses.replace(
        option, source=dataclasses.replace(option.source, paths=str(tmp_path / "sst2" / "train.tsv"), test_paths=None)
    )
    monkeypatch.setattr(recipes, "option", lambda group, name, _=recipes.option: here if name == "glue_sst2" else _(group, name))
    table, verdicts = map(rows, dataclasses.replace(analysis, subjects=subjects)())
    by_task = {row["task"]: row for row in table}
    assert (by_task["SST-2"]["rows_here"], by_task["SST-2"]["words_here"], by_task["SST-2"]["is_whole_training_set"]) == (2, 2.0, False)
    assert by_task["QNLI"]["rows_here"] is None and by_task["QNLI"]["glue_rows"] == 104743 != by_task["QNLI"]["printed_rows"]
    assert [row["state"] for row in verdicts] == ["fail", "not run"]
