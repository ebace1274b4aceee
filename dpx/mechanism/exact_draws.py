"""Draws exactly from the discrete Gaussian: P(k) proportional to exp(-k^2 / (2 s^2)) over the integers, with s^2 a rational number.

Rejection from a discrete Laplace distribution (Canonne, Kamath, Steinke 2020, algorithms 2 and 3). Every decision is whether a uniform
number lies below exp(-x) for a rational x. Float64 decides clear cases; within `MARGIN` more random bits and exact arithmetic decide,
so no rounding shifts a probability. `job=benchmark_noise` measures the cost of a draw.

Shape legend: N candidates.
"""

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np

from dpx.randomness import BitStream

# Far above the error of float64 in exp and in its arguments here (below 1e-14), and reached once in 1e12 decisions.
MARGIN = 1e-12


def discrete_gaussian(stream: BitStream, deviation: Fraction, count: int) -> np.ndarray:
    """Returns `count` independent draws, int64, whose parameter s is `deviation`; `stream` is consumed."""
    draws, have = [], 0
    while have < count:
        # A proposal is kept with probability 0.45 to 0.5 in all.
        draws.append(_kept(stream, deviation * deviation, math.floor(deviation) + 1, int((count - have) * 2.3) + 64))
        have += len(draws[-1])
    return np.concatenate(draws)[:count]


def _kept(stream: BitStream, variance: Fraction, width: int, proposals: int) -> np.ndarray:
    """Returns the accepted draws among `proposals` tries at a discrete Laplace of scale `width`."""
    low_N, is_negative_N = _uniform(stream, width, proposals)
    keep_N = _below_exp(stream, low_N / width, lambda at: Fraction(int(low_N[at]), width))
    low_N, is_negative_N = low_N[keep_N], is_negative_N[keep_N]
    size_N = low_N + width * _geometric(stream, len(low_N))
    # Zero has one sign.
    once_N = ~(is_negative_N & (size_N == 0))
    size_N, is_negative_N = size_N[once_N], is_negative_N[once_N]
    centre = variance / width
    exponent_N = np.square(size_N - float(centre)) / (2 * float(variance))
    keep_N = _below_exp(stream, exponent_N, lambda at: (int(size_N[at]) - centre) ** 2 / (2 * variance))
    return np.where(is_negative_N, -size_N, size_N)[keep_N]


def _uniform(stream: BitStream, width: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (uniform int64 below `width`, a fair sign) from up to `count` words; words past the last whole multiple are dropped."""
    words_N = stream.words(count)
    surplus = (1 << 64) % (2 * width)
    words_N = words_N[words_N < np.uint64((1 << 64) - surplus)] if surplus else words_N
    below_N = (words_N % np.uint64(2 * width)).astype(np.int64)
    return below_N >> 1, (below_N & 1).astype(bool)


def _geometric(stream: BitStream, count: int) -> np.ndarray:
    """Returns `count` geometric draws: how often a uniform number lies below exp(-1) before one does not."""
    draws, active = np.zeros(count, np.int64), np.arange(count)
    while len(active):
        active = active[_below_exp(stream, np.ones(len(active)), lambda at: Fraction(1))]
        draws[active] += 1
    return draws


def _below_exp(stream: BitStream, exponent_N: np.ndarray, exactly: Callable[[int], Fraction]) -> np.ndarray:
    """Returns whether a new uniform number lies below exp(-x), for each x; `exactly(i)` is the i-th x as a fraction."""
    words_N = stream.words(len(exponent_N))
    uniform_N, limit_N = (words_N >> np.uint64(11)).astype(np.float64) * 2.0**-53, np.exp(-exponent_N)
    below_N = uniform_N + (2.0**-53 + MARGIN) <= limit_N
    for at in np.flatnonzero(~below_N & (uniform_N < limit_N + MARGIN)):
        below_N[at] = _exactly_below(stream, int(words_N[at]), exactly(int(at)))
    return below_N


def _exactly_below(stream: BitStream, value: int, exponent: Fraction) -> bool:
    """Returns whether the uniform number whose first 64 bits are `value` lies below exp(-`exponent`).

    It draws further bits until that is certain.
    """
    if exponent == 0:
        return True
    bits = 64
    while True:
        digits = bits // 3 + 30
        with localcontext() as context:
            context.prec = digits
            nearest = Fraction((-Decimal(exponent.numerator) / Decimal(exponent.denominator)).exp())
        # Decimal's exp is correctly rounded; its argument is off by one part in 10^digits, times exponents below 10^6.
        error = nearest / 10 ** (digits - 10)
        if Fraction(value + 1, 1 << bits) <= nearest - error:
            return True
        if Fraction(value, 1 << bits) >= nearest + error:
            return False
        value, bits = (value << 64) | int(stream.words(1)[0]), bits + 64
