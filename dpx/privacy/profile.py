"""Computes consequences of a composition beyond one (epsilon, delta): its privacy profile, its trade-off curve, and bounds on an attacker.

With the profile delta(eps), eps >= 0, of both directions, the least type-II error of a membership test at type-I error alpha is
f(alpha) = max over eps of 0, 1 - delta(eps) - e^eps alpha and e^-eps (1 - delta(eps) - alpha) (Dong, Roth and Su 2022, proposition 2.12).
"""

import math

import numpy as np

from dpx.privacy import closed_form
from dpx.privacy.accounting import Composition

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
