"""Recipes by pattern, and every point of a sweep, including axes of values that move together."""

import json
import re
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from dpx import config
from dpx.config import recipes
from dpx.config.recipes import _values
from dpx.declaration import ConfigError
from dpx.files.records import to_json
from dpx.files.run_folder import RunFolder
from dpx.job.list import List, Point
from dpx.privacy import accounting, cache, events
from dpx.privacy.events import Release
from dpx.processes.interruption import Interrupted
from tests.processes import COARSE

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


def test_plans_every_point_of_every_match(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "points", lambda name: [[COARSE]])
    List(match="anil_2m_batch", plan=True)(EXPERIMENT, RunFolder(tmp_path))
    (row,) = json.loads((tmp_path / "release" / "list.json").read_text())
    assert row["plan"]["parameters"] == 336_226_108 and row["error"] is None
    assert "336,226,108" in capsys.readouterr().out


def test_a_point_that_cannot_be_planned_fails_after_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "points", lambda name: [[COARSE], ["privacy.delta=0.5"]])
    with pytest.raises(ConfigError, match="1 of 2 points"):
        List(match="anil_2m_batch", plan=True)(EXPERIMENT, RunFolder(tmp_path))
    rows = json.loads((tmp_path / "release" / "list.json").read_text())
    assert [bool(row["error"]) for row in rows] == [False, True]


# Small problems: two distinct ones in four points.
FEW = [
    "steps=40",
    "data.repeats=1",
    "privacy.rows_per_unit_max=1",
    "noise=target_epsilon",
    "accountant=pld",
    COARSE,
    "batch_schedule=constant",
    "batch_schedule.size=100000",
]
FOUR = [[*FEW, f"noise.epsilon={epsilon}", f"replicate={replicate}"] for epsilon in (1, 2) for replicate in (0, 1)]


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Four points, and the accounting problems that are solved for them, as they are solved."""
    solved: list[tuple[str, str]] = []
    write = cache.write
    monkeypatch.setenv("DPX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(recipes, "points", lambda name: FOUR)
    monkeypatch.setattr(
        cache, "write", lambda kind, question, value: (solved.append((kind, cache.key(question))), write(kind, question, value))
    )
    return solved


def _listed(folder: Path) -> list[Any]:
    List(match="anil_2m_batch", plan=True)(EXPERIMENT, RunFolder(folder))
    return json.loads((folder / "release" / "list.json").read_text())


def test_each_distinct_accounting_problem_is_solved_once_and_kept(few: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _listed(tmp_path / "first")
    # For each of two targets: its noise, and epsilon by both accountants.
    assert len(few) == len(set(few)) == 6
    alone = [config.build(recipes.plan_config("anil_2m_batch", point)) for point in FOUR]
    assert [row["plan"] for row in rows] == [json.loads(json.dumps(to_json(job.document(experiment)))) for experiment, job in alone]
    few.clear()
    for name in ("_compose_losses", "_composed_losses", "renyi"):
        monkeypatch.setattr(accounting, name, lambda *_: pytest.fail("composed again"))
    assert _listed(tmp_path / "second") == rows and not few


def test_an_event_of_a_package_is_a_problem_of_its_own(few: list[Any]) -> None:
    texts = [events.as_text(dp_accounting.GaussianDpEvent(noise), "zero_out") for noise in (1.0, 2.0)]
    charges = [[(Release(noise_multiplier=1.0, kind="package", event=text), 3)] for text in texts]
    with cache.keeping():
        kept = [accounting.compose(one).epsilon(1e-6) for one in (*charges, *charges)]
    assert kept[:2] == kept[2:] == [accounting.compose(one).epsilon(1e-6) for one in charges] and len(set(few)) == len(few) == 2


def test_a_kept_epsilon_that_was_damaged_is_composed_again(few: list[Any], tmp_path: Path) -> None:
    rows = _listed(tmp_path / "first")
    for path in (tmp_path / "cache" / "epsilon").iterdir():
        path.write_text(re.sub(r'"value": [0-9.]+', '"value": 0.125', path.read_text()))
    few.clear()
    assert _listed(tmp_path / "second") == rows and {kind for kind, _ in few} == {"epsilon"}


def test_a_listing_says_each_point_as_it_is_known_and_keeps_them_at_ctrl_c(
    few: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_row, said = Point.plan_row, []

    def third_is_interrupted(point: Point) -> Any:
        said.append(len(capsys.readouterr().err.splitlines()))
        if len(said) == 3:
            raise Interrupted
        return plan_row(point)

    monkeypatch.setattr(Point, "plan_row", third_is_interrupted)
    with pytest.raises(Interrupted) as interrupted:
        _listed(tmp_path)
    assert said == [0, 1, 1] and "list.json holds 2 of 4 points" in str(interrupted.value)
    kept = json.loads((tmp_path / "release" / "list.json").read_text())
    assert [row["point"] for row in kept] == [" ".join(point) for point in FOUR[:2]]
    assert len(list((tmp_path / "cache" / "epsilon").iterdir())) == 2
    assert not cache.is_keeping()


def test_nothing_matching_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no recipe has this name"):
        List(match="nothing_*", plan=False)(EXPERIMENT, RunFolder(tmp_path))
