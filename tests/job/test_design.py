"""`job=design`: from a table of losses to an experiment that plans as it was designed; what it refuses, and what it says beside it."""

import json

import pytest

from dpx.config import build, recipes
from dpx.cost import designs
from dpx.cost.designs import Budget, doubled
from dpx.cost.measured_runs import Measurements, shipped
from dpx.cost.surface import grid_of, surface_of
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.job.design import Design
from tests.scaling.synthetic import form_l2, measured

BASE = ["+experiment=laptop/mckenna_grid", "hydra.mode=RUN", "data=text", "data.source.paths=x", "job=design"]
# Noise is solved for many settings.
COARSE = "+accountant.value_discretization_interval=5e-3"
BUDGET = ["design.epsilon=8", "design.size=20000"]
PARAMETERS = {"width_16": 24_848.0, "width_32": 61_472.0, "width_64": 173_120.0}


def by_central_limit(charges, *, start, **_):
    """What a search solves at its nodes, by the central-limit noise from which that begins."""
    return start


@pytest.fixture(scope="module")
def designed(tmp_path_factory):
    """A design on few records, so that noise needs few nodes."""
    path = tmp_path_factory.mktemp("design")
    measured(form_l2, deviation=0.01, parameters=PARAMETERS).write(path / "losses.csv")
    options = [f"design.measurements={path / 'losses.csv'}", "design.compute=4e11", "privacy.delta=1e-6"]
    experiment, job = build(recipes.compose([*BASE, COARSE, *BUDGET, *options]))
    folder = RunFolder(path / "run", "")
    with pytest.MonkeyPatch.context() as patch:
        # The search may do with central-limit noise (tests/scaling/test_noise.py has the solved one); what is designed is solved exactly.
        patch.setattr(designs.solve, "nearly", by_central_limit)
        job(experiment, folder)
    return folder, {table["name"]: table for table in json.loads((folder.release / "design.json").read_text())["tables"]}


def test_designs_are_ranked_and_what_marks_them_is_said(designed):
    _, tables = designed
    losses = [row["loss"] for row in tables["designs"]["rows"]]
    assert losses == sorted(losses) and tables["designs"]["rows"][0]["near"]
    assert {row["twice_the"] for row in tables["doubled"]["rows"]} == {"nothing", "data", "compute", "epsilon"}
    for row in tables["designs"]["rows"]:
        assert 6 * row["parameters"] * row["batch"] * row["steps"] * 32 <= 4e11 and 0 < row["advantage"] < 1
    notes = " ".join(tables["designs"]["notes"])
    assert "epochs; the table of losses does not state" in notes
    assert "no claim of the designed run covers" in notes and "assumption" in notes


