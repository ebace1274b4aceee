"""Computes the gain of an attacker beyond one (epsilon, delta): excess vulnerability, in three equal forms.

The third form, by profiles, is `dpx.cost.designs.excess_by_profiles`.

For a mechanism with privacy profile delta(eps), eps in all of R, and trade-off function f: f(alpha) = max over eps of
1 - delta(eps) - e^eps alpha, and delta(eps) = max over alpha of 1 - f(alpha) - e^eps alpha. Excess vulnerability of using M~ instead of M
(Kaissis et al. 2024; McKenna et al. 2025, appendix D) is
  inf {kappa >= 0: f(alpha + kappa) - kappa <= f~(alpha) for all alpha}
= max over priors pi of R(pi) - R~(pi), R(pi) = min over alpha of pi alpha + (1 - pi) f(alpha)
= max over eps in R of (delta~(eps) - delta(eps)) / (1 + e^eps).
"""

import numpy as np


def over_all_epsilons(epsilons: np.ndarray, forward: np.ndarray, backward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (epsilons in R ascending, delta of P against Q), from the profiles of (P, Q) and (Q, P) at `epsilons` >= 0, ascending.

    delta of (P, Q) at -eps is 1 - e^-eps + e^-eps delta of (Q, P) at eps. A pair of subsampled Gaussians is not symmetric.
    """
    negative = 1 - np.exp(-epsilons) + np.exp(-epsilons) * backward
    below = epsilons > 0
    return np.concatenate([-epsilons[below][::-1], epsilons]), np.concatenate([negative[below][::-1], forward])


def trade_off(epsilons: np.ndarray, deltas: np.ndarray, alphas: np.ndarray) -> np.ndarray:
    """Returns f at `alphas`, the least type-II error; it is a lower bound if the profile is known at few epsilons."""
    lines = 1 - deltas - np.exp(np.minimum(epsilons, 700)) * alphas[..., None]
    return np.clip(lines.max(-1), 0.0, 1.0)


def excess_by_risks(alphas: np.ndarray, errors: np.ndarray, other: np.ndarray, priors: np.ndarray) -> float:
    """Computes the excess from both trade-off functions at `alphas`: the largest fall of the Bayes risk over `priors`."""
    risk = np.min(priors[:, None] * alphas + (1 - priors[:, None]) * errors, axis=1)
    risk_other = np.min(priors[:, None] * alphas + (1 - priors[:, None]) * other, axis=1)
    return max(0.0, float((risk - risk_other).max()))


def excess_by_trade_off(alphas: np.ndarray, errors: np.ndarray, other: np.ndarray, tolerance: float = 1e-9) -> float:
    """Computes the excess from both trade-off functions, linear between `alphas` in 0..1.

    It is the smallest shift of f that brings it below f~, found by bisection.
    """

    def is_below(kappa: float) -> bool:
        at = alphas[alphas + kappa <= 1]
        return bool((np.interp(at + kappa, alphas, errors) - kappa <= np.interp(at, alphas, other) + 1e-15).all())

    low, high = 0.0, 1.0
    if is_below(0.0):
        return 0.0
    while high - low > tolerance:
        middle = (low + high) / 2
        low, high = (low, middle) if is_below(middle) else (middle, high)
    return high
