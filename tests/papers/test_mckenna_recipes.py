"""Recipes of McKenna et al. 2025 that train: their sweeps are the paper's, and what they take from the grid agrees with it."""

import math

import pytest

from dpx.config import build, declare, recipes
from dpx.packages import option_file
from dpx.sampler.batch_schedule import Constant
from dpx_papers.scaling.published import SEQUENCE_LENGTH

# Section 4.4: settings that are compared with the optimum, as (model, parameters, steps, batch size).
BASELINES = (
    ("BertLarge", 335.2e6, 7_500, 1_295),
    ("BertMedium", 41.0e6, 5_000, 15_879),
    ("BertTiny", 4.6e6, 2_500, 283_061),
)


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("mckenna_clip_check", 1),
        ("mckenna_fig5_direct", 3 * 4),
        ("mckenna_fig7_physical_batch", 3 * 4 * 3),
        ("mckenna_fig8_batch_lr", 4 * 4),
        ("mckenna_fig9_batch_large", 3 * 4 * 3),
        ("mckenna_fig10_decoder", 3 * 4 * 3),
        ("mckenna_fig12_lr_curves", 2 * 4 * 7),
        ("mckenna_lr_nonprivate", 7 * 5),
        ("laptop/mckenna_clip_check", 1),
        ("laptop/mckenna_fig5_direct", 3 * 2),
        ("laptop/mckenna_fig7_physical_batch", 3 * 3 * 2),
        ("laptop/mckenna_fig8_batch_lr", 3 * 3),
        ("laptop/mckenna_fig9_batch_large", 2 * 3 * 2),
        ("laptop/mckenna_fig10_decoder", 2 * 3 * 2),
        ("laptop/mckenna_fig12_lr_curves", 2 * 3 * 5),
        ("laptop/mckenna_lr_nonprivate", 2 * 5),
    ],
)
def test_a_sweep_has_the_runs_of_its_figure(name, runs):
    assert len(recipes.points(name)) == runs


def _decays_as(recipe: str, grid: str, model: str) -> None:
    """The last rate of a shorter run is what the grid's schedule has at that step."""
    whole, _ = build(recipes.plan_config(grid, []))
    experiment, _ = build(recipes.plan_config(recipe, [f"model={model}"] if model else []))
    steps = experiment.steps
    assert experiment.lr_schedule.at(steps - 1, steps) == pytest.approx(whole.lr_schedule.at(steps - 1, whole.steps), rel=2e-3)


def test_the_three_settings_cost_what_figure_5_says_and_decay_as_the_grid_does():
    for model, (_, parameters, steps, batch_size) in zip(("large", "medium", "tiny"), BASELINES, strict=True):
        experiment, _ = build(recipes.plan_config("mckenna_fig5_direct", [f"model={model}"]))
        assert isinstance(experiment.batch_schedule, Constant)
        assert (experiment.steps, experiment.batch_schedule.size) == (steps, batch_size)
        assert 6 * parameters * batch_size * SEQUENCE_LENGTH * steps == pytest.approx(1e19, rel=0.01)
        _decays_as("mckenna_fig5_direct", "mckenna_grid", model)
    _decays_as("mckenna_clip_check", "mckenna_grid", "")
    _decays_as("laptop/mckenna_clip_check", "laptop/mckenna_grid", "")
    _decays_as("laptop/mckenna_lr_nonprivate", "laptop/mckenna_grid", "width_64")


def test_the_laptops_three_settings_are_the_baselines_of_its_lab():
    declared = declare(option_file("analysis/lab", "laptop"), "lab")
    for one in declared.baselines:
        experiment, _ = build(recipes.plan_config("laptop/mckenna_fig5_direct", [f"model={one.model}"]))
        assert isinstance(experiment.batch_schedule, Constant)
        assert (experiment.steps, experiment.batch_schedule.size) == (one.steps, one.batch_size)
        parameters = sum(math.prod(shape) for shape in experiment.task.parameter_shapes(experiment.model, 1024).values())
        assert parameters == one.parameters
        assert 6 * parameters * one.batch_size * 32 * one.steps == pytest.approx(declared.compute, rel=0.01)
        _decays_as("laptop/mckenna_fig5_direct", "laptop/mckenna_grid", one.model)
