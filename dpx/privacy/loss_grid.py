"""Chooses the grid that discretises privacy losses.

It is fine relative to one step's loss for any noise, has a bounded number of points, and is coarser than rounding errors.

Connect-the-dots (arXiv 2207.04380, as dp-accounting composes it) rounds each step's loss up and down to neighbouring points of the grid,
which adds variance and never lowers epsilon: with a grid of d on a loss of standard deviation s, d**2 / 6 on s**2. Composed, that is as if
the noise were smaller by a factor 1 + d**2 / (12 s**2). The standard deviation of a loss is about q / sigma, so no fixed grid fits all
settings.
"""

import functools
import math
from dataclasses import replace

import numpy as np
from scipy.stats import binom

from dpx.declaration import require
from dpx.privacy.events import Release

# A grid of s/6 adds 0.5 % to a step's variance and 0.25 % to epsilon where epsilon follows the spread; more where epsilon is near 0.
FINENESS = 1 / 6

# Points of one privacy loss distribution: eight bytes each, a few tens of them alive while composing.
POINTS_MAX = 1_000_000
# Points of one step, each computed separately: 3 s in all. Those of a mixture are computed numerically, 12 s for 100,000.
STEP_POINTS_MAX = {"poisson": 250_000, "group": 100_000}

SKETCH_POINTS = 5_000

# dp-accounting takes one step's probabilities from differences of deltas: each is off by about 1e-16 over the grid, and never below 0.
_ROUNDING = 1e-16
# dp-accounting cuts a step's distribution where e**-50 of it is left, which is ten standard deviations of noise.
_LOG_TAIL, _DEVIATIONS = -50.0, 10.0
# Composed distributions are cut by Chernoff bounds at 1e-15, whose exponents lie between 1 and 20 over the reach of one step.
_LOG_CUT, _ORDERS = math.log(2e15), (1.0, 20.0)

EVERYONE = ("gaussian", "shuffled", "deterministic", "balls_in_bins")


def grid(charges: list[tuple[Release, int]], adjacency: str = "zero_out", coarsest: float | None = None) -> float:
    """Returns the width of the grid on which `charges` are composed at their own noise: `coarsest` or finer. Every grid errs upward.

    By default 1e-4 at most. In seeded settings of q from 1e-8 to 1, sigma from 0.3 to 1e4 and up to 1e6 steps, epsilon was at most
    0.5 % above that of a grid three times as fine. It is further off where float64 rounds (a composition that spreads over less than
    1e-5: 3 % of epsilons of 2e-6 to 2e-5) and where points are bounded (at 1e6 steps: sigma of 0.5 at q = 1e-7 and sigma of 1 at q = 1e-6
    2 %, sigma of 0.3 at q = 1e-8 3 %).
    """
    steps = [_seen(release, count, adjacency) for release, count in charges]
    if not steps:
        return coarsest or _coarsest(charges)
    reach, total = max(r for r, _, _ in steps), sum(count for *_, count in steps)
    variance = sum(v * count for _, v, count in steps)
    require(
        reach > 0 and variance > 0,
        "accountant=pld",
        "the noise is so large that float64 rounds its privacy losses to 0",
        "Use less noise, or accountant=rdp",
    )
    kind = "group" if any(release.kind == "group" for release, _ in charges) else "poisson"
    # The surplus from rounding is at negative losses; losses outside the spread of the whole composition have no effect.
    surplus = math.sqrt(_ROUNDING * total * min(reach, 3 * math.sqrt(variance)))
    finest = max(surplus, reach / STEP_POINTS_MAX[kind])
    wanted = max(FINENESS * math.sqrt(variance / total), finest)
    # The interval that holds the composition's losses, as dp-accounting truncates it.
    order = min(_ORDERS[1] / reach, max(_ORDERS[0] / reach, math.sqrt(2 * _LOG_CUT / variance)))
    width = reach if total == 1 else max(reach, min(total * reach, variance * order + 2 * _LOG_CUT / order))
    return max(min(coarsest or _coarsest(charges), wanted), width / POINTS_MAX)


def rough(charges: list[tuple[Release, int]], adjacency: str = "zero_out", coarsest: float | None = None) -> float:
    """Returns a wider grid for a quick search: ten times `grid` up to 1e-3, but no more than half a step's standard deviation."""
    own, widest = grid(charges, adjacency, coarsest), grid(charges, adjacency, 1.0)
    return max(own, min(10 * own, 1e-3, widest / FINENESS / 2))


def coarser(charges: list[tuple[Release, int]], adjacency: str = "zero_out", at_most: float | None = None) -> float:
    """Returns the largest whole multiple of `grid` of at most `at_most`; `grid` itself if `at_most` is `None` or finer than it.

    A composition on it is never below the one on `grid`, for the reason given at `multiple`: a declared width only raises epsilon.
    """
    own = grid(charges, adjacency)
    return own if at_most is None else own * max(1, int(at_most / own))


def multiple(charges: list[tuple[Release, int]], adjacency: str = "zero_out", at_most: float | None = None) -> float:
    """Returns a whole multiple of `coarser` (by default, of `grid`).

    It is at most half a step's standard deviation, and at most thirty times as wide.

    A composition on it is never below the one on `grid`: every loss on it is one on the finer grid too, and what connects its dots (delta
    is convex in e**epsilon) is nowhere below. It takes hundredths of a second and is 0.3 % above at most.
    """
    own, widest = coarser(charges, adjacency, at_most), grid(charges, adjacency, 1.0)
    return own * max(1, int(min(30.0, widest / FINENESS / 2 / own)))


