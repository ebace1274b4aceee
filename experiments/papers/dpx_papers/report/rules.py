"""The rules that `verdict:` of an item in paper.yaml names: each judges one claim by the rows that it selects, over replicates.

A rule that one paper alone needs is a class in `dpx_papers/<paper>/` or in another listed package, and is named in full. Columns and
selections are those of `dpx_papers.report.evidence`.
"""

import dataclasses
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pandas as pd

from dpx.declaration import declaration, require
from dpx.pages.pictures import mean_curve
from dpx.pages.read_runs import Run
from dpx_papers.report import shape
from dpx_papers.report.evidence import Evidence, Rows, Selection, column
from dpx_papers.report.rows import Published
from dpx_papers.report.shape import ARITHMETIC, NOT_RUN, PASS, Part

Groups = dict[Any, list[Any]]
# Whether the claim holds, `None` if that cannot be judged, and the numbers behind it.
Judged = tuple[bool | None, str]
# At which sizes a rule judges: any, full scale, what is smaller, or the laptop's recipes alone.
Scale = Literal["", "full", "small", "laptop"]
# What `says` holds where the paper claims nothing.
OURS = "ours"


def fewest(*selected: Rows) -> int:
    """Returns the fewest replicates of a point among rows that are runs, 0 if none is."""
    runs = ([run for run in rows["run"] if isinstance(run, Run)] for rows in selected if "run" in rows)
    counts = [count for own in runs for count in Counter((run.experiment, run.point) for run in own).values()]
    return min(counts, default=0)


@declaration
class Rule(Selection):
    """A claim on the column `value` of the selected rows, grouped by the column `by`. A claim with fewer than `groups` groups, or fewer
    than `replicates` rows in one of them, is not judged. `says` is the quantity of the row of published.csv with the paper's own claim, or
    `ours`. A rule whose settings only one recipe has names its `scale`. `arithmetic` marks what cannot be false."""

    claim: str
    value: str = ""
    by: str = ""
    groups: int = 1
    replicates: int = 1
    says: str = ""
    scale: Scale = ""
    arithmetic: bool = False

    def judged(self, evidence: Evidence, experiment: str) -> list[Part]:
        """Returns `parts` as the page shows them: with the place of the claim in the paper, and with the replicates behind them."""
        parts, says = self.parts(evidence, experiment), self._place(evidence, experiment)
        repeats = self.repeats(evidence, experiment) if any(part.state != NOT_RUN for part in parts) else 0
        states = [ARITHMETIC if self.arithmetic and part.state == PASS else part.state for part in parts]
        return [
            dataclasses.replace(part, state=state, says=part.says or says, repeats=repeats)
            for part, state in zip(parts, states, strict=True)
        ]

    def _place(self, evidence: Evidence, experiment: str) -> str:
        """Returns where the paper says it. Raises `ConfigError` for a claim that published.csv does not have."""
        if self.says in ("", OURS) or not evidence.published:
            return self.says
        lines = [line for line in evidence.published if line.quantity == self.says]
        own = [line for line in lines if line.experiment == experiment] or lines
        fix = f"Write it there, with its place, or says: {OURS}"
        require(bool(lines), f"says: {self.says}", "published.csv has no such quantity", fix)
        return f"“{own[0].quantity}” ({own[0].where or 'no place'})"

    def repeats(self, evidence: Evidence, experiment: str) -> int:
        """Returns the fewest replicates of a point among the runs that are compared, 0 if the rows are not runs."""
        rows = dataclasses.replace(self, best=None).rows(evidence, experiment)
        return fewest(rows)

    def parts(self, evidence: Evidence, experiment: str) -> list[Part]:
        """Returns the claims judged, or `not run`; `experiment` is that of the item. Raises `ConfigError` for a column that no row has."""
        rows = self.rows(evidence, experiment)
        groups = self.grouped(rows)
        if len(groups) < self.groups or min(map(len, groups.values())) < self.replicates:
            needed = f"; needs {self.groups} values of {self.by}" * bool(self.by) + f", {self.replicates} runs each" * (self.replicates > 1)
            return [Part.of(self.claim, None, f"{len(rows)} rows{needed}")]
        return [_diverged(self.claim, *groups.values()) or Part.of(self.claim, *self.judge(groups, rows))]

    def judge(self, groups: Groups, rows: Rows) -> Judged:
        """Returns the claim on rows that suffice."""
        raise NotImplementedError

    def grouped(self, rows: Rows) -> Groups:
        """Values of replicates by the value of `by`, ascending; rows without one of the two are left out."""
        keys = column(rows, self.by) if self.by else [""] * len(rows)
        known = [pair for pair in zip(keys, column(rows, self.value), strict=True) if None not in pair]
        return pd.DataFrame(known, columns=["by", "value"], dtype=object).groupby("by")["value"].apply(list).to_dict()

    def split(self, rows: Rows, key: str) -> dict[Any, Groups]:
        """Returns the groups at each value of another column, ascending."""
        return {value: self.grouped(own) for value, own in rows.groupby(pd.Series(column(rows, key), rows.index, dtype=object))}

    def spreads(self, groups: Mapping[Any, Sequence[int | float]], rows: Rows = ()) -> str:
        """Returns the values of each group for a reader; an accuracy with its interval for the rows of data that all of `rows` share."""
        return ", ".join(f"{name(key)}: " * (key != "") + self.spread(values, rows) for key, values in groups.items())

    def spread(self, values: Sequence[int | float], rows: Rows) -> str:
        """Returns the mean of replicates for a reader; an accuracy at the end of a run with its interval (`shape.interval_of`)."""
        place, _, metric = self.value.rpartition("/")
        key = f"{place}/rows" if metric.endswith(("accuracy", "f1")) else ""
        measured = set(rows[key]) if key in rows else {None} if key and len(rows) else set()
        interval = shape.interval_of(statistics.fmean(values), self.value, *measured) if len(measured) == 1 else ""
        return shape.spread(values, self.value) + interval


