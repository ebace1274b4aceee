"""Computes approximations that papers print and that are not bounds, apart from every bound.

The central limit of Gaussian DP for Poisson-sampled Gaussians (Bu et al. 2020, arXiv 1911.11607):
mu_total = sqrt(sum_t q_t^2 (exp(1 / sigma_t^2) - 1)). It can report a tenth of the true epsilon at small noise.
"""

import math
from collections.abc import Iterable, Sequence

from dpx.declaration import require
from dpx.privacy import closed_form
from dpx.privacy.accounting import Charges, Real
from dpx.privacy.events import Release


def gdp_clt_mu(charges: Charges) -> float:
    """Returns the Gaussian-DP parameter mu of the central limit; infinite if exp(1/sigma^2) overflows."""
    if any(release.noise_multiplier**-2 > 700 for release, _ in charges):
        return math.inf
    return math.sqrt(math.fsum(n * release.sampling_probability**2 * math.expm1(release.noise_multiplier**-2) for release, n in charges))


def gdp_clt_epsilon(charges: Charges, delta: Real) -> float:
    """Returns epsilon by the central limit, which is not a bound."""
    mu = gdp_clt_mu(charges)
    if mu == 0:
        return 0.0
    return closed_form.epsilon(mu, delta) if math.isfinite(mu) else math.inf


# The noise multipliers between which the limit is solved: with less noise exp(1 / sigma^2) is above 1e271.
SMALLEST, LARGEST = 0.04, 1e4


def gdp_clt_noise_multiplier(stages: Iterable[Sequence[Real]], *, epsilon: Real, delta: Real, value: str = "epsilon") -> float:
    """Returns the noise multiplier at which the central limit gives `epsilon` (Du and Mi 2021, eq. 11).

    It is sigma = (ln(1 + mu_total^2 / sum_t q_t^2))^-1/2.

    For reproducing papers; it bounds nothing. Raises `ConfigError`, with `value` as the name of the target, for a target that the limit
    reaches with no noise multiplier between 0.04 and 1e4.
    """
    stages = list(stages)
    low, high = (
        gdp_clt_epsilon([(Release(noise_multiplier=end, sampling_probability=q), int(steps)) for q, steps in stages], delta)
        for end in (LARGEST, SMALLEST)
    )
    require(
        low <= epsilon <= high,
        f"{value}={epsilon:g}",
        f"by the central limit no noise multiplier from {SMALLEST:g} to {LARGEST:g} gives this epsilon",
        f"Use a target from {low:.3g} to {high:.3g}, or noise=multiplier",
    )
    rates = math.fsum(int(steps) * q * q for q, steps in stages)
    return math.log1p(closed_form.mu(float(epsilon), float(delta)) ** 2 / rates) ** -0.5
