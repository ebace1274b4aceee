"""Gaussian releases that show who takes part: the sum over uses, against Du and Mi's settings, a simulation and known limits."""

import math

import numpy as np
import pytest

from dpx.privacy import closed_form

# Du and Mi 2021, section 4.1 and Table 2: D, then (sigma at a target to three decimals, epsilon at delta 1/2D) for both targets.
PRINTED = {
    "SST-2": (67_349, (0.346, 67.7), (0.317, 78.6)),
    "QNLI": (104_743, (0.333, 74.0), (0.308, 84.6)),
    "QQP": (363_846, (0.308, 90.2), (0.288, 101.3)),
    "MNLI": (392_702, (0.307, 91.0), (0.287, 102.3)),
}


@pytest.mark.parametrize(("task", "place"), [(task, place) for task in PRINTED for place in (0, 1)])
def test_epsilon_of_frozen_dp_fp_at_the_papers_settings(task, place):
    size, *cells = PRINTED[task]
    sigma, expected = cells[place]
    # Three epochs at batch 32 of 32 micro-batches: 3 D draws at p = 1 / D.
    assert closed_form.epsilon_by_uses(sigma, 3 * size, 1 / size, 1 / (2 * size)) == pytest.approx(expected, rel=2e-3)


def test_releases_that_always_take_place_are_one_gaussian():
    for sigma, count in ((1.0, 1), (8.0, 10)):
        expected = closed_form.epsilon(math.sqrt(count) / sigma, 1e-6)
        assert closed_form.epsilon_by_uses(sigma, count, 1.0, 1e-6) == pytest.approx(expected, rel=1e-8)


def test_delta_is_that_of_simulated_losses():
    count, p, sigma, epsilon = 20, 0.1, 1.2, 1.5
    rng = np.random.default_rng(0)
    mu_N = np.sqrt(rng.binomial(count, p, 400_000)) / sigma
    loss_N = mu_N**2 / 2 + mu_N * rng.standard_normal(len(mu_N))
    delta_N = np.maximum(0.0, -np.expm1(epsilon - loss_N))
    assert abs(delta_N.mean() - closed_form.delta_by_uses(sigma, count, p, epsilon)) < 5 * delta_N.std() / math.sqrt(len(delta_N))


def test_a_unit_that_is_hardly_ever_used_costs_nothing_at_a_larger_delta():
    assert closed_form.epsilon_by_uses(0.3, 1, 1e-9, 1e-6) == 0.0
    assert closed_form.delta_by_uses(1e-3, 10, 0.5, 1.0) == pytest.approx(1 - 0.5**10, rel=1e-9)