def test_the_file_plans_as_it_was_designed(designed):
    folder, tables = designed
    best = tables["designs"]["rows"][0]
    overrides = [f"hydra.searchpath=[file://{folder.release}]", "+experiment=design", "job=plan"]
    # The user's own losses chose the settings: only the user can say that they tell nothing of protected rows.
    experiment, job = build(recipes.compose(overrides))
    none = job.document(experiment)
    assert none.guarantee == "none" and "losses.csv" in none.reasons[0] and "chosen_by" in none.reasons[0]
    experiment, job = build(recipes.compose([*overrides, "chosen_by.provenance=public"]))
    plan = job.document(experiment)
    assert plan.noise_multiplier == pytest.approx(best["sigma"], rel=1e-6) and plan.steps == best["steps"]
    assert plan.epsilon[{"poisson": "pld"}.get(best["sampler"], best["sampler"])] == pytest.approx(8, rel=2e-3)
    assert experiment.accountant.value_discretization_interval == 5e-3
    assert experiment.model.name == best["model"] and experiment.sampler.name == best["sampler"]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"epsilon": None}, "design.epsilon"),
        ({}, "design.compute"),
        ({"compute": 1e12, "device_hours": 1.0}, "design.compute"),
        ({"compute": 1e20}, "grid"),
        ({"compute": 1e12, "measurements": "nowhere.csv"}, "nowhere.csv"),
        ({"published": True}, "Table 2"),
        ({"size": 0, "published": True}, "^design.size=0: must be positive"),
        ({"epsilon": -1.0, "compute": 1e12}, "^design.epsilon=-1.0: must be positive"),
        ({"reach": 0.5, "compute": 1e12}, "^design.reach=0.5: the reach cannot be smaller than the measured steps"),
        ({"reach": float("inf"), "compute": 1e12}, "^design.reach=inf: the reach cannot be smaller than the measured steps"),
        ({"size": 2_000_000, "compute": 1e12}, r"^privacy.delta=1e-06: not below 1/N = 5e-07"),
        ({"base": "nope", "compute": 1e12}, "^design.base=nope: no recipe has this name"),
        ({"base": "mckenna_grid", "compute": 1e12}, "^design.base=mckenna_grid: losses were measured in rows of 32 tokens, and it has 512"),
    ],
)
def test_what_cannot_be_designed_is_refused(options, key, tmp_path):
    experiment, _ = build(recipes.compose([*BASE, COARSE]))
    with pytest.raises(ConfigError, match=key):
        Design(**({"epsilon": 8.0, "size": 20000} | options))(experiment, RunFolder(tmp_path, ""))


def test_without_a_table_of_ones_own_the_losses_that_come_with_dpx_are_used_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(designs.solve, "nearly", by_central_limit)
    experiment, _ = build(recipes.compose([*BASE, COARSE]))
    Design(epsilon=8.0, size=200_000, compute=1e12)(experiment, RunFolder(tmp_path, ""))
    table = json.loads((tmp_path / "release" / "design.json").read_text())["tables"][0]
    assert {row["model"] for row in table["rows"]} <= {f"width_{width}" for width in (16, 32, 64, 96, 128)}
    assert any("come with dpx" in note for note in table["notes"]) and not any("no claim of" in note for note in table["notes"])


def test_of_a_model_that_is_no_option_the_tables_alone_are_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(designs.solve, "nearly", by_central_limit)
    named = {f"of_mine_{number}": value for number, value in enumerate(PARAMETERS.values())}
    measured(form_l2, deviation=0.01, parameters=named).write(tmp_path / "losses.csv")
    experiment, _ = build(recipes.compose([*BASE[:2], COARSE, "data=synthetic", "job=design"]))
    Design(epsilon=8.0, size=20_000, compute=4e11, measurements=str(tmp_path / "losses.csv"))(experiment, RunFolder(tmp_path, ""))
    assert (tmp_path / "release" / "design.json").is_file() and not (tmp_path / "release" / "experiment").exists()
    shown = capsys.readouterr().out
    assert "no experiment is written: model=of_mine_" in shown and "data=synthetic has no paths" in shown


def test_twice_the_compute_is_never_worse_than_half_of_it(monkeypatch):
    monkeypatch.setattr(designs.solve, "nearly", by_central_limit)
    grid = grid_of(Measurements.read(shipped()))
    surface = surface_of(grid, 128.0, 32.0).for_epsilon(float("inf"))
    found = dict(doubled(surface, Budget(1e13, 800_000, float("inf"), 1e-6)))
    assert found["compute"] is not None and found["nothing"] is not None and found["compute"] <= found["nothing"]


def test_a_printed_optimum_is_looked_up_and_marked(tmp_path):
    experiment, _ = build(recipes.compose(BASE))
    Design(epsilon=4.0, size=10_000_000, published=True)(experiment, RunFolder(tmp_path, ""))
    table = json.loads((tmp_path / "release" / "design.json").read_text())["tables"][0]
    assert table["rows"][0]["loss"] == 2.81 and "not the loss of a trained model" in table["notes"][0]