def _diverged(claim: str, *groups: Sequence[Any]) -> Part | None:
    """Returns the failure of a claim on values that are no numbers, which no order holds for; `None` if all are numbers."""
    values = [value for group in groups for value in group]
    count = sum(isinstance(value, float) and math.isnan(value) for value in values)
    return Part.of(claim, False, f"{count} of {len(values)} values are no numbers") if count else None


def _cells(rows: Rows, key: str) -> Any:
    """Returns a column, empty where no row has it."""
    return rows[key] if key in rows else pd.Series(None, rows.index, dtype=object)


def name(key: Any) -> str:
    """Returns the value of a setting as text for a reader."""
    return f"{key:g}" if isinstance(key, int | float) else str(key)


@declaration
class Trend(Rule):
    """`value` rises (or `falls`) with `by`, by the trend of Jonckheere and Terpstra over replicates, at every value of `each`."""

    groups: int = 2
    falls: bool = False
    each: str = ""

    def judge(self, groups: Groups, rows: Rows) -> Judged:
        at_each = {key: own for key, own in (self.split(rows, self.each) if self.each else {"": groups}).items() if len(own) > 1}
        trends = {key: shape.trend(own, self.falls) for key, own in at_each.items()}
        heads = {key: f"{self.each} {name(key)}: " * bool(self.each) for key in at_each}
        texts = [f"{heads[key]}{self.spreads(own, rows)}; {trends[key].words()}" for key, own in at_each.items()]
        return all(one.holds for one in trends.values()) if trends else None, ". ".join(texts) or f"one value of {self.by} at each"


def lower_end(groups: Mapping[Any, Sequence[float]]) -> str:
    """At which end of the groups, `smaller` or `larger`, the mean is lower."""
    return "smaller" if statistics.fmean(groups[min(groups)]) < statistics.fmean(groups[max(groups)]) else "larger"


