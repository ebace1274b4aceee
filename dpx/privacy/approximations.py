"""Approximations that papers print and that are not bounds, kept separate from every bound.

The central limit of Gaussian DP for Poisson-sampled Gaussians (Bu et al. 2020, arXiv 1911.11607):
mu_total = sqrt(sum_t q_t^2 (exp(1 / sigma_t^2) - 1)). It can report a tenth of the true epsilon at small noise.
"""

import math
from collections.abc import Iterable, Sequence

from dpx.privacy import closed_form
from dpx.privacy.accounting import Charges, Real
from dpx.privacy.events import Release


def gdp_clt_mu(charges: Charges) -> float:
    """The limit's Gaussian-DP parameter; infinite where exp(1/sigma^2) overflows."""
    if any(release.noise_multiplier**-2 > 700 for release, _ in charges):
        return math.inf
    return math.sqrt(math.fsum(n * release.sampling_probability**2 * math.expm1(release.noise_multiplier**-2) for release, n in charges))


def gdp_clt_epsilon(charges: Charges, delta: Real) -> float:
    """The limit's epsilon: not a bound."""
    mu = gdp_clt_mu(charges)
    if mu == 0:
        return 0.0
    return closed_form.epsilon(mu, delta) if math.isfinite(mu) else math.inf


def gdp_clt_noise_multiplier(stages: Iterable[Sequence[Real]], *, epsilon: Real, delta: Real) -> float:
    """Sigma at which the limit reads `epsilon`, by bisection: for reproducing papers, never for a run."""
    target = closed_form.mu(float(epsilon), float(delta))
    low, high = 0.04, 1e4
    stages = list(stages)
    while high / low > 1 + 1e-12:
        middle = math.sqrt(low * high)
        reached = gdp_clt_mu([(Release(noise_multiplier=middle, sampling_probability=q), int(steps)) for q, steps in stages])
        low, high = (middle, high) if reached > target else (low, middle)
    return high