def sketch(charges: list[tuple[Release, int]], adjacency: str = "zero_out") -> float:
    """Returns a grid for a search over many settings, whose result is then solved again.

    It is `multiple`, but with at most 5,000 points for each step.

    Noise solved on it is above that of `grid`: by 0.5 % at most for one step's q of 1e-7 to 1, 10 to 1e5 steps and epsilons of 1 and 8 at a
    delta of 1e-8 (`tests/privacy/test_loss_grid.py`). Where few steps in a thousand decide, a finer grid would take seconds.
    """
    return max(multiple(charges, adjacency), max(_seen(release, count, adjacency)[0] for release, count in charges) / SKETCH_POINTS)


def rounding(charges: list[tuple[Release, int]]) -> float:
    """Returns a bound on the error of the deltas of `charges` by float64's rounding, in both directions.

    It is 1.5e-16 for each composed step, or 4e-16 if draws are seen.

    A Fourier transform near 1 is raised to the number of steps. The measured error is at most 1.4e-16 per step in the worse of the two
    directions, on any grid, for 1e3 to 1e6 steps; 3.3e-16 where draws are seen, for 2e5 to 1.2e6 draws of three uses in all.
    """
    of_one = {"slot_revealed": 4 * _ROUNDING}
    return math.fsum(of_one.get(release.kind, 1.5 * _ROUNDING) * _joined(release, count)[1] for release, count in charges)


def _coarsest(charges: list[tuple[Release, int]]) -> float:
    # A mixture is inverted numerically at every grid point: 12 s at 1e-4 where 1e-3 takes one, for 0.05 % of epsilon.
    coarsest = 1e-3 if any(release.kind == "group" for release, _ in charges) else 1e-4
    # Each rate of a ramp is a distribution to build, point by point. Rounding a ramp's rates up costs ten times what this does:
    # 0.05 % of epsilon at 30 rates, against a grid of 2e-4.
    return coarsest * min(5.0, max(1.0, len({release for release, _ in charges}) / 6))


def _joined(release: Release, count: int) -> tuple[Release, int]:
    """Returns releases of everyone as one release with less noise, as dp-accounting composes them."""
    if count == 0 or (release.kind not in EVERYONE and release.sampling_probability < 1):
        return release, count
    return replace(release, noise_multiplier=release.noise_multiplier / math.sqrt(count)), 1


def _seen(release: Release, count: int, adjacency: str) -> tuple[float, float, int]:
    """Returns the reach and the variance of one step's privacy loss, and the number of such steps composed."""
    one, times = _joined(release, count)
    rows = one.rows_per_unit if one.kind == "group" else 1
    sigma = one.noise_multiplier / (2 if adjacency == "replace_one" else 1)
    if one.kind == "slot_revealed":
        # Who takes part is seen, so a use is not hidden among draws that do not take the row: their losses are 0.
        reach, variance = _loss(sigma, 1.0, 1)
        return reach, one.sampling_probability * variance, times
    reach, variance = _loss(sigma, one.sampling_probability, rows)
    if one.kind == "random_allocation":
        # Its largest losses are those of its step alone; where they are small, the variances of all its steps add up.
        whole, most = _loss(sigma, 1.0, 1)
        return whole, min(most, variance / one.sampling_probability), times
    size, cap, q = one.size, one.cap, one.sampling_probability
    if one.kind == "truncated_poisson" and size is not None and cap is not None and cap < size:
        # In a full batch a row replaces another one, at twice the sensitivity and at the rate of a row in full batches, as dp-accounting
        # composes it.
        full = float(binom.sf(cap - 1, size - 1, q))
        rate = float(binom.sf(cap, size, q)) * cap / size / full if full else 0.0
        reach = max(reach, _loss(one.noise_multiplier / 2, min(1.0, rate), 1)[0] if rate else 0.0)
    return reach, variance, times


@functools.lru_cache(maxsize=4096)
def _loss(sigma: float, q: float, rows: int) -> tuple[float, float]:
    """Returns the width of the interval that holds one step's privacy losses, and their variance.

    `j` of a unit's `rows` are drawn with binomial `weights` and shift the sum by j.
    """
    j = np.arange(rows + 1.0)
    with np.errstate(all="ignore"):
        logs = binom.logpmf(j, rows, q)
        j, logs = j[logs > _LOG_TAIL], logs[logs > _LOG_TAIL]
        weights = np.exp(logs)
        # The furthest sum that is not cut off, under whichever count gets there.
        high, low = np.max(j + sigma * np.sqrt(2 * (logs - _LOG_TAIL))), -_DEVIATIONS * sigma
        top, bottom = (np.logaddexp.reduce(logs + (2 * j * x - j * j) / (2 * sigma**2)) for x in (high, low))
        # The chi-square divergence where losses are small; else at most the second moment without sampling, given the count.
        together = rows * np.log1p(q * np.expm1(np.minimum(j / sigma**2, 600.0)))
        small = float(weights @ np.expm1(np.minimum(together, 700.0)))
        large = float(weights @ ((j / sigma) ** 2 + (j / sigma) ** 4 / 4))
    return float(top - bottom), min(small, large)
