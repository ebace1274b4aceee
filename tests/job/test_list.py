"""Recipes by pattern, and every point of a sweep, including axes of values that move together."""

import json
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from dpx import config
from dpx.config import recipes
from dpx.config.recipes import _values
from dpx.declaration import ConfigError
from dpx.job.list import List
from dpx.run_folder import RunFolder

EXPERIMENT, _ = config.build(recipes.compose([]))


def test_names_are_matched_whole() -> None:
    assert recipes.names("anil_2m_batch") == ["anil_2m_batch"]
    assert "laptop/anil_2m_batch" in recipes.names("laptop/*")
    assert not [name for name in recipes.names("anil_*") if name.startswith("laptop/")]


def test_a_single_run_has_one_point() -> None:
    assert recipes.points("anil_2m_batch") == [[]]


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("noise.epsilon=1.08,2,5.36", ["noise.epsilon=1.08", "noise.epsilon=2", "noise.epsilon=5.36"]),
        ("replicate=range(3)", ["replicate=0", "replicate=1", "replicate=2"]),
        ("steps=7", ["steps=7"]),
        ("optimizer.beta1=interval(0,0.9)", []),
        ("+point={size:1,steps:2},{size:3,steps:4}", ["+point={size:1,steps:2}", "+point={size:3,steps:4}"]),
    ],
)
def test_axis_values(axis: str, values: list[str]) -> None:
    assert _values(OverridesParser.create().parse_override(axis)) == values


def test_plans_every_point_of_every_match(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    List(match="anil_2m_batch", plan=True)(EXPERIMENT, RunFolder(tmp_path))
    (row,) = json.loads((tmp_path / "release" / "list.json").read_text())
    assert row["plan"]["parameters"] == 336_226_108 and row["error"] is None
    assert "336,226,108" in capsys.readouterr().out


def test_a_point_that_cannot_be_planned_fails_after_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "points", lambda name: [[], ["privacy.delta=0.5"]])
    with pytest.raises(ConfigError, match="1 of 2 points"):
        List(match="anil_2m_batch", plan=True)(EXPERIMENT, RunFolder(tmp_path))
    rows = json.loads((tmp_path / "release" / "list.json").read_text())
    assert [bool(row["error"]) for row in rows] == [False, True]


def test_nothing_matching_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no recipe has this name"):
        List(match="nothing_*", plan=False)(EXPERIMENT, RunFolder(tmp_path))
