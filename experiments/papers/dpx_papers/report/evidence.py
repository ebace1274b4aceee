"""What a page is made from, and how a rule selects from it: rows, which are mappings from a column to a value.

A row is one run or one line of an analysis' table. The columns of a run are the keys of its config, its facts, its final measurements and
features of its curves: `grad/snr@0.75:1` is the mean over the last quarter of the steps, `weights/matrices@last/first` a quotient.
"""

import dataclasses
import fnmatch
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpx.config.hints import nearest
from dpx.declaration import ConfigError, declaration, require
from dpx.pages.run_rows import Run
from dpx.table import Table
from dpx_papers.report.analyses import Tables
from dpx_papers.report.rows import Published
from dpx_papers.report.shape import is_share

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The files of `home` as they were read: `tables` by experiment, `notes` by item."""

    home: Path
    runs: Sequence[Run] = ()
    published: Sequence[Published] = ()
    tables: Mapping[str, Tables] = dataclasses.field(default_factory=dict)
    notes: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def analysis(self, experiment: str) -> Tables:
        """Returns the tables of an analysis, and those of other names of the laptop's analysis or benchmark; empty if neither has run."""
        return {**self.tables.get(f"laptop_{experiment}", {}), **self.tables.get(experiment, {})}

    def laptop(self, experiment: str) -> list[Row]:
        """Returns the laptop runs whose experiment matches a pattern, as rows."""
        return [row_of(run) for run in self.runs if fnmatch.fnmatchcase(run.experiment, f"laptop_{experiment}")]


def row_of(run: Run) -> Row:
    """Returns the columns of a run, numbers as numbers; `run` is the run itself."""
    return {key: _number(text) for key, text in (run.facts | run.config).items()} | run.finals | {"run": run}


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


@declaration
class Best:
    """Reduces rows to the value of `over` at which the mean of `value` is highest (or `lowest`), for each combination of `each`;
    combinations in which `over` has a single value are left out."""

    value: str
    over: str
    each: Sequence[str] = ()
    lowest: bool = False

    def __call__(self, rows: Sequence[Row]) -> list[Row]:
        """Returns the rows with the columns `each` and `over`."""
        groups: dict[tuple[Any, ...], dict[Any, list[float]]] = {}
        for *key, over, value in zip(*(column(rows, name) for name in (*self.each, self.over, self.value)), strict=True):
            groups.setdefault(tuple(key), {}).setdefault(over, []).append(-value if self.lowest else value)
        several = {key: by_value for key, by_value in sorted(groups.items()) if len(by_value) > 1}
        best = {key: max(by_value, key=lambda over: statistics.fmean(by_value[over])) for key, by_value in several.items()}
        return [dict(zip(self.each, key, strict=True)) | {self.over: over} for key, over in best.items()]


@declaration
class Selection:
    """Rows of the laptop runs of `experiment` (a pattern; empty for the item's), or of its analysis' `table`.

    `where` keeps rows by a column's value: a number or text, a list of them, `min` or `max` of that column, or `!` and what it must not be.
    Fewer than `at_least` rows count as none. `best` reduces what is left.
    """

    experiment: str = ""
    table: str = ""
    where: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    at_least: int = 1
    best: Best | None = None

    def rows(self, evidence: Evidence, experiment: str) -> list[Row]:
        """Returns the selected rows; `experiment` is that of the item. Raises `ConfigError` for a column that no row has."""
        name = self.experiment or experiment
        tables = evidence.analysis(name) if self.table else {}
        require(not tables or self.table in tables, f"table: {self.table}", f"{name} has no such table", f"Use {', '.join(tables)}")
        rows: list[Row] = tables[self.table].as_json()["rows"] if tables else [] if self.table else evidence.laptop(name)
        for key, wanted in self.where.items():
            values = column(rows, key)
            rows = [row for row, value in zip(rows, values, strict=True) if value is not None and _matches(value, wanted, values)]
        rows = rows if len(rows) >= self.at_least else []
        return self.best(rows) if self.best and rows else rows


def _matches(value: Any, wanted: Any, values: Sequence[Any]) -> bool:
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return any(_matches(value, one, values) for one in wanted)
    if isinstance(wanted, str) and wanted.startswith("!"):
        return not _matches(value, wanted[1:], values)
    if wanted in ("min", "max"):
        known = [one for one in values if one is not None]
        wanted = min(known) if wanted == "min" else max(known)
    return value == (_number(wanted) if isinstance(wanted, str) else wanted)


def column(rows: Sequence[Row], name: str) -> list[Any]:
    """Returns the value of a column in each row, `None` in a row without it. Raises `ConfigError` if no row has it."""
    values = [cell(row, name) for row in rows]
    if rows and all(value is None for value in values):
        known = sorted({key for row in rows for key in (*row, *(row["run"].curves if isinstance(row.get("run"), Run) else ()))} - {"run"})
        fix = f"Name a column that exists{nearest(name.partition('@')[0], known) or ': ' + ', '.join(known[:12])}"
        raise ConfigError(f"column {name}", f"none of the {len(rows)} rows selected has it", fix)
    return values


def cell(row: Row, name: str) -> Any:
    """Returns the value of a column, or of a feature of a curve; `None` if the row does not have it.

    A feature is `first`, `last`, `peak`, `mean`, the mean over `begin:end` (fractions of the steps), `unevenness` (the standard deviation
    of the logarithm after the first tenth), or `points`: the whole curve.
    """
    metric, at, feature = name.partition("@")
    if not at:
        return row.get(name)
    run = row.get("run")
    if not isinstance(run, Run) or not run.curves.get(metric):
        return None
    parts = [_feature(run, metric, one) for one in feature.split("/")]
    return parts[0] if len(parts) == 1 else parts[0] / parts[1]


def _feature(run: Run, metric: str, name: str) -> Any:
    curve, values = run.curves[metric], [value for _, value in run.curves[metric]]
    if ":" in name:
        begin, end = (float(part) * curve[-1][0] for part in name.split(":"))
        return statistics.fmean(value for step, value in curve if begin < step <= end)
    if name == "unevenness":
        return statistics.pstdev(math.log(value) for step, value in curve if step > 0.1 * curve[-1][0])
    features: dict[str, Any] = {"first": values[0], "last": run.finals.get(metric, values[-1]), "peak": max(values)}
    features |= {"mean": statistics.fmean(values), "points": curve}
    require(name in features, f"{metric}@{name}", "no such feature of a curve", f"Use {', '.join(features)}, unevenness or begin:end")
    return features[name]


def drawn_tables(evidence: Evidence, experiment: str) -> dict[str, Table]:
    """Returns what figures of an item may draw, shares in percent: the tables `finals` (a row for each run), `curves` (one for each run,
    metric and step) and `published` (one for each number with a point) that have rows."""
    finals, curves = [], []
    for run in (row["run"] for row in evidence.laptop(experiment)):
        knobs = {key: _number(text) for key, text in run.config.items()} | {"run": run.run}
        finals.append(knobs | {metric: _drawn(metric, value) for metric, value in run.finals.items()})
        curves += [knobs | {"step": step, metric: _drawn(metric, value)} for metric, curve in run.curves.items() for step, value in curve]
    points = [(*line.point.split("="), line.value) for line in evidence.published if line.experiment == experiment and "=" in line.point]
    published = [{key: float(place), "value": float(value)} for key, place, value in points if value]
    tables = {"finals": finals, "curves": curves, "published": published}
    return {name: Table.from_rows(name, rows) for name, rows in tables.items() if rows}


def _drawn(metric: str, value: float) -> float:
    return 100 * value if is_share(metric) else value