@declaration
class Monotone(Rule):
    """The mean of `value`, or its `highest`, rises or `falls` from each value of `by` to the next, in every group of equal `each`; with
    `ties` it may stay equal, and with a `step` go back by that factor, which is one of the grid that was searched. `order` lists the values
    of `by` where they are names."""

    groups: int = 2
    falls: bool = False
    ties: bool = False
    each: str = ""
    order: Sequence[str] = ()
    highest: bool = False
    step: float = 1.0

    def judge(self, groups: Groups, rows: Rows) -> Judged:
        pairs, texts = [], []
        for key, own in (self.split(rows, self.each) if self.each else {"": groups}).items():
            points = {one: max(own[one]) if self.highest else statistics.fmean(own[one]) for one in self.order or own if one in own}
            pairs += itertools.pairwise(list(points.values()))
            texts.append(f"{key}: " * bool(key) + ", ".join(f"{name(one)}: {value:.3g}" for one, value in points.items()))
        ordered = [(high, low) if self.falls else (low, high) for low, high in pairs]
        # Steps of a grid are exact powers, which floats are not.
        holds = all(low < high or (self.ties and low <= self.step * high * (1 + 1e-9)) for low, high in ordered)
        return holds if pairs else None, "; ".join(texts)


@declaration
class Ordered(Rule):
    """The curves of `value` (a metric and `@points`), means over replicates, are in the order of `by` at every step that all have."""

    groups: int = 2

    def judge(self, groups: Groups, rows: Rows) -> Judged:
        tables = [dict(mean_curve(curves)) for curves in groups.values()]
        steps = sorted(set.intersection(*map(set, tables)))
        wrong = [str(step) for step in steps if any(low[step] >= high[step] for low, high in itertools.pairwise(tables))]
        text = f"{len(steps) - len(wrong)} of {len(steps)} windows of training in order (means over replicates)"
        return bool(steps) and not wrong, text + f"; not in order: windows that end at step {', '.join(wrong[:8])}" * bool(wrong)


@declaration
class Above(Rule):
    """`value` is above that of the rows of `than`: `all` of all, or `means` above the mean of each group of `by`, or it `reaches` the
    highest of them within one standard deviation; with a `margin`, by more than it (in points if a share). Rows of `than` on another text,
    or that differ in `alike`, are left out."""

    than: Selection
    compare: Literal["all", "means", "reaches"] = "all"
    alike: Sequence[str] = ()
    margin: float = 0.0

    def repeats(self, evidence: Evidence, experiment: str) -> int:
        others = self.than.rows(evidence, self.experiment or experiment)
        # The others are one pool, whatever their points.
        return min([fewest(self.rows(evidence, experiment)), *([len(others)] if "run" in others else [])])

    def parts(self, evidence: Evidence, experiment: str) -> list[Part]:
        rows = self.rows(evidence, experiment)
        others = self.than.rows(evidence, self.experiment or experiment)
        for key in (*self.alike, "corpus"):
            others = others[_cells(others, key).isin(_cells(rows, key))]
        upper = [value for value in column(rows, self.value) if value is not None]
        groups = self.grouped(others)
        if len(upper) < self.replicates or not upper or not groups:
            return [Part.of(self.claim, None, f"{len(upper)} rows to compare with {len(others)} others")]
        if part := _diverged(self.claim, upper, *groups.values()):
            return [part]
        highest, mean = max(map(max, groups.values())), statistics.fmean(upper)
        edge = f"lowest {shape.plain(min(upper), self.value)}, highest of the others {shape.plain(highest, self.value)}"
        margin = self.margin / (100 if shape.is_share(self.value) else 1)
        if self.compare == "all":
            holds = min(upper) > highest + margin
        elif self.compare == "means":
            holds = mean > max(map(statistics.fmean, groups.values())) + margin
        else:
            holds = len(upper) > 1 and mean + statistics.stdev(upper) >= highest
        return [Part.of(self.claim, holds, f"{self.spread(upper, rows)} against {self.spreads(groups, others)}; {edge}")]


