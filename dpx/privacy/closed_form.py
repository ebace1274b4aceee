"""One Gaussian release, exactly: the profile every accountant must agree with at q = 1.

Balle and Wang 2018, theorem 8: with mu = sensitivity / standard deviation,
delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu); k releases at sigma are one at sigma / sqrt(k).
"""

import math
from collections.abc import Callable

import dp_accounting
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr, ndtri

from dpx.declaration import ConfigError


def delta(mu: float, epsilon: float | int) -> float:
    """Smallest delta of a Gaussian release with sensitivity / standard deviation `mu`."""
    first, second = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return math.exp(first) * -math.expm1(min(second - first, 0.0))


def epsilon(mu: float, target_delta: float) -> float:
    """Smallest epsilon at `target_delta`, rounded up in its last digits."""
    if delta(mu, 0.0) <= target_delta:
        return 0.0
    high = 1.0
    while delta(mu, high) > target_delta:
        high *= 2
    return root(lambda value: delta(mu, value) - target_delta, 0.0, high, 1e-12) * (1 + 1e-9) + 1e-12


def mu(target_epsilon: float | int, target_delta: float) -> float:
    """Largest mu with `delta(mu, target_epsilon) <= target_delta`, rounded down in its last digits."""
    low, high, tolerance = 1e-9, 1.0, 1e-13
    while delta(low, target_epsilon) > target_delta:
        low, tolerance = low * 1e-6, tolerance * 1e-6
    while delta(high, target_epsilon) < target_delta:
        high *= 2
    return root(lambda value: delta(value, target_epsilon) - target_delta, low, high, tolerance) * (1 - 1e-10)


def type_two_error(mu: float, alpha: float) -> float:
    """Least false-negative rate at false-positive rate `alpha` against a Gaussian release: Phi(Phi^-1(1 - alpha) - mu)."""
    return float(ndtr(-ndtri(alpha) - mu)) if math.isfinite(mu) else 0.0


def root(excess: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """Where `excess` changes sign between `low` and `high`, to `tolerance` (Brent)."""
    return float(brentq(excess, low, high, xtol=tolerance, rtol=1e-12))  # pyright: ignore[reportArgumentType]


class Gaussians:
    """Many Gaussian releases, each of one sum, without amplification."""

    def __init__(self, event: dp_accounting.DpEvent):
        self.mu = math.sqrt(_squared_mu(event))

    def epsilon(self, target_delta: float) -> float:
        return epsilon(self.mu, target_delta) if self.mu else 0.0

    def delta(self, target_epsilon: float) -> float:
        return delta(self.mu, target_epsilon) if self.mu else 0.0


def _squared_mu(event: dp_accounting.DpEvent) -> float:
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return math.fsum(_squared_mu(part) for part in event.events)
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return event.count * _squared_mu(event.event)
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return event.noise_multiplier**-2
    raise ConfigError(type(event).__name__, "has no closed form", "Use accountant=pld")
