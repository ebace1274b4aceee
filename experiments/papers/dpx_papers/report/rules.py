"""The rules that `verdict:` of an item in paper.yaml names: each judges one claim by the rows that it selects, over replicates.

A rule that one paper alone needs is a class in `dpx_papers/<paper>/` or in another listed package, and is named in full. Columns and
selections are those of `dpx_papers.report.evidence`.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pandas as pd

from dpx.declaration import declaration, require
from dpx.pages.pictures import mean_curve
from dpx_papers.report import shape
from dpx_papers.report.evidence import Evidence, Rows, Selection, column
from dpx_papers.report.rows import Published
from dpx_papers.report.shape import Part

Groups = dict[Any, list[Any]]
# Whether the claim holds, `None` if that cannot be judged, and the numbers behind it.
Judged = tuple[bool | None, str]


@declaration
class Rule(Selection):
    """A claim on the column `value` of the selected rows, grouped by the column `by`. A claim with fewer than `groups` groups, or fewer
    than `replicates` rows in one of them, is not judged."""

    claim: str
    value: str = ""
    by: str = ""
    groups: int = 1
    replicates: int = 1

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
    """`value` rises (or `falls`) with `by`, by the trend of Jonckheere and Terpstra over replicates. With `at_smallest`, the rows at the
    smallest value of that column are judged, and the others reported."""

    groups: int = 2
    falls: bool = False
    at_smallest: str = ""

    def judge(self, groups: Groups, rows: Rows) -> Judged:
        (_, first), *others = (self.split(rows, self.at_smallest) if self.at_smallest else {"": groups}).items()
        trend = shape.trend(first, self.falls)
        rest = [f"{self.at_smallest} {name(key)}: {self.spreads(own, rows)}; lower at the {lower_end(own)} end" for key, own in others]
        return trend.holds, ". Reported, not judged: ".join([f"{self.spreads(first, rows)}; {trend.words()}", *rest])


def lower_end(groups: Mapping[Any, Sequence[float]]) -> str:
    """At which end of the groups, `smaller` or `larger`, the mean is lower."""
    return "smaller" if statistics.fmean(groups[min(groups)]) < statistics.fmean(groups[max(groups)]) else "larger"


@declaration
class Monotone(Rule):
    """The mean of `value`, or its `highest`, rises or `falls` from each value of `by` to the next, in every group of equal `each`; with
    `ties` it may stay equal. `order` lists the values of `by` where they are names."""

    groups: int = 2
    falls: bool = False
    ties: bool = False
    each: str = ""
    order: Sequence[str] = ()
    highest: bool = False

    def judge(self, groups: Groups, rows: Rows) -> Judged:
        pairs, texts = [], []
        for key, own in (self.split(rows, self.each) if self.each else {"": groups}).items():
            points = {one: max(own[one]) if self.highest else statistics.fmean(own[one]) for one in self.order or own if one in own}
            pairs += itertools.pairwise([-value for value in points.values()] if self.falls else points.values())
            texts.append(f"{key}: " * bool(key) + ", ".join(f"{name(one)}: {value:.3g}" for one, value in points.items()))
        holds = all(low < high or (self.ties and low == high) for low, high in pairs)
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
    highest of them within one standard deviation. Rows of `than` on another text, or that differ in `alike`, are left out."""

    than: Selection
    compare: Literal["all", "means", "reaches"] = "all"
    alike: Sequence[str] = ()

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
        if self.compare == "all":
            holds = min(upper) > highest
        elif self.compare == "means":
            holds = mean > max(map(statistics.fmean, groups.values()))
        else:
            holds = len(upper) > 1 and mean + statistics.stdev(upper) >= highest
        return [Part.of(self.claim, holds, f"{self.spread(upper, rows)} against {self.spreads(groups, others)}; {edge}")]


