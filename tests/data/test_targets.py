"""Numbers and several labels of the user's rows: read as they are written, and refused by file and line."""

import json
from pathlib import Path

import numpy as np
import pytest

from dpx.data.labelled import Table
from dpx.data.schema import UNKNOWN
from dpx.data.sources import TableSource
from dpx.declaration import ConfigError
from tests.composed import composed


def labels_of(path: Path, text: str, **fields: object) -> list[object]:
    path.write_text(text)
    source = TableSource(Table(paths=str(path), labels=None, **fields))  # type: ignore[arg-type]
    return [row.label for row in source.documents()]  # type: ignore[union-attr]


def test_a_number_is_read_and_may_be_missing(tmp_path: Path):
    text = "text,score\na,3.5\nb,\nc,-1e2\nd, 4 \n"
    assert labels_of(tmp_path / "rows.csv", text, target_field="score") == [3.5, None, -100.0, 4.0]
    lines = "".join(json.dumps({"text": "a", "score": score}) + "\n" for score in (1, 2.5, None))
    assert labels_of(tmp_path / "rows.jsonl", lines, target_field="score") == [1.0, 2.5, None]


def test_several_labels_are_columns_or_listed(tmp_path: Path):
    text = "text,calm,loud\na,1,0\nb,0,\nc,true,1.0\n"
    names = {"label_names": ["calm", "loud"]}
    assert labels_of(tmp_path / "rows.csv", text, **names) == [(1, 0), (0, UNKNOWN), (1, 1)]
    listed = 'text,tags\na,calm; loud\nb,\nc,"[""loud""]"\n'
    assert labels_of(tmp_path / "tags.csv", listed, **names, labels_field="tags") == [(1, 1), (0, 0), (0, 1)]
    lines = "".join(json.dumps({"text": "a", "tags": tags}) + "\n" for tags in (["loud", "calm"], [], None))
    assert labels_of(tmp_path / "tags.jsonl", lines, **names, labels_field="tags") == [(1, 1), (0, 0), (UNKNOWN, UNKNOWN)]


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("text,score\na,high\n", {"target_field": "score"}, r"rows.csv:2: has 'high' under 'score', which is not a number"),
        ("text,score\na,nan\n", {"target_field": "score"}, "which is not a number"),
        ("text,score\na,1e39\n", {"target_field": "score"}, "which is not a number"),
        ("text,score\na,\n", {"target_field": "score"}, "data.source.target_field: score: no training row has a number there"),
        ("text,a\nx,2\n", {"label_names": ["a"]}, r"rows.csv:2: has '2' under 'a', which is neither 0 nor 1"),
        ("text,a,b\nx,1,0\n", {"label_names": ["a", "b"]}, "data.source.label_names: b: no training row has this label"),
        ("text,tags\nx,c\n", {"label_names": ["a"], "labels_field": "tags"}, "has the label 'c', which is not among a"),
        ('text,tags\nx,"[1"\n', {"label_names": ["a"], "labels_field": "tags"}, "has a list under 'tags' that is not JSON"),
        ("text,a\nx,1\n", {"target_field": "a", "label_names": ["a"]}, "target_field and label_names: are two kinds of labels"),
        ("text,a\nx,1\n", {"labels_field": "a"}, "labels_field=a: lists labels, and none is declared"),
        ("text,a\nx,1\n", {"label_names": []}, r"label_names=\[\]: names no label"),
        ("text,a\nx,1\n", {"label_names": ["a", "a"]}, "contains a label twice"),
        ("text,a\nx,1\n", {"target_field": "text"}, "text: the same column cannot be two parts of a row"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path, text: str, fields: dict, message: str):
    with pytest.raises(ConfigError, match=message) as refused:
        labels_of(tmp_path / "rows.csv", text, **fields)
    assert "\n" not in str(refused.value)


TABLE = ["data=table", "data.source.paths=rows.csv", "model=micro"]
NUMBER = [*TABLE, "task=regression", "task.mean=2.5", "task.scale=1.5", "data.source.target_field=score"]


def test_labels_are_null_and_counted_where_they_are_declared_otherwise():
    several, _, _ = composed(*TABLE, "task=multi_label", "data.source.label_names=[a,b,c]")
    assert several.task.pooled_outputs == 3 and several.data.labels == ("a", "b", "c") and not several.data.learns_labels
    number, _, _ = composed(*NUMBER)
    assert number.task.pooled_outputs == 1 and list(number.data.labels) == ["score"] and not number.data.learns_labels


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([*TABLE, "task=multi_label", "data.source.labels=[a,b]"], "its rows have no column labels, which task=multi_label reads"),
        ([*TABLE, "task=classification", "data.source.target_field=score"], "which task=classification reads"),
        ([*NUMBER, "telemetry=released"], "telemetry=released, task=regression: an example of this task has no accuracy"),
        ([*NUMBER, "audit=canaries", "audit.sequences=4"], "audit.sequences=4 with task=regression: a canary of text would have no target"),
        ([*TABLE, "task=regression", "data.source.target_field=score"], "task.mean"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(given: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        composed(*given)


def test_stored_targets_are_32_bits(tmp_path: Path):
    from dpx.data.schema import number, stored

    columns = {"target": np.array([2.5, 0.0]), "has_target": np.array([1, 0])}
    assert {name: str(values.dtype) for name, values in stored(columns, number(), "rows").items()} == {
        "target": "float32",
        "has_target": "uint8",
    }
