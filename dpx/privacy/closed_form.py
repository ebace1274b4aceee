"""Computes delta and epsilon of Gaussian releases exactly: the values that every accountant must give at q = 1.

Balle and Wang 2018, theorem 8: with mu = sensitivity / standard deviation,
delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu); k releases at sigma are one at sigma / sqrt(k). Releases that show whether they
used a unit are a mixture of these over the number of uses.
"""

import functools
import math
from collections.abc import Callable

import dp_accounting
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr, ndtri
from scipy.stats import binom

from dpx.declaration import ConfigError, require

# The tail of the number of uses that a sum over uses leaves out; it is added to delta.
_NEGLIGIBLE = 1e-18
# Rounding must not reduce a joint noise multiplier below the requested one.
_ROUNDING = 1 + 1e-12


def delta(mu: float, epsilon: float | int) -> float:
    """Returns the smallest delta of a Gaussian release; `mu` is sensitivity / standard deviation."""
    first, second = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return math.exp(first) * -math.expm1(min(second - first, 0.0))


def epsilon(mu: float, target_delta: float) -> float:
    """Returns the smallest epsilon at `target_delta`, rounded up in its last digits."""
    return _smallest(lambda value: delta(mu, value) - target_delta)


def _smallest(excess: Callable[[float], float]) -> float:
    """Returns the smallest epsilon at which the decreasing `excess` is at most 0, rounded up in its last digits."""
    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return root(excess, 0.0, high, 1e-12) * (1 + 1e-9) + 1e-12


def mu(target_epsilon: float | int, target_delta: float) -> float:
    """Returns the largest mu with `delta(mu, target_epsilon) <= target_delta`, rounded down in its last digits."""
    low, high, tolerance = 1e-9, 1.0, 1e-13
    while delta(low, target_epsilon) > target_delta:
        low, tolerance = low * 1e-6, tolerance * 1e-6
    while delta(high, target_epsilon) < target_delta:
        high *= 2
    return root(lambda value: delta(value, target_epsilon) - target_delta, low, high, tolerance) * (1 - 1e-10)


def type_two_error(mu: float, alpha: float) -> float:
    """Returns the least false-negative rate at false-positive rate `alpha` against a Gaussian release: Phi(Phi^-1(1 - alpha) - mu)."""
    return float(ndtr(-ndtri(alpha) - mu)) if math.isfinite(mu) else 0.0


def root(excess: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """Returns the point where `excess` changes sign between `low` and `high`, to `tolerance` (Brent)."""
    return float(brentq(excess, low, high, xtol=tolerance, rtol=1e-12))  # pyright: ignore[reportArgumentType]


def delta_by_uses(noise_multiplier: float, count: int, probability: float, epsilon: float | int) -> float:
    """Returns the smallest delta of `count` Gaussian releases, each of which uses a unit with `probability` and shows whether it did.

    Given K uses, the releases are one Gaussian of mu = sqrt(K) / noise_multiplier, and K is Binomial(count, probability) with and without
    the unit's data: delta(epsilon) = sum_k P(K = k) delta(sqrt(k) / noise_multiplier, epsilon). What is left out of the sum counts whole.
    """
    chances = _chances_of_uses(count, probability)
    terms = (chance * delta(math.sqrt(uses) / noise_multiplier, epsilon) for uses, chance in chances)
    return min(1.0, math.fsum([*terms, float(binom.sf(chances[-1][0], count, probability))]))


@functools.lru_cache(maxsize=64)
def _chances_of_uses(count: int, probability: float) -> list[tuple[int, float]]:
    """Returns (k, P(K = k)) for K ~ Binomial(count, probability) and k from 1 until the rest is negligible."""
    most = math.ceil(count * probability)
    while most < count and binom.sf(most, count, probability) > _NEGLIGIBLE:
        most += 1
    uses = range(1, most + 1)
    return list(zip(uses, binom.pmf(uses, count, probability).tolist(), strict=True))


def epsilon_by_uses(noise_multiplier: float, count: int, probability: float, target_delta: float) -> float:
    """Returns the smallest epsilon at which `delta_by_uses` is at most `target_delta`, rounded up in its last digits."""
    return _smallest(lambda value: delta_by_uses(noise_multiplier, count, probability, value) - target_delta)


def joint(*noise_multipliers: float | None) -> float:
    """Returns the joint noise multiplier of several sums released on one draw, each with its own noise.

    `None` means that a sum is not released.

    Divided by its sensitivity S_i, every sum's contribution of one unit has norm at most 1 and noise of deviation z_i. Stacked and weighted
    by 1/z_i, a unit moves the whole by at most (sum z_i^-2)^1/2 under noise of deviation 1: one release of noise multiplier
    (sum z_i^-2)^-1/2 (Andrew et al. 2021, theorem 1). A replaced unit moves each sum by 2 S_i, so the whole by twice as much, which events
    charge. As separate events, each sum would be charged with a separate draw that did not happen.
    """
    released = [z for z in noise_multipliers if z is not None]
    return released[0] if len(released) == 1 else math.fsum(z**-2 for z in released) ** -0.5


def remaining(target: float, auxiliary: dict[str, float | None]) -> float:
    """Returns the noise multiplier of the gradient's sum for which the joint multiplier with `auxiliary` is `target`.

    `auxiliary` holds the multipliers of the other sums by name; raises `ConfigError` if these alone use up the target.
    """
    released = {name: z for name, z in auxiliary.items() if z is not None}
    left = target**-2 - math.fsum(z**-2 for z in released.values())
    require(
        left > 0,
        ", ".join(f"{name}={z:.4g}" for name, z in released.items()),
        f"these releases use all the privacy that a joint noise multiplier of {target:.4g} allows",
        f"Use a value well above {target:.4g}",
    )
    return left**-0.5 * _ROUNDING if released else target


class Gaussians:
    """The composition of many Gaussian releases, each of one sum, without amplification by sampling."""

    def __init__(self, event: dp_accounting.DpEvent):
        self.mu = math.sqrt(_squared_mu(event))

    def epsilon(self, target_delta: float) -> float:
        """Returns the smallest epsilon at `target_delta`."""
        return epsilon(self.mu, target_delta) if self.mu else 0.0

    def delta(self, target_epsilon: float) -> float:
        """Returns the smallest delta at `target_epsilon`."""
        return delta(self.mu, target_epsilon) if self.mu else 0.0


def _squared_mu(event: dp_accounting.DpEvent) -> float:
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return math.fsum(_squared_mu(part) for part in event.events)
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return event.count * _squared_mu(event.event)
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return event.noise_multiplier**-2
    raise ConfigError(type(event).__name__, "has no closed form", "Use accountant=pld")
