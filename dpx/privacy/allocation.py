"""Computes privacy losses of one epoch of random allocation: a unit takes part in exactly one of t steps, uniform and secret.

A step's noisy sum is simulated from a scalar: with everything released before and the places of all other units given, it is
`rest + g (1[b = i] + sigma z)` plus noise that does not depend on the unit, for a unit in step b whose clipped gradient is g, of norm at
most C = 1. So an epoch reveals at most the t observations y_i = 1[b = i] + N(0, sigma**2), and epochs compose adaptively. Without the
unit y ~ Q = N(0, sigma**2 I); with it y ~ P, the mean over b of N(e_b, sigma**2 I). Their ratio under Q is

    U = dP/dQ = (X_1 + ... + X_t) / t,    X_i independent, log X_i ~ N(-1 / (2 sigma**2), 1 / sigma**2).

Both directions are means of convex functions of U under Q:

    removal   delta(epsilon) = E max(0, U - e**epsilon),    addition   delta(epsilon) = E max(0, 1 - e**epsilon U).

Splitting the mass of an outcome between the two grid points around it, so that its mean stays, never lowers the mean of a convex function,
also if independent outcomes are added later. So the law of U on a grid, with outcomes split after every addition, bounds both directions
at every epsilon: it is the ratio of a pair that dominates (P, Q), and such pairs compose (Zhu, Dong and Wang 2022). Only positive numbers
are added and multiplied, so rounding is relative, and a factor covers it.
"""

import functools
import math
from typing import NamedTuple

import attr
import dp_accounting
import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as distribution
from scipy.special import gammaln, ndtr

# Points that hold all but a negligible part of a law, and those on either side of them, whose part still counts, less precisely.
POINTS, _POINTS_OUTSIDE, _NEGLIGIBLE = 1000, 40, 1e-18
# An X so many standard deviations above its median, with or without the unit, counts as a failure of the bound.
_DEVIATIONS = 11.0
# Masses are off by less than 1e-9, relative: a few float64 operations for each of at most a hundred additions, of which cells of 1e-5 of
# their distance from 0 lose five digits. Above this noise cells are narrower, in proportion to 1 / sigma.
_ROUNDING, _OF_NARROW_CELLS = 1e-9, 1000.0
# The noise multipliers at which float64 holds every X and tells cells apart.
SMALLEST, LARGEST = 0.04, 1e7
# The largest order at which a Renyi divergence is computed: time grows with its square.
_LARGEST_ORDER = 1024
# Points of a law of which the range of a sum is estimated.
_OF_ESTIMATE = 60


@attr.s(frozen=True, slots=True, auto_attribs=True)
class RandomAllocationGaussianDpEvent(dp_accounting.DpEvent):
    """The event of one epoch of `steps` noisy sums, in exactly one of which a unit takes part, uniform and secret."""

    steps: int
    noise_multiplier: float


class Law(NamedTuple):
    """The law of a non-negative outcome on ascending points, the first of which is 0. Its masses may sum to less than 1."""

    points: np.ndarray
    masses: np.ndarray


def of_epoch(event: RandomAllocationGaussianDpEvent, interval: float) -> distribution.PrivacyLossDistribution:
    """Returns an upper bound on the privacy losses of one epoch, in both directions, on a grid of width `interval`."""
    steps, sigma = event.steps, event.noise_multiplier
    law = ratio(steps, sigma)
    lower, upper = (round_to(math.log(end) / interval) for end, round_to in ((law.points[1], math.floor), (law.points[-1], math.ceil)))
    _, masses = split(law.points, law.masses, np.append(0.0, np.exp(np.arange(lower, upper + 1) * interval)))
    with_unit = masses[1:] * np.exp(np.arange(lower, upper + 1) * interval)
    # An X is above its largest point: under Q any of t, and under P also the one that the unit moves by 1 / sigma deviations.
    without, moved = float(ndtr(-_DEVIATIONS - 1 / sigma)), float(ndtr(-_DEVIATIONS))
    removal = (lower, with_unit, moved + (steps - 1) * without)
    addition = (-upper, masses[:0:-1], masses[0] + steps * without)
    rounded = 1 + _ROUNDING * max(1.0, sigma / _OF_NARROW_CELLS)
    return distribution.PrivacyLossDistribution(
        *(pld_pmf.DensePLDPmf(interval, first, part * rounded, float(rest), True) for first, part, rest in (removal, addition))
    )


def divergences(event: RandomAllocationGaussianDpEvent, orders: tuple[float, ...]) -> np.ndarray:
    """Returns an upper bound on the Renyi divergence of one epoch at each of `orders`, above 1: the larger of both directions.

    That of removal is exact at whole orders up to 1024, where E U**order is a coefficient of a power of a series, and interpolates the
    logarithm of that mean, which is convex, between them; at larger orders it is that of a unit whose place is told. That of addition
    replaces the mean of X by its geometric mean, so it is loose: it never falls below 1 / (2 sigma**2), however many steps there are.
    """
    steps, sigma = event.steps, event.noise_multiplier
    alpha = np.asarray(orders, float)
    whole = np.arange(math.ceil(min(alpha.max(), _LARGEST_ORDER)) + 1)
    # Of the mean of each power of X over the factorial of the order.
    terms = (whole * (whole - 1) / (2 * sigma**2) - gammaln(whole + 1)).astype(float)
    series = terms
    for digit in f"{steps:b}"[1:]:
        series = _product(series, series)
        series = _product(series, terms) if digit == "1" else series
    largest = gammaln(whole + 1) + whole * math.log(steps) + whole * whole / (2 * sigma**2)
    # Rounding of sums of logarithms as large as that.
    means = np.maximum(0.0, series + gammaln(whole + 1) - whole * math.log(steps)) + 1e-13 * largest * (whole > 1)
    removal = np.minimum(np.interp(alpha, whole, means, right=math.inf) / (alpha - 1), alpha / (2 * sigma**2))
    addition = (alpha + steps - 1) / (2 * steps * sigma**2)
    return np.maximum(removal, addition)


