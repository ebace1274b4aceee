"""Computes consequences of a composition beyond one (epsilon, delta): its privacy profile, its trade-off curve, and bounds on an attacker.

With the profile delta(eps), eps >= 0, of both directions, the least type-II error of a membership test at type-I error alpha is
f(alpha) = max over eps of 0, 1 - delta(eps) - e^eps alpha and e^-eps (1 - delta(eps) - alpha) (Dong, Roth and Su 2022, proposition 2.12).

An approximation that papers print, and that is no bound, is kept apart: the central limit of Gaussian DP for Poisson-sampled
Gaussians (Bu et al. 2020, arXiv 1911.11607): mu_total = sqrt(sum_t q_t^2 (exp(1 / sigma_t^2) - 1)). It can report a tenth of the true
epsilon at small noise.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from dpx.declaration import require
from dpx.privacy import closed_form
from dpx.privacy.accounting import Charges, Composition, Real
from dpx.privacy.events import Release

# Deltas below this are mostly truncation by the accountant, and this module claims nothing at them.
SMALLEST_DELTA = 1e-10


class Profile:
    """The privacy profile delta(eps) of `composed` on a grid of epsilons that ends where delta falls below `SMALLEST_DELTA`.

    Every value computed from it errs in the attacker's favour.
    """

    def __init__(self, composed: Composition, points: int = 200):
        end = 1.0
        while composed.delta(end) > SMALLEST_DELTA and end < 1000:
            end *= 1.5
        self.epsilons = np.concatenate([[0.0], np.geomspace(end * 1e-4, end, points - 1)])
        self.deltas = np.array([composed.delta(float(epsilon)) for epsilon in self.epsilons])

    @property
    def advantage(self) -> float:
        """Returns the membership advantage: the largest difference of true-positive and false-positive rate, delta(0)."""
        return float(self.deltas[0])

    def type_two_error(self, alpha: float) -> float:
        """Returns a lower bound on f(alpha): the maximum of the supporting lines at the grid's epsilons."""
        lines = np.concatenate(
            [1 - self.deltas - np.exp(np.minimum(self.epsilons, 700)) * alpha, np.exp(-self.epsilons) * (1 - self.deltas - alpha)]
        )
        return max(0.0, float(lines.max()))

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """Returns the largest true-positive rate of any membership test at this false-positive rate."""
        return 1.0 - self.type_two_error(false_positive_rate)

    def gdp_parameter(self) -> float:
        """Returns the smallest mu whose Gaussian profile is above this one wherever delta is at least `SMALLEST_DELTA`."""
        known = [(e, d) for e, d in zip(self.epsilons, self.deltas, strict=True) if SMALLEST_DELTA <= d < 1]
        if not known:
            return math.inf if self.deltas[0] >= 1 else 0.0
        return max(closed_form.mu(float(epsilon), float(delta)) for epsilon, delta in known) * (1 + 1e-9)


def gdp_clt_epsilon(charges: Charges, delta: Real) -> float:
    """Returns epsilon by the central limit, which is not a bound; infinite if exp(1/sigma^2) overflows."""
    if any(release.noise_multiplier**-2 > 700 for release, _ in charges):
        return math.inf
    squares = (n * release.sampling_probability**2 * math.expm1(release.noise_multiplier**-2) for release, n in charges)
    mu = math.sqrt(math.fsum(squares))
    return closed_form.epsilon(mu, delta) if mu else 0.0


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
