"""Recipes of McKenna et al. 2025 that train: their sweeps are the paper's, and what they take from the grid agrees with it."""

import pytest

from dpx.config import build, recipes
from dpx.scaling.published import BASELINES, SEQUENCE_LENGTH


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
    ],
)
def test_a_sweep_has_the_runs_of_its_figure(name, runs):
    assert len(recipes.points(name)) == runs


def test_the_three_settings_cost_what_figure_5_says_and_decay_as_the_grid_does():
    grid, _ = build(recipes.planned("mckenna_grid", []))
    for model, (_, parameters, steps, batch_size) in zip(("large", "medium", "tiny"), BASELINES, strict=True):
        experiment, _ = build(recipes.planned("mckenna_fig5_direct", [f"model={model}"]))
        assert (experiment.steps, experiment.batch_schedule.size) == (steps, batch_size)
        assert 6 * parameters * batch_size * SEQUENCE_LENGTH * steps == pytest.approx(1e19, rel=0.01)
        ours, theirs = experiment.lr_schedule.at(steps - 1, steps), grid.lr_schedule.at(steps - 1, grid.steps)
        assert ours == pytest.approx(theirs, rel=2e-3)
