"""Fits the parametric losses L1 and L2 (McKenna et al. 2025, appendix E).

It minimises the Huber loss on log losses by L-BFGS from many starts, with bootstrap intervals.

L1 = E + A / M^alpha + B / N^beta + C s^gamma;   L2 = E + A / M^alpha + B / N^beta + C s~^gamma / M^alpha2,
with N examples seen, s the noise-batch ratio and s~ = sigmoid((ln s + 8) / 1.6). The paper fits T > 100,000, s > 5e-7 and losses up to
8; its Huber width is not stated (default 1e-3 on log losses, as Hoffmann et al. 2022).
"""

import dataclasses
from typing import Any, Literal

import numpy as np

from dpx.declaration import require

Form = Literal["L1", "L2"]
Real = np.ndarray | float | int
NAMES: dict[Form, tuple[str, ...]] = {
    "L1": ("E", "A", "B", "C", "alpha", "beta", "gamma"),
    "L2": ("E", "A", "B", "C", "alpha", "beta", "gamma", "alpha2"),
}
# A coefficient counts as identified if its 95 % interval is at most this share of its size.
IDENTIFIED = 0.5


def transformed(ratio: Real) -> np.ndarray:
    """Returns s~ = sigmoid((ln s + 8) / 1.6) of noise-batch ratios s, in 0..1.

    The logarithm is natural, so the centre is e^-8 = 2^-11.5.
    """
    return np.asarray(1 / (1 + np.exp(-(np.log(ratio) + 8) / 1.6)))


@dataclasses.dataclass(frozen=True)
class Fit:
    """A fit: coefficients by name, their mean Huber loss (which is minimised), and how many of the starts came within 1 % of it."""

    form: Form
    coefficients: dict[str, float]
    huber_loss: float
    starts_that_agree: int

    def loss(self, parameters: Real, examples: Real, ratio: Real) -> np.ndarray:
        """Returns predicted losses, broadcast."""
        c = self.coefficients
        noise = c["C"] * ratio ** c["gamma"] if self.form == "L1" else c["C"] * transformed(ratio) ** c["gamma"] / parameters ** c["alpha2"]
        return np.asarray(c["E"] + c["A"] / parameters ** c["alpha"] + c["B"] / examples ** c["beta"] + noise)


def fit(
    form: Form,
    parameters: np.ndarray,
    examples: np.ndarray,
    ratio: np.ndarray,
    losses: np.ndarray,
    *,
    huber_width: float = 1e-3,
    starts: int = 64,
    seed: int = 0,
) -> Fit:
    """Returns the best of `starts` minimisations. Arrays have one length, and ratios are above 0.

    Raises `ConfigError` for fewer points than coefficients.
    """
    count = len(NAMES[form])
    require(
        len(losses) > count,
        f"{len(losses)} points",
        f"{form} has {count} coefficients, so it needs at least that number of points",
        "Measure more points, or filter out fewer",
    )
    require(bool((ratio > 0).all()), "ratio=0", "has no logarithm", "Remove runs without noise")
    terms = _Terms(form, parameters, examples, ratio, losses, huber_width)
    solved = [_minimised(terms, start) for start in terms.starts(starts, np.random.default_rng(seed))]
    best = min(solved, key=lambda result: result[1])
    agree = sum(value <= best[1] * 1.01 + 1e-12 for _, value in solved)
    return Fit(form, terms.named(best[0]), best[1], agree)


def _minimised(terms: "_Terms", start: np.ndarray) -> tuple[np.ndarray, float]:
    from scipy.optimize import minimize

    solved = minimize(terms.huber_loss, start, jac=True, method="L-BFGS-B", bounds=terms.bounds, options={"maxiter": 2000, "maxfun": 4000})
    return solved.x, float(solved.fun)


