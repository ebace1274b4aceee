"""What an attacker of random allocation really achieves: never more than is stated, and more than that where the places are told."""

import math

import numpy as np
import pytest
from scipy.stats import beta, norm

from dpx import sampler
from dpx.privacy import accounting
from dpx.privacy.events import Release
from dpx.randomness import RootSecret

SECRET = RootSecret.from_seed(64)
# Of one side of one test.
LEVEL = 1e-6


def stated(steps: int, sigma: float, epochs: int):
    charges = [(Release(noise_multiplier=sigma, sampling_probability=1 / steps, kind="random_allocation"), epochs)]
    return accounting.compose(charges, "pld", interval=2e-3)


def observed(units: int, steps: int, sigma: float, epochs: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns which units are in, their log-likelihood ratios, and the sums of their observations at their own places.

    The places are those of the sampler, each unit a canary in its own direction; noise is drawn afresh.
    """
    draws = np.random.default_rng(seed)
    is_in, ratios, told = draws.random(units) < 0.5, np.zeros(units), np.zeros(units)
    for epoch in range(epochs):
        exponents = np.zeros(units)
        for place in range(steps):
            mine = sampler.draw(
                sampler.RandomAllocation(), units, 1 / steps, lambda *at: SECRET.generator("sample", *at), epoch * steps + place
            )
            seen = sigma * draws.standard_normal(units)
            seen[mine] += is_in[mine]
            told[mine] += seen[mine]
            exponents += np.exp((2 * seen - 1) / (2 * sigma**2))
        ratios += np.log(exponents / steps)
    return is_in, ratios, told


def epsilon_shown(is_in: np.ndarray, scores: np.ndarray, threshold: float, delta: float) -> float:
    """Returns a lower bound on epsilon at `delta` by a test that says in above the threshold, with exact binomial limits."""
    hits, alarms = int((scores[is_in] > threshold).sum()), int((scores[~is_in] > threshold).sum())
    least = beta.ppf(LEVEL, hits, is_in.sum() - hits + 1) if hits else 0.0
    most = beta.ppf(1 - LEVEL, alarms + 1, (~is_in).sum() - alarms)
    return math.log((least - delta) / most) if least > delta else 0.0


@pytest.mark.parametrize(("steps", "epochs"), [(20, 1), pytest.param(50, 4, marks=pytest.mark.slow)])
def test_canaries_stay_below_the_claim_and_exceed_it_where_places_are_told(steps: int, epochs: int) -> None:
    delta = 1e-3
    claim = stated(steps, 1.0, epochs).epsilon(delta)
    is_in, ratios, told = observed(20_000, steps, 1.0, epochs, seed=1)
    hidden = max(epsilon_shown(is_in, ratios, threshold, delta) for threshold in (0.2, 0.5, 1.0, claim))
    # Without the places the test must see something, or it would show nothing of the sampler.
    assert 0.1 * claim < hidden <= claim
    mean, spread = epochs, math.sqrt(epochs)
    assert max(epsilon_shown(is_in, told, mean + at * spread, delta) for at in (0.0, 1.0, 2.0)) > claim


def losses_of(steps: int, sigma: float, epochs: int, samples: int, adds: bool) -> np.ndarray:
    """Returns simulated privacy losses of one direction."""
    draws = np.random.default_rng([steps, epochs, samples, adds])
    losses = np.zeros(samples)
    for _ in range(epochs):
        sums = np.zeros(samples)
        for place in range(steps):
            # By symmetry the unit takes part in the first step.
            seen = sigma * draws.standard_normal(samples) + (place == 0 and not adds)
            sums += np.exp((2 * seen - 1) / (2 * sigma**2))
        losses += (-1 if adds else 1) * np.log(sums / steps)
    return losses


def delta_shown(losses: np.ndarray, epsilon: float) -> float:
    """Returns a lower bound on delta at `epsilon` in the direction of `losses`.

    Delta is the mean of max(0, 1 - exp(epsilon - loss)), which lies in [0, 1]: a coin with each value as its probability has the same mean,
    so the limit of the binomial is exact.
    """
    values = np.maximum(0.0, -np.expm1(np.minimum(epsilon - losses, 0.0)))
    successes = int((np.random.default_rng(0).random(len(losses)) < values).sum())
    return float(beta.ppf(LEVEL, successes, len(losses) - successes + 1)) if successes else 0.0


# With few steps, many steps, little and much noise.
CASES = [(1, 1.0, 1), (2, 0.5, 3), (10, 1.0, 5), (30, 0.4, 2), (100, 1.0, 10), (300, 2.0, 10), (1000, 0.7, 3), (1000, 1.0, 1)]


@pytest.mark.parametrize(
    ("steps", "sigma", "epochs", "samples"),
    [(10, 0.7, 2, 20_000), *(pytest.param(*case, 200_000, marks=pytest.mark.slow) for case in CASES)],
)
def test_simulated_losses_show_no_larger_delta_than_is_stated(steps: int, sigma: float, epochs: int, samples: int) -> None:
    composed, both = stated(steps, sigma, epochs), [losses_of(steps, sigma, epochs, samples, adds) for adds in (False, True)]
    for target in (0.1, 1e-2, 1e-3, 1e-4):
        epsilon = composed.epsilon(target)
        shown = [delta_shown(losses, epsilon) for losses in both]
        assert max(shown) <= target
        # The larger direction is close: a bound that is far too large would pass everything.
        assert target < 1e-2 or epsilon == 0 or max(shown) > 0.6 * target


def test_the_exact_limits_hold_for_the_gaussian() -> None:
    """What is simulated for one step is the Gaussian release, whose delta is known."""
    found = delta_shown(losses_of(1, 1.0, 1, 50_000, adds=False), 1.0)
    exact = norm.cdf(0.5 - 1) - math.e * norm.cdf(-0.5 - 1)
    assert 0.9 * exact < found < exact
