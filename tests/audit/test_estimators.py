"""Lower bounds on epsilon: closed forms, coverage on sound mechanisms, power on broken ones."""

import math

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binom, norm

from dpx.audit import verdict
from dpx.audit.verdict import Guesses, guess
from dpx.declaration import ConfigError
from dpx.privacy import closed_form

CANARIES = 2000


def responses(epsilon: float, delta: float, seed: int) -> Guesses:
    """Randomised response that, with probability delta, gives a coin away: exactly (epsilon, delta)-DP, and every coin is guessed."""
    drawn = np.random.default_rng(seed)
    honest = drawn.random(CANARIES) < expit(epsilon)
    return Guesses(CANARIES, CANARIES, int(np.sum(honest | (drawn.random(CANARIES) < delta))))


def gaussian(mu: float, guesses: int, seed: int, canaries: int = CANARIES) -> Guesses:
    drawn = np.random.default_rng(seed)
    is_in = drawn.random(canaries) < 0.5
    return guess(is_in * mu + drawn.normal(size=canaries), is_in, guesses)


def test_without_delta_the_p_value_is_the_binomial_tail():
    seen = Guesses(canaries=50, guesses=40, correct=33)
    assert verdict.p_value(seen, 1.0, 0.0) == pytest.approx(binom.sf(32, 40, math.e / (1 + math.e)))


def test_delta_adds_its_worst_windows():
    seen, chance = Guesses(canaries=30, guesses=12, correct=9), expit(0.7)
    windows = [sum(binom.pmf(k, 12, chance) for k in range(9 - i, 9)) / i for i in range(1, 10)]
    expected = binom.sf(8, 12, chance) + 2 * 30 * 1e-3 * max(windows)
    assert verdict.p_value(seen, 0.7, 1e-3) == pytest.approx(expected)


def test_one_coin_is_bounded_by_its_own_curve():
    """With one guess of one coin (*) reads P[correct] <= F(P[wrong]): for pure DP e^eps / (1 + e^eps), exactly."""
    seen, tight = Guesses(1, 1, 1), float(expit(1.5))
    assert not verdict.refutes(seen, verdict.approximate(1.5, 0.0), tight * (1 - 1e-6))
    assert verdict.refutes(seen, verdict.approximate(1.5, 0.0), tight * (1 + 1e-6))
    assert verdict.refutes(seen, verdict.gaussian(1.0), float(norm.cdf(0.5)) * (1 + 1e-6))
    assert not verdict.refutes(seen, verdict.gaussian(1.0), float(norm.cdf(0.5)) * (1 - 1e-6))


def test_nothing_is_learnt_from_chance():
    seen = Guesses(1000, 1000, 500)
    assert verdict.one_run_lower_bound(seen, 1e-5, 0.05) == 0
    assert verdict.f_dp_lower_bound(seen, 1e-5, 0.05) == 0
    assert verdict.mu_lower_bound(seen, 0.05) == 0


@pytest.mark.parametrize("curve", [verdict.approximate(1.0, 1e-3), verdict.approximate(0.0, 0.0), verdict.gaussian(0.7)])
def test_inverses_rise_and_stay_below_the_diagonal(curve):
    rates = np.linspace(0, 1, 101)
    values = np.array([curve(float(rate)) for rate in rates])
    assert np.all(np.diff(values) >= 0) and np.all(values <= rates + 1e-12)


def test_an_approximate_curve_is_the_hull_of_its_definition():
    """F(F^-1(y)) = y wherever F is not flat, for F = 1 - f of Wasserman and Zhou."""
    epsilon, delta = 0.8, 0.01
    inverse = verdict.approximate(epsilon, delta)
    for rate in (0.05, 0.3, 0.6, 0.9, 0.98):
        x = inverse(rate)
        assert min(delta + math.exp(epsilon) * x, 1 - math.exp(-epsilon) * (1 - delta - x)) == pytest.approx(rate)


BOUNDS = {"one_run": verdict.one_run_lower_bound, "f_dp": verdict.f_dp_lower_bound}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (2.0, 0.0), (1.0, 1e-4)])
def test_randomised_response_is_bounded_closely_and_from_below(name, epsilon, delta):
    """Error 0.1 a trial: more than 6 of 20 above the truth has probability 2e-3 where the bound is only just valid."""
    found = np.array([BOUNDS[name](responses(epsilon, delta, seed), delta, 0.1) for seed in range(20)])
    assert np.sum(found > epsilon) <= 6
    assert np.mean(found) > epsilon - 0.35


def test_coverage_of_randomised_response_is_what_is_stated():
    """The tail of each number of correct guesses is never above the error at which the bound passes the truth."""
    epsilon, error, r = 1.0, 0.05, 60
    for bound in BOUNDS.values():
        first = next(v for v in range(r + 1) if bound(Guesses(r, r, v), 0.0, error) > epsilon)
        assert binom.sf(first - 1, r, expit(epsilon)) <= error < binom.sf(first - 4, r, expit(epsilon))


def test_gaussian_coverage_and_power():
    sound = [verdict.mu_lower_bound(gaussian(0.5, 200, seed), 0.05) for seed in range(12)]
    assert np.sum(np.array(sound) > 0.5) <= 3
    assert np.mean(sound) > 0.2
    assert all(verdict.mu_lower_bound(gaussian(1.0, 300, seed, canaries=10_000), 0.05) > 0.5 for seed in range(6))


def test_a_gaussian_never_passes_its_own_epsilon():
    delta = 1e-5
    truth = closed_form.epsilon(1.0, delta)
    for seed in range(5):
        seen = gaussian(1.0, 300, seed, canaries=10_000)
        for bound in (*BOUNDS.values(), verdict.gaussian_dp_lower_bound):
            assert bound(seen, delta, 1e-3) <= truth


def test_more_correct_guesses_prove_more():
    for bound in (*BOUNDS.values(), verdict.gaussian_dp_lower_bound):
        found = [bound(Guesses(1000, 100, correct), 1e-5, 0.05) for correct in (50, 70, 90, 100)]
        assert found == sorted(found) and found[0] == 0 < found[2] < found[3]


def test_guesses_are_the_outermost_scores():
    scores, is_in = np.array([0.1, -3.0, 2.0, 0.2, -1.0, 5.0]), np.array([True, False, True, True, True, False])
    assert guess(scores, is_in, 4) == Guesses(6, 4, 2)


@pytest.mark.parametrize("guesses", [0, 3, 8])
def test_guesses_that_cannot_be_made_are_refused(guesses):
    with pytest.raises(ConfigError, match=f"guesses={guesses}"):
        guess(np.zeros(6), np.zeros(6, bool), guesses)