@declaration
class Within(Rule):
    """`value`, less that of the column `minus` if it is named, lies in [`least`, `most`] and strictly between `above` and `below` in every
    row, or in one of them if `one_is_enough`."""

    minus: str = ""
    above: float = float("-inf")
    least: float = float("-inf")
    most: float = float("inf")
    below: float = float("inf")
    one_is_enough: bool = False

    def judge(self, groups: Groups, rows: Rows) -> Judged:
        subtracted = column(rows, self.minus) if self.minus else [0] * len(rows)
        pairs = [pair for pair in zip(column(rows, self.value), subtracted, strict=True) if None not in pair]
        values = [value - other for value, other in pairs]
        if not values:
            return None, f"no row has both {self.value} and {self.minus}"
        inside = [self.above < value < self.below and self.least <= value <= self.most for value in values]
        holds = any(inside) if self.one_is_enough else all(inside)
        return holds, f"from {min(values):.4g} to {max(values):.4g}" + f"; {self.spreads(groups, rows)}" * (not self.minus)


@declaration
class Flat(Rule):
    """The lowest and the highest mean of `value` over the values of `by` are equivalent within `margin` (in points if a share): two
    one-sided tests over replicates. With `factor` instead, one of them is at most that many times the other."""

    groups: int = 2
    margin: float | None = None
    factor: float | None = None

    def __post_init__(self) -> None:
        fix = "Declare one of them, in the units of the paper"
        require((self.margin is None) != (self.factor is None), f"flat: {self.claim}", "has no margin and no factor, or both", fix)

    def judge(self, groups: Groups, rows: Rows) -> Judged:
        low, *_, high = sorted(groups.values(), key=statistics.fmean)
        spreads = self.spreads(groups, rows)
        if self.factor is not None:
            quotient = statistics.fmean(high) / statistics.fmean(low)
            return quotient <= self.factor * (1 + 1e-9), f"{spreads}: a factor of {quotient:.3g}, at most {self.factor:g} is declared"
        assert self.margin is not None
        if min(map(len, (low, high))) < 2:
            return None, f"{spreads}: two runs of each are needed"
        is_share = shape.is_share(self.value)
        apart, unit = shape.most_apart(high, low) * (100 if is_share else 1), " points" * is_share
        difference = (statistics.fmean(high) - statistics.fmean(low)) * (100 if is_share else 1)
        text = f"largest difference {difference:.2g}{unit}, at most {apart:.2g} (95 %); the margin is {self.margin:g}"
        return apart <= self.margin, f"{spreads}: {text}"


@declaration
class Slope(Rule):
    """The least-squares slope of the means of `value` against `by`, of logarithms unless `linear`, lies in [`least`, `most`]; its 95 %
    interval is told. With `concave`, the slope over the first interval is above that over the last."""

    groups: int = 2
    least: float = float("-inf")
    most: float = float("inf")
    linear: bool = False
    concave: bool = False

    def judge(self, groups: Groups, rows: Rows) -> Judged:
        means = [(key, statistics.fmean(values)) for key, values in groups.items()]
        if not self.linear and min(map(min, means)) <= 0:
            return None, "a logarithm needs positive values"
        slope = shape.slope(means, self.linear)
        each = [shape.slope(pair, self.linear) for pair in itertools.pairwise(means)]
        low, high = shape.slope_interval(means, self.linear)
        text = f"slope {slope:.3g} (95 %: {low:.3g} to {high:.3g}); between neighbours {', '.join(f'{one:.3g}' for one in each)}"
        return self.least <= slope <= self.most and (not self.concave or each[0] > each[-1]), text


