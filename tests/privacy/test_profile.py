"""The profile of one Gaussian is known in closed form; what is derived from it must be too."""

import numpy as np
import pytest
from scipy.stats import norm

from dpx.privacy import closed_form
from dpx.privacy.accounting import compose
from dpx.privacy.events import Release
from dpx.privacy.profile import Profile

MU = 1.5


@pytest.fixture(scope="module", params=["pld", "deterministic"])
def profile(request):
    return Profile(compose([(Release(noise_multiplier=1 / MU, kind="gaussian"), 1)], request.param))


def test_advantage_is_total_variation(profile):
    assert profile.advantage == pytest.approx(2 * norm.cdf(MU / 2) - 1, rel=1e-3)


@pytest.mark.parametrize("alpha", [1e-4, 1e-3, 0.01, 0.2, 0.5, 0.9])
def test_the_trade_off_is_gaussian_and_errs_to_the_attacker(profile, alpha):
    truth = norm.cdf(norm.ppf(1 - alpha) - MU)
    assert truth * 0.98 - 1e-3 <= profile.type_two_error(alpha) <= truth + 1e-6
    assert 1 - truth - 1e-6 <= profile.true_positive_rate(alpha) <= 1 - truth * 0.98 + 1e-3


def test_the_gaussian_parameter_is_found_from_above(profile):
    assert MU * (1 - 1e-6) <= profile.gdp_parameter() <= MU * 1.02


def test_the_curve_is_decreasing_and_convex():
    profile = Profile(compose([(Release(noise_multiplier=1.0, sampling_probability=0.05), 50)], interval=1e-3))
    values = np.array([profile.type_two_error(alpha) for alpha in np.linspace(0, 1, 41)])
    assert (np.diff(values) <= 1e-12).all() and (np.diff(values, 2) >= -1e-9).all() and values[-1] == 0
    assert profile.true_positive_rate(0.01) - 0.01 <= profile.advantage


@pytest.mark.parametrize("q", [1e-9, 1e-8, 1e-6])
def test_a_step_that_tells_next_to_nothing_has_a_gaussian_parameter(q):
    profile = Profile(compose([(Release(noise_multiplier=2.0, sampling_probability=q), 1)]))
    mu = profile.gdp_parameter()
    assert closed_form.delta(mu, 0.0) == pytest.approx(profile.advantage, rel=1e-3)
