"""Solves for the smallest noise multiplier whose epsilon is at most a target; cheap bounds bracket it, and it is never too small."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from scipy import optimize

from dpx.declaration import ConfigError, require
from dpx.privacy import accounting, cache, closed_form, events, loss_grid
from dpx.privacy.accounting import Charges, Real

Spent = Callable[[float], float]

# Relative width of the last bracket: the noise multiplier is at most this much above the smallest one.
TOLERANCE = 2e-5
_SMALLEST, _LARGEST = 1e-3, 1e7
# The smallest epsilon that is solved for; below it every epsilon counts as this one.
_LEAST = 1e-12


def noise_multiplier(
    stages: Iterable[Sequence[Real]],
    *,
    epsilon: Real,
    delta: Real,
    accountant: str = "pld",
    orders: Sequence[Real] | None = None,
    sampler: str = "poisson",
    adjacency: str = "zero_out",
) -> float:
    """Solves for the smallest noise multiplier whose epsilon at `delta` is at most `epsilon`.

    The result is kept on disk (`dpx.privacy.cache`); a kept value is checked before it is used.

    Args:
        stages: Pairs (q, steps), as for `dpx.privacy.epsilon`, and so are all arguments that are not listed here.
        epsilon: The target, above 0.

    Returns:
        The standard deviation of the noise divided by the clipping norm: at most 2e-5, relative, above the smallest one, never below it.

    Raises:
        ConfigError: For an invalid target or delta, and if no noise multiplier below 1e7 reaches the target.

    Example:
        >>> import dpx
        >>> sigma = dpx.privacy.noise_multiplier([(0.01, 1000)], epsilon=2.0, delta=1e-5, accountant="rdp")
        >>> round(sigma, 2), dpx.privacy.epsilon([(0.01, 1000)], noise_multiplier=sigma, delta=1e-5, accountant="rdp") <= 2.0
        (1.02, True)
    """
    charges = accounting.charges_of(stages, 1.0, sampler)
    return solve(charges, epsilon=epsilon, delta=delta, accountant=accountant, orders=orders, adjacency=adjacency)


def solve(
    charges: Charges,
    *,
    epsilon: Real,
    delta: Real,
    accountant: str = "pld",
    orders: Sequence[Real] | None = None,
    adjacency: str = "zero_out",
    interval: float | None = None,
    coarse: float | None = None,
) -> float:
    """Solves for the smallest factor on the noise multipliers of `charges` whose epsilon at `delta` is at most `epsilon`.

    Args:
        charges: As for `dpx.privacy.compose`; their noise multipliers count relative to one another.
        interval: The width of the PLD grid if losses are large relative to it (finer otherwise, `loss_grid.grid`). With a coarse grid the
            result errs upward, and a large sweep takes minutes.
        coarse: As for `dpx.privacy.compose`: the noise then reaches the target on that grid too.

    All other arguments, what is returned and what is raised are as for `noise_multiplier`.
    """
    require(epsilon > 0 and math.isfinite(epsilon), f"epsilon={epsilon}", "epsilon must be positive and finite", "Give a target above 0")
    require(epsilon >= _LEAST, f"epsilon={epsilon}", "no accountant resolves an epsilon this small", f"Give a target of {_LEAST:g} or more")
    require(bool(charges), "stages=[]", "the list of stages is empty", "Give at least one stage")
    accounting.check_delta(delta, accountant)
    # Raises for charges without a bound before anything is solved.
    events.composed(charges, adjacency, accountant)
    require(
        accountant != "pld" or delta > 2 * loss_grid.rounding(charges),
        f"delta={delta}",
        f"accountant=pld rounds at about {loss_grid.rounding(charges):.1g} over these steps, so it cannot resolve this delta",
        "Use accountant=rdp, or a larger delta",
    )
    question = {
        "charges": [[repr(release), count] for release, count in events.merge(charges)],
        "target": [epsilon, delta, accountant, adjacency, None if orders is None else list(orders), interval],
    }
    # Left out where it is `None`: what was stored before there was such a width keeps its name.
    question |= {} if coarse is None else {"coarse": coarse}
    fine, rough = _epsilons(charges, delta, accountant, orders, adjacency, interval, coarse)
    stored = cache.read("calibration", question)
    if stored and (cache.is_keeping() or fine(stored) <= epsilon):
        return stored
    if accountant == "pld":
        # Renyi accounting, if it has a bound for these charges, gives a first guess; a coarse grid, whose result is never too small,
        # brackets it; and the grids that statements use, one for each noise, refine it.
        by_renyi = functools.cache(lambda sigma: accounting.compose(scaled(charges, sigma), "rdp", adjacency, interval=0.0).epsilon(delta))
        try:
            guess = _refine(by_renyi, epsilon, *_bracket(by_renyi, epsilon, 1.0, 2.0), tolerance=1e-2)
        except ConfigError:
            guess = 1.0
        upper = _refine(rough, epsilon, *_bracket(rough, epsilon, guess, 1.1), tolerance=1e-3)
        solved = _refine(fine, epsilon, *_bracket(fine, epsilon, upper, 1.003))
    else:
        solved = _refine(fine, epsilon, *_bracket(fine, epsilon, 1.0, 2.0))
    cache.write("calibration", question, solved)
    return solved


def _epsilons(
    charges: Charges,
    delta: Real,
    accountant: str,
    orders: Sequence[Real] | None,
    adjacency: str,
    interval: float | None,
    coarse: float | None,
) -> tuple[Spent, Spent]:
    """Returns epsilon at `delta` as a function of the noise multiplier, on the grid of statements and on a rough grid for a first bracket.

    Accountants without a grid have one function twice."""

    @functools.cache
    def on(sigma: float, width: float) -> float:
        return accounting.compose(scaled(charges, sigma), accountant, adjacency, orders, width).epsilon(delta)

    def spent(sigma: float, of: Callable[..., float]) -> float:
        # The grid is computed for the current noise: the noise multipliers of the charges are only relative.
        return on(sigma, of(scaled(charges, sigma), adjacency, interval if coarse is None else coarse) if accountant == "pld" else 0.0)

    # A declared coarse grid is quick enough to search on, and the noise must reach the target on this very grid.
    finely, roughly = (loss_grid.grid, loss_grid.rough) if coarse is None else (loss_grid.coarser, loss_grid.coarser)
    return functools.partial(spent, of=finely), functools.partial(spent, of=roughly)


def nearly(charges: Charges, *, epsilon: Real, delta: Real, start: float) -> float:
    """Returns a noise multiplier within 1 % of `solve`'s under zero_out, by PLD, in a tenth of a second.

    It is for searches whose result is then solved again.

    `start` is an initial guess. The result is stored on disk. Raises `ConfigError` where `solve` does.
    """
    question = {"charges": [[repr(release), count] for release, count in events.merge(charges)], "nearly": [epsilon, delta]}
    stored = cache.read("calibration", question)
    if stored:
        return stored

    # Nearly a straight line, so the secant method converges in three or four evaluations.
    def excess(log_sigma: float) -> float:
        at = scaled(charges, math.exp(log_sigma))
        return math.log(max(accounting.compose(at, interval=loss_grid.sketch(at)).epsilon(delta), 1e-12) / epsilon)

    first = math.log(start)
    try:
        solved = math.exp(optimize.newton(excess, first, x1=first + 0.01, tol=2e-3))
    except RuntimeError:
        # At an epsilon or delta near 0 the secant leaves the range that a sketch resolves; `solve` gives the result, or an error message.
        solved = solve(charges, epsilon=epsilon, delta=delta)
    cache.write("calibration", question, solved)
    return solved


def scaled(charges: Charges, factor: float) -> Charges:
    """Returns the same charges with every noise multiplier multiplied by `factor`."""
    return [(replace(release, noise_multiplier=release.noise_multiplier * factor), count) for release, count in charges]


def _bracket(spent: Spent, target: Real, start: float, factor: float) -> tuple[float, float]:
    """Returns `(low, high)` with `spent(low) > target >= spent(high)`, found by growing factors from `start`."""
    low = high = start
    while spent(high) > target:
        low, high, factor = high, high * factor, factor**1.5
        require(
            high < _LARGEST,
            f"epsilon={target}",
            "no noise multiplier below 1e7 reaches this epsilon",
            "Raise epsilon or delta, or train fewer steps",
        )
    while spent(low) <= target:
        high, low, factor = low, low / factor, factor**1.5
        if low < _SMALLEST:
            break
    return low, high


def _refine(spent: Spent, target: Real, low: float, high: float, tolerance: float = TOLERANCE) -> float:
    """Returns the smallest sigma in `(low, high]` with `spent(sigma) <= target`, to a relative `tolerance`, and never a smaller one."""

    # Brent on log epsilon against log sigma: nearly a straight line, so few evaluations.
    def excess(log_sigma: float) -> float:
        value = spent(ends.get(log_sigma) or math.exp(log_sigma))
        return math.log(min(max(value, _LEAST), 1e12) / target)

    low_log, high_log = math.log(low), math.log(high)
    # exp(log(x)) is not x: the ends keep their exact values, whose epsilon is already known.
    ends = {low_log: low, high_log: high}
    if excess(low_log) <= 0:
        return low
    root = closed_form.root(excess, low_log, high_log, tolerance / 4)
    step = tolerance / 4
    while excess(root) > 0:
        root, step = root + step, step * 2
    return ends.get(root) or math.exp(root)