@declaration
class Within(Rule):
    """`value`, less that of the column `minus` if it is named, lies in [`least`, `most`] and strictly between `above` and `below` in every
    row."""

    minus: str = ""
    above: float = float("-inf")
    least: float = float("-inf")
    most: float = float("inf")
    below: float = float("inf")

    def judge(self, groups: Groups, rows: Rows) -> Judged:
        subtracted = column(rows, self.minus) if self.minus else [0] * len(rows)
        pairs = [pair for pair in zip(column(rows, self.value), subtracted, strict=True) if None not in pair]
        values = [value - other for value, other in pairs]
        if not values:
            return None, f"no row has both {self.value} and {self.minus}"
        holds = self.above < min(values) and self.least <= min(values) and max(values) <= self.most and max(values) < self.below
        return holds, f"from {min(values):.4g} to {max(values):.4g}" + f"; {self.spreads(groups, rows)}" * (not self.minus)


@declaration
class Flat(Rule):
    """The lowest and the highest mean of `value` over the values of `by` differ by at most two standard errors of their difference,
    or not at all."""

    groups: int = 2
    replicates: int = 2

    def judge(self, groups: Groups, rows: Rows) -> Judged:
        low, *_, high = sorted(groups.values(), key=statistics.fmean)
        holds, difference, error = shape.within_noise(high, low)
        noise = f"largest difference {shape.plain(difference, self.value)}, two standard errors {shape.plain(2 * error, self.value)}"
        return holds or difference == 0, f"{self.spreads(groups, rows)}: {noise}"


@declaration
class Slope(Rule):
    """The least-squares slope of the means of `value` against `by`, of logarithms unless `linear`, lies in [`least`, `most`]. With
    `concave`, the slope over the first interval is above that over the last."""

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
        text = f"slope {slope:.3g}; between neighbours {', '.join(f'{one:.3g}' for one in each)}"
        return self.least <= slope <= self.most and (not self.concave or each[0] > each[-1]), text


@declaration
class Agrees(Rule):
    """Every published number of the item whose `metric` contains `value` agrees with ours to `tolerance`, a fraction of it."""

    tolerance: float

    def parts(self, evidence: Evidence, experiment: str) -> list[Part]:
        lines = [line for line in evidence.published if line.experiment == experiment and self.value in line.metric]
        reason = f"published.csv has no such metric for {experiment}"
        require(bool(lines), f"value: {self.value}", reason, "Name the metric of a line, or part of it")
        pairs = [(float(line.value), value) for line in lines if (value := our_value(line, evidence)) is not None]
        if len(pairs) < len(lines):
            return [Part.of(self.claim, None, f"{len(pairs)} of {len(lines)} numbers")]
        worst = max(abs(own / value - 1) for value, own in pairs)
        shown = ", ".join(f"{own:.5g} ({value:g})" for value, own in pairs)
        return [Part.of(self.claim, worst <= self.tolerance, f"ours (published): {shown}; largest relative difference {worst:.2%}")]


@declaration
class Analysis(Rule):
    """The claims that an analysis judges itself in its table `verdicts`; with `first` only that many of them."""

    claim: str = "its claims"
    first: int | None = None

    def parts(self, evidence: Evidence, experiment: str) -> list[Part]:
        table = evidence.analysis(self.experiment or experiment).get("verdicts")
        lines = table.as_json()["rows"][: self.first] if table else []
        return [Part(**row) for row in lines] or [Part.of(self.claim, None, "it has not run")]


def our_value(line: Published, evidence: Evidence) -> float | None:
    """Returns our value of a published number: the cell `table[row].column` that its metric names, or the mean (at `point=max` the highest)
    of the final measurement of runs at full scale at its point; in percent if the number is; `None` if neither exists.
    """
    table, bracket, place = line.metric.partition("[")
    if bracket:
        number, _, key = place.partition("].")
        tables = evidence.analysis(line.experiment)
        values = [row[key] for row in tables[table].as_json()["rows"][int(number) :][:1]] if table in tables else []
    else:
        runs = [run for run in evidence.runs if run.experiment == line.experiment and line.metric in run.finals]
        # A point is `key=value`, compared as numbers; an empty one and `max` take every run.
        key, equals, at = line.point.partition("=")
        values = [run.finals[line.metric] for run in runs if not equals or (key in run.config and float(run.config[key]) == float(at))]
    scale = 100 if line.unit == "%" else 1
    return scale * (max(values) if line.point == "max" else statistics.fmean(values)) if values else None
