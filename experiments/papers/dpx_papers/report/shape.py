"""Whether runs show the paper's shape: verdicts, and the statistics over replicates behind them.

Only order is judged, so the statistics are those of ranks: pairs of replicates in the right order, and the Jonckheere-Terpstra
trend (Jonckheere 1954), normal approximation. All are pure functions of numbers.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dpx.files.results import interval
from dpx.pages.analysis_tables import Table

# Steps and knobs are integers in one run and not in another.
Number = int | float

PASS, FAIL, NOT_RUN = "pass", "fail", "not run"
# Of a claim that cannot be false, by what is compared: it is shown and not counted.
ARITHMETIC = "arithmetic"
# The note of a table whose numbers are by a paper's published code, where that differs from its text.
BY_CODE = "by the choices of the published code"
# One-sided; three against three replicates in perfect order have exactly 1/20.
LEVEL = 0.05


@dataclasses.dataclass(frozen=True)
class Part:
    """One claim about the runs, the numbers it was judged by, and the result. `says` is where the paper says it, or that it is ours;
    `repeats` are the replicates behind it, 0 if no run is behind it."""

    claim: str
    statistic: str
    state: str
    says: str = ""
    repeats: int = 0

    @classmethod
    def of(cls, claim: str, holds: Any, statistic: str) -> "Part":
        """Returns the judged claim, which `holds` or not, as Python or pandas say it; with `None` it could not be judged, and `statistic`
        says what is missing."""
        return cls(claim, statistic, NOT_RUN if holds is None else PASS if holds else FAIL)


def verdict_table(parts: Sequence[Part]) -> Table:
    """Returns the table of an analysis's verdicts, with a row for each claim."""
    return Table("verdicts", ("claim", "state", "statistic"), tuple((one.claim, one.state, one.statistic) for one in parts), "verdicts")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The claims of an item; its `state` is `fail` if any of them fails, `pass` if all that are counted pass, `arithmetic` if none is, else
    `not run`."""

    parts: tuple[Part, ...]

    @property
    def state(self) -> str:
        states = {part.state for part in self.parts}
        if FAIL in states or not states:
            return FAIL if states else NOT_RUN
        return ARITHMETIC if states == {ARITHMETIC} else PASS if states <= {PASS, ARITHMETIC} else NOT_RUN

    @property
    def repeats(self) -> int:
        """The fewest replicates that a claim rests on, 0 if none rests on a run."""
        return min((part.repeats for part in self.parts if part.repeats), default=0)


@dataclasses.dataclass(frozen=True)
class Trend:
    """Pairs in ascending order among all pairs of different groups, and the one-sided p of so many by chance."""

    ascending: float
    pairs: int
    p: float
    reversed: tuple[tuple[Number, Number], ...]

    @property
    def holds(self) -> bool:
        """A trend at `LEVEL`, and no two neighbouring groups whose replicates are all in reverse order."""
        return self.p < LEVEL and not self.reversed

    def words(self) -> str:
        against = "".join(f"; {low:g} lies wholly above {high:g}" for low, high in self.reversed)
        return f"{self.ascending:g} of {self.pairs} replicate pairs in order, Jonckheere-Terpstra p = {self.p:.2g}{against}"


def trend(groups: Mapping[Any, Sequence[Number]], falls: bool = False) -> Trend:
    """Returns whether values rise (or, negated, fall) with the key of their group, and how surely; ties count a half.

    Raises `ValueError` for fewer than two groups.
    """
    if len(groups) < 2:
        raise ValueError("a trend needs two groups")
    groups = {key: [-value for value in groups[key]] if falls else groups[key] for key in sorted(groups)}
    compared = [(low, high) for one, two in itertools.combinations(groups.values(), 2) for low in one for high in two]
    wins = sum(1.0 if high > low else 0.5 if high == low else 0.0 for low, high in compared)
    sizes = [len(values) for values in groups.values()]
    total = sum(sizes)
    variance = (total**2 * (2 * total + 3) - sum(n**2 * (2 * n + 3) for n in sizes)) / 72
    p = 0.5 * math.erfc((wins - len(compared) / 2) / math.sqrt(2 * variance))
    against = tuple((low, high) for low, high in itertools.pairwise(groups) if min(groups[low]) > max(groups[high]))
    return Trend(wins, len(compared), p, against)


def most_apart(first: Sequence[Number], second: Sequence[Number]) -> float:
    """Returns the most that the means of two groups differ by, at `LEVEL` on each side: two one-sided tests (Schuirmann 1987) with Welch's
    degrees of freedom find them equivalent within any larger margin. Infinite for a single value in a group."""
    from scipy import stats

    if min(len(first), len(second)) < 2:
        return math.inf
    difference = abs(statistics.fmean(first) - statistics.fmean(second))
    squares = [statistics.variance(values) / len(values) for values in (first, second)]
    if not sum(squares):
        return difference
    freedom = sum(squares) ** 2 / sum(one**2 / (len(values) - 1) for one, values in zip(squares, (first, second), strict=True))
    return difference + float(stats.t.ppf(1 - LEVEL, freedom)) * math.sqrt(sum(squares))


def slope(points: Sequence[tuple[Number, Number]], linear: bool = False) -> float:
    """Returns the least-squares slope of the second value against the first, of natural logarithms unless `linear`."""
    xs, ys = zip(*(point if linear else tuple(map(math.log, point)) for point in points), strict=True)
    return statistics.linear_regression(xs, ys).slope


def slope_interval(points: Sequence[tuple[Number, Number]], linear: bool = False) -> tuple[float, float]:
    """Returns the 95 % interval of `slope`, by the scatter about the line; all numbers for fewer than three points."""
    from scipy import stats

    if len(points) < 3:
        return -math.inf, math.inf
    xs, ys = zip(*(point if linear else tuple(map(math.log, point)) for point in points), strict=True)
    line: Any = stats.linregress(xs, ys)
    half = float(stats.t.ppf(0.975, len(points) - 2) * line.stderr)
    return float(line.slope) - half, float(line.slope) + half


def is_share(column: str) -> bool:
    """Returns whether a column is shown in percent: accuracies, and the baselines that they are compared with."""
    return "accuracy" in column or column.startswith("baseline/")


def plain(value: Number, column: str = "", digits: int = 4) -> str:
    """Returns a number as text, with whole numbers from a thousand in full, and in percent if `column` is a share."""
    if is_share(column):
        return f"{100 * value:.{digits}g} %"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 and value == round(value) else f"{value:.{digits}g}"


def of_rows(values: Sequence[Number], column: str, rows: Number | None) -> str:
    """Returns the mean of replicates, and the interval of an accuracy or F1 that each of them has on `rows` rows (`interval_of`)."""
    text = plain(values[0], column) if len(set(values)) == 1 else spread(values, column)
    return text + interval_of(statistics.fmean(values), column, rows)


def interval_of(mean: Number, column: str, rows: Number | None) -> str:
    """Returns, in brackets, the 95 % interval of an accuracy or F1 that was measured on `rows` rows; empty for other columns.

    Of F1 it is an approximation, since F1 is not a share of rows.
    """
    if column.startswith("baseline/") or not any(word in column for word in ("accuracy", "f1")):
        return ""
    if not rows or not 0 <= mean <= 1:
        return " [rows not noted]"
    low, high = (plain(edge, column, 3) for edge in interval(mean, int(rows)))
    return f" [{low} to {high}; {rows:,.0f} rows]"


def spread(values: Sequence[Number], column: str = "") -> str:
    """Returns `mean ± standard deviation (n)`, in percent if `column` is a share."""
    deviation = f" ± {plain(statistics.stdev(values), column, 2)}" if len(values) > 1 else ""
    return f"{plain(statistics.fmean(values), column).removesuffix(' %' if deviation else '')}{deviation} (n = {len(values)})"