def _product(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the logarithms of the coefficients of a product of two power series, from those of both, as far as they are given."""
    terms = (one[: order + 1] + other[order::-1] for order in range(len(one)))
    return np.array([logs.max() + math.log(np.exp(logs - logs.max()).sum()) for logs in terms])


# Every grid of privacy losses takes the same law, a few tens of kilobytes.
@functools.lru_cache(maxsize=256)
def ratio(steps: int, sigma: float, points: int = POINTS) -> Law:
    """Returns a law that bounds that of U for `steps` steps of noise `sigma`, without outcomes in which an X is above its largest point."""
    one = total = _one(sigma, points)
    # Twice the sum so far for each further binary digit of `steps`, and one more X where that digit is 1.
    for digit in f"{steps:b}"[1:]:
        total = _sum(total, total, points)
        total = _sum(total, one, points) if digit == "1" else total
    return Law(total.points / steps, total.masses)


def split(outcomes: np.ndarray, masses: np.ndarray, points: np.ndarray) -> Law:
    """Returns the law with each outcome's mass split between the two of `points` around it, so that its mean stays.

    `points` are ascending, and outcomes lie between the first and the last of them.
    """
    below = np.clip(np.searchsorted(points, outcomes, side="right") - 1, 0, len(points) - 2)
    share = np.clip((outcomes - points[below]) / (points[below + 1] - points[below]), 0.0, 1.0)
    upward = masses * share
    return Law(points, np.bincount(below, masses - upward, len(points)) + np.bincount(below + 1, upward, len(points)))


def _one(sigma: float, points: int) -> Law:
    """Returns a law that bounds that of one X, without outcomes above its largest point."""
    normal = np.linspace(-_DEVIATIONS, _DEVIATIONS + 1 / sigma, points)
    ends = np.exp(normal / sigma - 0.5 / sigma**2)
    masses, means = (_between(normal - shift) for shift in (0.0, 1 / sigma))
    upward = np.maximum(0.0, means - ends[:-1] * masses) / np.diff(ends)
    # Of what is below the first point, the mass and the mean.
    mass, mean = (float(ndtr(normal[0] - shift)) for shift in (0.0, 1 / sigma))
    first = min(mass, mean / ends[0])
    on_grid = np.append(np.maximum(0.0, masses - upward), 0.0) + np.append(first, upward)
    return Law(np.append(0.0, ends), np.append(mass - first, on_grid))


def _between(ends: np.ndarray) -> np.ndarray:
    """Returns the normal probability between neighbouring ends, from the tail in which it keeps its digits."""
    return np.where(ends[:-1] > 0, -np.diff(ndtr(-ends)), np.diff(ndtr(ends)))


def _sum(one: Law, other: Law, points: int) -> Law:
    """Returns a law that bounds that of the sum of two independent outcomes."""
    grid = _grid(one, other, points)
    masses = np.zeros(len(grid))
    block = max(1, 200_000 // len(other.points))
    for first in range(0, len(one.points), block):
        rows, columns, weights = slice(first, first + block), slice(None), other.masses
        if one is other:
            # Each pair once: those beyond the block count for both of their orders.
            columns, weights = slice(first, None), np.where(np.arange(len(weights)) < first + block, weights, 2 * weights)
        outcomes = one.points[rows, None] + other.points[columns]
        masses += split(outcomes.ravel(), (one.masses[rows, None] * weights[columns]).ravel(), grid).masses
    return Law(grid, masses)


def _grid(one: Law, other: Law, points: int) -> np.ndarray:
    """Returns points for a sum: most of them in equal ratios where nearly all of its mass and of its mean lie, estimated on few points."""
    parts = [_rough(law) for law in (one, other)]
    outcomes = np.add.outer(parts[0].points, parts[1].points).ravel()
    order = np.argsort(outcomes)
    outcomes, masses = outcomes[order], np.multiply.outer(parts[0].masses, parts[1].masses).ravel()[order]
    lowest, top = one.points[1] + other.points[1], one.points[-1] + other.points[-1]
    low = outcomes[np.searchsorted(np.cumsum(masses), _NEGLIGIBLE)]
    means = np.cumsum((masses * outcomes)[::-1])
    high = outcomes[::-1][np.searchsorted(means, _NEGLIGIBLE * means[-1])]
    low, high = max(low, lowest), min(max(high, 1.01 * low, 1.01 * lowest), top)
    outside = [np.geomspace(lowest, low, _POINTS_OUTSIDE)] if low > 1.001 * lowest else []
    beyond = [np.geomspace(high, top, _POINTS_OUTSIDE)] if top > 1.001 * high else [np.array([top])]
    return np.unique(np.concatenate([[0.0], *outside, np.geomspace(low, high, points), *beyond]))


def _rough(law: Law) -> Law:
    """Returns the law with the masses of neighbouring points joined."""
    step = max(1, len(law.points) // _OF_ESTIMATE)
    firsts = np.arange(0, len(law.points), step)
    return Law(law.points[firsts], np.add.reduceat(law.masses, firsts))