class _Terms:
    """The Huber loss as a function of (log E, log A, log B, log C, exponents).

    M and N are relative to their geometric means, so that starts are alike.
    """

    def __init__(self, form: Form, parameters: np.ndarray, examples: np.ndarray, ratio: np.ndarray, losses: np.ndarray, width: float):
        self.form, self.width = form, width
        self.m_mean, self.n_mean = np.log(parameters).mean(), np.log(examples).mean()
        self.m, self.n = np.log(parameters) - self.m_mean, np.log(examples) - self.n_mean
        self.s = np.log(ratio if form == "L1" else transformed(ratio))
        self.s_mean = self.s.mean()
        self.s = self.s - self.s_mean
        self.logs, self.top = np.log(losses), float(np.log(losses.max()))
        self.bounds = [(-20, self.top)] + [(-20, self.top + 3)] * 3 + [(0, 20), (0, 20), (0, 20)] + ([(-5, 5)] if form == "L2" else [])

    def starts(self, count: int, generator: np.random.Generator) -> np.ndarray:
        """Returns `count` random starts."""
        logs = generator.uniform(self.top - 4, self.top, (count, 4))
        exponents = generator.uniform(0.05, 1.5, (count, 3))
        rest = [generator.uniform(-0.3, 0.3, (count, 1))] if self.form == "L2" else []
        return np.concatenate([logs, exponents, *rest], axis=1)

    def huber_loss(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """Returns the mean Huber loss of log residuals, divided by its width, and its gradient."""
        alpha, beta, gamma = x[4:7]
        alpha2 = x[7] if self.form == "L2" else 0.0
        e, a = np.exp(x[0]), np.exp(x[1] - alpha * self.m)
        b, c = np.exp(x[2] - beta * self.n), np.exp(x[3] + gamma * self.s - alpha2 * self.m)
        total = e + a + b + c
        residual = np.log(total) - self.logs
        size = np.abs(residual)
        is_small = size <= self.width
        value = np.where(is_small, residual**2 / (2 * self.width), size - self.width / 2).mean()
        slope = np.where(is_small, residual / self.width, np.sign(residual)) / total / len(residual)
        columns = [np.full_like(a, e), a, b, c, -self.m * a, -self.n * b, self.s * c]
        if self.form == "L2":
            columns.append(-self.m * c)
        return float(value), np.array([slope @ column for column in columns])

    def named(self, x: np.ndarray) -> dict[str, float]:
        """Returns the coefficients of the form itself, for unscaled M, N and s."""
        alpha, beta, gamma = (float(value) for value in x[4:7])
        alpha2 = float(x[7]) if self.form == "L2" else 0.0
        scale = {
            "E": np.exp(x[0]),
            "A": np.exp(x[1] + alpha * self.m_mean),
            "B": np.exp(x[2] + beta * self.n_mean),
            "C": np.exp(x[3] - gamma * self.s_mean + alpha2 * self.m_mean),
        }
        coefficients = {name: float(value) for name, value in scale.items()} | {"alpha": alpha, "beta": beta, "gamma": gamma}
        return coefficients | ({"alpha2": alpha2} if self.form == "L2" else {})


@dataclasses.dataclass(frozen=True)
class Interval:
    """A coefficient's value, its 95 % bootstrap interval, and whether the data identify it.

    They do not if the interval is wide (`IDENTIFIED`) or does not contain the value.
    """

    value: float
    low: float
    high: float

    @property
    def is_identified(self) -> bool:
        """Returns whether the value lies within the interval, and the interval is narrow (`IDENTIFIED`)."""
        return self.low < self.value < self.high and self.high - self.low <= IDENTIFIED * abs(self.value)


def bootstrap(
    form: Form,
    parameters: np.ndarray,
    examples: np.ndarray,
    ratio: np.ndarray,
    losses: np.ndarray,
    groups: np.ndarray,
    *,
    samples: int = 100,
    starts: int = 8,
    huber_width: float = 1e-3,
    seed: int = 0,
) -> dict[str, Interval]:
    """Returns 95 % intervals by drawing whole `groups` with replacement.

    A group is a run, because the records of one run are not independent.
    """
    generator = np.random.default_rng(seed)
    whole = fit(form, parameters, examples, ratio, losses, huber_width=huber_width, starts=4 * starts, seed=seed)
    names, coefficients = np.unique(groups), list[dict[str, float]]()
    places = {name: np.flatnonzero(groups == name) for name in names}
    for number in range(samples):
        drawn = np.concatenate([places[name] for name in generator.choice(names, len(names))])
        columns = (column[drawn] for column in (parameters, examples, ratio, losses))
        coefficients.append(fit(form, *columns, huber_width=huber_width, starts=starts, seed=seed + number + 1).coefficients)
    intervals = {}
    for name, value in whole.coefficients.items():
        low, high = np.percentile([one[name] for one in coefficients], [2.5, 97.5])
        intervals[name] = Interval(value, float(low), float(high))
    return intervals


def optimal_parameters(fit: Fit, compute: float | int, ratio: float, tokens: float | int, low: float, high: float) -> float:
    """Returns the model size in [low, high] of least predicted loss at N = C / (6 M S) examples (Figure 19).

    An end of the range is not an optimum.
    """
    from scipy.optimize import minimize_scalar

    def loss(log_m: float) -> float:
        m = np.exp(log_m)
        return float(fit.loss(m, compute / (6 * m * tokens), ratio))

    grid = np.linspace(np.log(low), np.log(high), 200)
    place = int(np.argmin([loss(value) for value in grid]))
    ends = grid[max(place - 1, 0)], grid[min(place + 1, len(grid) - 1)]
    solved: Any = minimize_scalar(loss, bounds=ends, method="bounded")
    return float(np.exp(solved.x))