@declaration
class Agrees(Rule):
    """Every published number of the item whose `metric` contains `value` agrees with ours, at full scale: to `tolerance`, a fraction of it,
    or to a `margin` in its unit. With `quantity`, only those numbers whose quantity contains it."""

    tolerance: float | None = None
    margin: float | None = None
    quantity: str = ""
    scale: Scale = "full"

    def __post_init__(self) -> None:
        reason, fix = "has no tolerance and no margin, or both", "Declare one of them"
        require((self.margin is None) != (self.tolerance is None), f"agrees: {self.claim}", reason, fix)

    def parts(self, evidence: Evidence, experiment: str) -> list[Part]:
        lines = self._lines(evidence, experiment)
        reason = f"published.csv has no such metric for {experiment}"
        require(bool(lines), f"value: {self.value}", reason, "Name the metric of a line, or part of it")
        pairs = [(float(line.value), value) for line in lines if (value := our_value(line, evidence)) is not None]
        if len(pairs) < len(lines):
            return [Part.of(self.claim, None, f"{len(pairs)} of {len(lines)} numbers")]
        shown = ", ".join(f"{own:.5g} ({value:g})" for value, own in pairs)
        if self.tolerance is not None:
            worst = max(abs(own / value - 1) for value, own in pairs)
            return [Part.of(self.claim, worst <= self.tolerance, f"ours (published): {shown}; largest relative difference {worst:.2%}")]
        assert self.margin is not None
        worst = max(abs(own - value) for value, own in pairs)
        return [Part.of(self.claim, worst <= self.margin, f"ours (published): {shown}; largest difference {worst:.3g}")]

    def repeats(self, evidence: Evidence, experiment: str) -> int:
        counts = [len(own) for line in self._lines(evidence, experiment) if (own := runs_of(line, evidence))]
        return min(counts, default=0)

    def _lines(self, evidence: Evidence, experiment: str) -> list[Published]:
        own = [line for line in evidence.published if line.experiment == experiment and self.value in line.metric]
        return [line for line in own if line.value and line.metric != "setting" and self.quantity in line.quantity]


@declaration
class Analysis(Rule):
    """The claims that an analysis judges itself in its table `verdicts`; with `claims` only those, by their place from 0. `runs` is the
    experiment whose runs it read."""

    claim: str = "its claims"
    claims: Sequence[int] = ()
    runs: str = ""

    def parts(self, evidence: Evidence, experiment: str) -> list[Part]:
        table = evidence.analysis(self.experiment or experiment).get("verdicts")
        lines = table.as_json()["rows"] if table else []
        lines = [line for place, line in enumerate(lines) if place in self.claims or not self.claims]
        return [Part(**row) for row in lines] or [Part.of(self.claim, None, "it has not run")]

    def repeats(self, evidence: Evidence, experiment: str) -> int:
        return fewest(evidence.trained(self.runs)) if self.runs else 0


def our_value(line: Published, evidence: Evidence) -> float | None:
    """Returns our value of a published number: the cell `table[row].column` that its metric names, or the mean (at `point=max` the highest)
    of the final measurement of runs at its point; in percent if the number is; `None` if neither exists. `evidence` has full scale alone.
    """
    table, bracket, place = line.metric.partition("[")
    if bracket:
        number, _, key = place.partition("].")
        tables = evidence.analysis(line.experiment)
        values = [row[key] for row in tables[table].as_json()["rows"][int(number) :][:1]] if table in tables else []
    else:
        values = [run.finals[line.metric] for run in runs_of(line, evidence)]
    scale = 100 if line.unit == "%" else 1
    return scale * (max(values) if line.point == "max" else statistics.fmean(values)) if values else None


def runs_of(line: Published, evidence: Evidence) -> list[Run]:
    """Returns the runs that a published number is about. Its point is `key=value`, or several of them with spaces between; an empty one and
    `max` take every run of the experiment."""
    wanted = [pair.split("=", 1) for pair in line.point.split() if "=" in pair]
    runs = [run for run in evidence.runs if run.experiment == line.experiment and line.metric in run.finals]
    return [run for run in runs if all(key in run.config and _same(run.config[key], value) for key, value in wanted)]


def _same(one: str, other: str) -> bool:
    """Returns whether two settings are the same, as numbers if both are."""
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other
