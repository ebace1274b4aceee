"""What the declaration of an analysis is made from: one function, what is said of its tables, and its figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dpx.config import instantiate, reference
from dpx.declaration import ConfigError, is_declaration, require
from dpx_papers.analysis import Input, Made, Noted, analysis
from dpx_papers.report.shape import Part

WORDS = {"doubled": {"title": "times {factor:g}", "notes": ["of {values}"]}}
PANEL = {"table": "doubled", "x": "value", "y": ["dou*"], "where": {"value": "*"}, "title": "value {value:,}"}


def _require_factor(declared: Any) -> None:
    require(declared.factor > 0, f"analysis.factor={declared.factor}", "must be positive", "Give more")


@analysis(_require_factor)
def doubling(values: Sequence[int], source: Input, factor: float = 2.0) -> Made:
    """Multiplies values.

    Attributes:
        values: What is multiplied.
        source: A file that is read.
        factor: By what.
    """
    rows = [{"value": value, "doubled": factor * value} for value in values]
    verdicts = [Part.of("all are larger", all(row["doubled"] > row["value"] for row in rows), f"{len(rows)} values")]
    frame = pd.DataFrame({"value": [1, 2], "gap": [None, 0.5]})
    return {"doubled": Noted(rows, ["seen"]), "frame": frame, "verdicts": verdicts}


def figure(**panel: Any) -> dict[str, Any]:
    return {"name": "a", "caption": "By {factor:g}.", "panels": [PANEL | panel]}


def test_its_keys_are_the_parameters_of_its_function_with_their_types_meanings_and_defaults() -> None:
    node = {"_target_": f"{__name__}.doubling", "values": [1], "source": "a.csv"}
    assert is_declaration(doubling) and reference.attributes(doubling)["factor"] == "By what."
    assert {field.name for field in reference.settable(doubling)} == {"values", "source", "factor", "tables", "figures", "measurements"}
    made = instantiate._construct(doubling, {key: value for key, value in node.items() if key != "_target_"}, "analysis")
    assert (made.given["factor"], made.inputs()) == (2.0, [Path("a.csv")])
    for wrong, message in (({"valus": [1]}, "analysis.valus"), ({"values": "a"}, "analysis.values"), ({"factor": 0}, "must be positive")):
        with pytest.raises(ConfigError, match=message):
            instantiate._construct(doubling, {"values": [1], "source": "a.csv"} | wrong, "analysis")


def test_rows_become_tables_under_what_the_declaration_says() -> None:
    doubled, frame, verdicts = doubling(values=[1, 3], source="a.csv", tables=WORDS)()
    assert (doubled.title, doubled.notes) == ("times 2", ("of [1, 3]", "seen"))
    assert doubled.as_json()["rows"] == [{"value": 1, "doubled": 2.0}, {"value": 3, "doubled": 6.0}]
    assert (frame.columns, frame.rows) == (("value", "gap"), ((1, None), (2, 0.5)))
    assert [type(cell) for cell in frame.rows[1]] == [int, float]
    assert verdicts.as_json()["rows"] == [{"claim": "all are larger", "state": "pass", "statistic": "2 values"}]


def test_a_panel_stands_for_each_value_and_one_without_rows_is_left_out() -> None:
    made = doubling(values=[1, 3000], source="a.csv", figures=[figure()])
    (picture,) = made.pictures(made())
    assert picture.caption == "By 2." and [panel.title for panel in picture.panels] == ["value 1", "value 3,000"]
    assert [(panel.where, panel.y) for panel in picture.panels] == [({"value": 1}, ["doubled"]), ({"value": 3000}, ["doubled"])]
    for absent in ({"table": "nowhere"}, {"where": {"value": 7}}, {"y": ["nothing"]}):
        other = doubling(values=[1], source="a.csv", figures=[figure(**absent)])
        assert other.pictures(other()) == []


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"tables": {"doubled": {"titel": "x"}}}, "analysis.tables.titel"),
        ({"figures": [figure() | {"captoin": "x"}]}, "analysis.figures.captoin"),
        ({"figures": [figure(x_lable="x")]}, "analysis.figures.x_lable"),
        ({"figures": [figure(x_scale="cubic")]}, "analysis.figures.x_scale"),
    ],
)
def test_a_key_that_no_table_or_figure_has_is_refused_before_anything_is_computed(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        doubling(values=[1], source="a.csv", **said)


def test_without_pandas_it_is_declared_and_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpx.packages.is_installed", lambda package: package != "pandas")
    made = doubling(values=[1], source="a.csv")
    with pytest.raises(ConfigError, match=r"an analysis of a paper: needs pandas.*dpx-lm\[papers\]"):
        made()
