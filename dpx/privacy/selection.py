"""Charges a search that repeats a mechanism a secret, random number of times and releases only the best result.

Liu and Talwar 2019; Papernot and Steinke 2022 (theorem 2 for the truncated negative binomial, theorem 6 for Poisson). The repetitions must
be independent draws of one mechanism, their number independent of the data, and nothing but the winner released. The charge is that of the
mechanism as declared: both theorems use its divergences, never the results of single repetitions. So neither theorem applies if a
repetition was lost, stopped or drawn again (`dpx.tuning.claim`).
"""

import math
import secrets
from collections.abc import Sequence

import dp_accounting
from dp_accounting import dp_event

from dpx.declaration import require
from dpx.privacy import accounting, events
from dpx.privacy.accounting import Charges


def repeated(charges: Charges, adjacency: str, mean: float | int, shape: float | int) -> dp_accounting.DpEvent:
    """Returns the event of the best of a random number of repetitions of `charges`; `shape` is infinite for Poisson."""
    return dp_event.RepeatAndSelectDpEvent(events.composed(charges, adjacency, "rdp"), float(mean), float(shape))


def epsilon(
    charges: Charges,
    *,
    delta: float,
    mean: float | int,
    shape: float | int,
    adjacency: str = "zero_out",
    orders: Sequence[float] | None = None,
) -> float:
    """Returns epsilon of the winner by Renyi accounting, the only accounting with a theorem for it; `math.inf` if it finds no bound."""
    accounting.check_delta(delta, "rdp")
    event = repeated(charges, adjacency, mean, shape)
    return accounting.renyi(event, adjacency, accounting.proved_orders(charges, orders)).epsilon(delta)


def draw(mean: float | int, shape: float | int) -> int:
    """Draws the number of repetitions from the operating system's randomness, by inversion; 0 is possible for Poisson alone.

    Store it: it is as secret as the noise, and a second draw would be another mechanism.
    """
    return quantile(secrets.SystemRandom().random(), float(mean), float(shape))


def quantile(uniform: float, mean: float, shape: float) -> int:
    """Returns the smallest number of repetitions whose distribution function is above `uniform`, a number in [0, 1).

    Raises `ConfigError` for a mean below 1 and for a `uniform` outside [0, 1).
    """
    require(mean >= 1, f"mean={mean}", "a search needs a mean of at least one trial", "Use 1 or more")
    require(0 <= uniform < 1, f"uniform={uniform}", "must be at least 0 and below 1", "Draw from [0, 1)")
    number, probability, ratio = _first(mean, shape)
    reached = probability
    while reached <= uniform and probability > 0:
        probability *= ratio(number)
        number += 1
        reached += probability
    return number


def _first(mean: float, shape: float):
    """Returns the smallest possible number, its probability, and the ratio P[k+1] / P[k] as a function of k."""
    if math.isinf(shape):
        return 0, math.exp(-mean), lambda k: mean / (k + 1)
    gamma = truncation(mean, shape)
    if gamma == 1:
        return 1, 1.0, lambda k: 0.0
    if shape == 0:
        return 1, (1 - gamma) / -math.log(gamma), lambda k: (1 - gamma) * k / (k + 1)
    # P[1] = shape (1 - gamma) / (gamma^-shape - 1); P[k+1] / P[k] = (1 - gamma) (k + shape) / (k + 1).
    return 1, shape * (1 - gamma) / math.expm1(-shape * math.log(gamma)), lambda k: (1 - gamma) * (k + shape) / (k + 1)


def truncation(mean: float, shape: float) -> float:
    """Returns the parameter gamma of the truncated negative binomial with that mean, rounded towards fewer repetitions."""
    low, high = 0.0, 1.0
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return high
        if _mean(middle, shape) > mean:
            low = middle
        else:
            high = middle


def _mean(gamma: float, shape: float) -> float:
    if shape == 0:
        return (1 - gamma) / (gamma * -math.log(gamma))
    return shape * (1 - gamma) / (gamma * -math.expm1(shape * math.log(gamma)))
