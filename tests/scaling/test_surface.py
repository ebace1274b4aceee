"""The surface: exact at nodes, right beyond the steps that were run, and silent nowhere outside the grid."""

import numpy as np
import pytest

from dpx.cost.measured_runs import Measurements
from dpx.cost.surface import extend, fit_power_law, grid_of, surface_of
from dpx.declaration import ConfigError

from .synthetic import BATCH, PARAMETERS, RATIOS, STEPS, TOKENS, form_l2, measured, rows_of


@pytest.fixture(scope="module")
def surface():
    return surface_of(grid_of(measured(form_l2)), BATCH, TOKENS, width=1, reach=8)


def test_it_is_exact_at_nodes(surface):
    for m in PARAMETERS.values():
        for ratio in RATIOS:
            assert surface.at(m, STEPS, ratio).loss == pytest.approx(form_l2(m, STEPS, ratio), rel=1e-9)


def test_between_nodes_it_lies_between_them(surface):
    at = surface.at(1e5, 1550.0, RATIOS[2] * 1.3)
    corners = [form_l2(m, t, r) for m in (6e4, 2e5) for t in (1500.0, 1600.0) for r in RATIOS[2:4]]
    assert min(corners) <= at.loss <= max(corners) and not at.is_extrapolated and not at.is_outside


def test_beyond_the_measured_steps_it_is_marked_and_near_the_truth(surface):
    found = surface.at(2e5, np.array([4000.0, 16000.0]), RATIOS[4])
    assert found.is_extrapolated.all()
    assert found.loss == pytest.approx(form_l2(2e5, np.array([4000.0, 16000.0]), RATIOS[4]), rel=0.01)


@pytest.mark.parametrize(
    ("m", "t", "ratio"), [(1e4, 500, 2**-8), (5e6, 500, 2**-8), (2e5, 50, 2**-8), (2e5, 1e6, 2**-8), (2e5, 500, 1.0), (2e5, 500, -0.5)]
)
def test_outside_there_is_no_loss(surface, m, t, ratio):
    found = surface.at(m, t, ratio)
    assert found.is_outside and np.isnan(found.loss)


@pytest.mark.parametrize("reach, said", [(1, "^1 records"), (4, "^1 late records")])
def test_too_few_records_are_refused_and_never_extended_to_nothing(reach, said):
    rows = rows_of(form_l2, steps=np.array([100.0, 1000.0])[reach == 1 :])
    with pytest.raises(ConfigError, match=said):
        surface_of(grid_of(Measurements.from_rows(rows)), BATCH, TOKENS, reach=reach)


def test_less_noise_than_was_measured_is_marked_and_given_the_loss_of_the_least(surface):
    found = surface.at(2e5, 500, 2**-30)
    assert found.is_below_ratios and found.loss == pytest.approx(form_l2(2e5, 500.0, RATIOS[0]))
    with pytest.raises(ConfigError, match="epsilon=inf"):
        surface.at(2e5, 500, 0.0)


def test_the_slice_without_noise_is_its_own():
    truth = lambda m, t, r: np.where(r < 2**-30, 1.5, form_l2(m, t, np.maximum(r, 2**-30)))  # noqa: E731
    surface = surface_of(grid_of(measured(truth, ratios=np.array([2.0**-40, *RATIOS]))), BATCH, TOKENS, width=1)
    assert surface.at(2e5, 500, 0.0).loss == pytest.approx(1.5) and len(surface.ratios_R) == len(RATIOS)


def test_what_is_missing_without_noise_costs_the_surface_nothing():
    """The slice takes its own models: neither does it shrink the rectangle, nor the rectangle it."""
    noisy = [row for row in rows_of(form_l2) if row["model"] != "e"]
    slices = [row for row in rows_of(form_l2, ratios=[2.0**-40]) if row["model"] in ("b", "c", "e")]
    alone, both = (surface_of(grid_of(Measurements.from_rows(rows)), BATCH, TOKENS, width=1) for rows in (noisy, noisy + slices))
    assert np.array_equal(alone.losses_MRT, both.losses_MRT) and both.names == ("a", "b", "c", "d")
    assert both.for_epsilon(np.inf).names == ("b", "c", "e") and both.for_epsilon(8) is both
    found = both.at(np.array([6e4, 2e6, 2e4, 6e4]), 500.0, np.array([0.0, 0.0, 0.0, RATIOS[0]]))
    assert found.loss[[0, 1, 3]] == pytest.approx(
        [form_l2(6e4, 500.0, 2.0**-40), form_l2(2e6, 500.0, 2.0**-40), form_l2(6e4, 500.0, RATIOS[0])]
    )
    assert found.is_outside.tolist() == [False, False, True, False] and np.isnan(found.loss[2])


def test_a_power_law_is_found_again_and_a_flat_curve_stays_flat():
    steps = np.linspace(250, 2000, 18)
    e, a, alpha = fit_power_law(steps, np.stack([2.5 + 40 / steps**0.6, 1.0 + 9 / steps**1.5]))
    assert (e, a, alpha) == (pytest.approx([2.5, 1.0], rel=1e-3), pytest.approx([40, 9], rel=2e-2), pytest.approx([0.6, 1.5], rel=5e-3))
    flat = extend(np.linspace(100, 2000, 20), np.full((1, 1, 20), 6.0), np.array([4000.0, 8000.0]))
    assert flat == pytest.approx(6.0, rel=1e-3)


def test_a_power_law_is_the_least_squares_of_a_library():
    """Levenberg-Marquardt, which the paper names, from the truth: no start comes lower."""
    from scipy.optimize import least_squares

    steps = np.linspace(250, 2000, 18)
    losses = 2.5 + 40 / steps**0.6 + 0.01 * np.random.default_rng(0).normal(size=18)
    theirs = least_squares(lambda x: x[0] + x[1] * (steps / 250) ** -x[2] - losses, [2.5, 1.5, 0.6], method="lm")
    e, a, alpha = fit_power_law(steps, losses)
    assert ((e + a / steps**alpha - losses) ** 2).sum() == pytest.approx(2 * theirs.cost, rel=1e-4)


def test_what_is_extended_stays_monotone():
    surface = surface_of(grid_of(measured(form_l2, deviation=0.03, seed=1)), BATCH, TOKENS, reach=8)
    assert (np.diff(surface.losses_MRT, axis=2) <= 1e-9).all() and (np.diff(surface.losses_MRT, axis=1) >= -1e-9).all()
