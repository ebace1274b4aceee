"""Repeat and select: epsilon against dp-accounting's own event, and the drawn numbers against scipy's distributions."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event, rdp
from scipy import stats

from dpx.declaration import ConfigError
from dpx.privacy import accounting, search_accounting
from dpx.privacy.events import Release

CHARGES = [(Release(noise_multiplier=1.1, sampling_probability=0.01), 200)]


@pytest.mark.parametrize(("mean", "shape"), [(30, 0.0), (30, 0.5), (30, 1.0), (5, 2.0), (30, math.inf)])
def test_epsilon_is_that_of_the_event_by_dp_accounting(mean: int, shape: float) -> None:
    step = dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.1))
    event = dp_event.RepeatAndSelectDpEvent(dp_event.SelfComposedDpEvent(step, 200), mean, shape)
    reference = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL).compose(event)
    found = search_accounting.epsilon(CHARGES, delta=1e-6, mean=mean, shape=shape)
    assert found == pytest.approx(reference.get_epsilon(1e-6), rel=1e-6)
    assert found > accounting.compose(CHARGES, "rdp").epsilon(1e-6), "choosing costs something"


@pytest.mark.parametrize(("gamma", "shape", "rho"), [(0.1, 1.0, 0.05), (0.01, 0.5, 0.01), (0.1, 0.0, 0.1)])
def test_epsilon_of_a_gaussian_is_the_closed_form(gamma: float, shape: float, rho: float) -> None:
    """Papernot and Steinke 2022, corollary 4: the Renyi divergence of the best of a geometric number of Gaussian mechanisms."""
    mean = search_accounting._mean(gamma, shape)
    order = 1 + math.sqrt(math.log(mean) / rho)
    orders = [math.sqrt(-math.log(gamma) / rho), order]
    divergence = 2 * math.sqrt(rho * math.log(mean)) + 2 * (1 + shape) * math.sqrt(-rho * math.log(gamma)) - shape * rho
    event = search_accounting.repeated([(Release(noise_multiplier=math.sqrt(0.5 / rho), kind="gaussian"), 1)], "zero_out", mean, shape)
    composed = accounting.renyi(event, orders=orders)
    delta = 1e-6
    bound = divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
    assert composed.epsilon(delta) <= bound * (1 + 1e-9)
    assert composed.epsilon(delta) == pytest.approx(bound, rel=0.2)


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("mean", [1.5, 8.0])
def test_drawn_numbers_follow_the_truncated_negative_binomial(mean: float, shape: float) -> None:
    gamma = search_accounting.truncation(mean, shape)
    uniforms = (np.arange(1_000) + 0.5) / 1_000
    numbers = np.array([search_accounting.quantile(float(u), mean, shape) for u in uniforms])
    assert numbers.min() == 1
    assert numbers.mean() == pytest.approx(mean, rel=0.05)
    assert search_accounting._mean(gamma, shape) <= mean, "rounded towards fewer repetitions"
    for number in (1, 2, 3, 10):
        # scipy's negative binomial starts at zero; here zero is cut off.
        cut = stats.nbinom.pmf(number, shape, gamma) / (1 - stats.nbinom.pmf(0, shape, gamma)) if shape else 0.0
        expected = cut if shape else stats.logser.pmf(number, 1 - gamma)
        assert (numbers == number).mean() == pytest.approx(expected, abs=2e-3)


def test_a_poisson_number_may_be_nought() -> None:
    uniforms = (np.arange(1_000) + 0.5) / 1_000
    numbers = np.array([search_accounting.quantile(float(u), 3.0, math.inf) for u in uniforms])
    for number in range(6):
        assert (numbers == number).mean() == pytest.approx(stats.poisson.pmf(number, 3), abs=2e-3)


def test_a_mean_of_one_is_one_trial_and_costs_next_to_nothing() -> None:
    """The theorem's second term is the divergence at the smallest order of the grid, 1.1 and not 1."""
    assert {search_accounting.quantile(u, 1.0, 1.0) for u in (0.0, 0.5, 0.999999)} == {1}
    alone = accounting.compose(CHARGES, "rdp").epsilon(1e-6)
    assert alone <= search_accounting.epsilon(CHARGES, delta=1e-6, mean=1, shape=1.0) < 1.01 * alone


def test_a_mean_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="mean=0.5"):
        search_accounting.quantile(0.5, 0.5, 1.0)
