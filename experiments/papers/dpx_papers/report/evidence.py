"""What a page is made from, and how a rule selects from it: rows of a pandas table.

A row is one run or one line of an analysis' table. The columns of a run are the keys of its config, its facts, its final measurements and
features of its curves: `grad/snr@0.75:1` is the mean over the last quarter of the steps, `weights/matrices@last/first` a quotient.
"""

import dataclasses
import fnmatch
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dpx.config.node import nearest
from dpx.declaration import ConfigError, declaration, require
from dpx.pages.analysis_tables import Table
from dpx.pages.read_runs import Run
from dpx_papers.report.analyses import Tables
from dpx_papers.report.rows import Published
from dpx_papers.report.shape import is_share
from dpx_papers.report.sizes import FULL, LAPTOP, PREFIX, recipe_of, size_of

Row = Mapping[str, Any]
# A `pandas.DataFrame`, whose own types say of no column what it holds.
Rows = Any


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The files of `home` as they were read: `tables` by experiment, `notes` by item. Runs and tables of the laptop's recipes have
    `laptop_` before the name of the recipe that they make smaller."""

    home: Path
    runs: Sequence[Run] = ()
    published: Sequence[Published] = ()
    tables: Mapping[str, Tables] = dataclasses.field(default_factory=dict)
    notes: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def at(self, size: str) -> "Evidence":
        """Returns what has one of `SIZES`, its runs and tables by the name of the full-scale recipe."""
        runs = [dataclasses.replace(run, experiment=recipe_of(run.experiment)) for run in self.runs if size_of(run) == size]
        is_wanted = {FULL: False, LAPTOP: True}.get(size)
        tables = {recipe_of(name): own for name, own in self.tables.items() if name.startswith(PREFIX) is is_wanted}
        return dataclasses.replace(self, runs=runs, tables=tables)

    def analysis(self, experiment: str) -> Tables:
        """Returns the tables of an analysis or a benchmark; empty if it has not run."""
        return self.tables.get(experiment, {})

    def trained(self, experiment: str) -> Rows:
        """Returns the runs whose experiment matches a pattern, as rows."""
        return rows_of(row_of(run) for run in self.runs if fnmatch.fnmatchcase(run.experiment, experiment))


def rows_of(lines: Iterable[Row]) -> Rows:
    """Returns mappings from a column to a value as rows. A gap is `None`; a value that is no number, as of a run that diverged, stays."""
    lines = list(lines)
    columns = list(dict.fromkeys(name for line in lines for name in line))
    return pd.DataFrame([[line.get(name) for name in columns] for line in lines], columns=columns, dtype=object)


def row_of(run: Run) -> Row:
    """Returns the columns of a run, numbers as numbers; `run` is the run itself."""
    knobs: dict[str, Any] = {key: _number(text) for key, text in (run.facts | run.config).items()}
    return knobs | dict(_batch(run.config)) | run.finals | {"run": run}


def _batch(knobs: Mapping[str, str]) -> Row:
    """Returns the batch sizes of a schedule: the first, the last, how many and all of them; empty without a schedule."""
    sizes = knobs.get("batch_schedule.sizes", knobs.get("batch_schedule.size", "null"))
    found: Any = json.loads(sizes) if sizes[:1].isdigit() or sizes[:1] == "[" else []
    found = found if isinstance(found, list) else [found]
    return {"batch/first": found[0], "batch/last": found[-1], "batch/sizes": len(found), "batch/each": found} if found else {}


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


_ALL = "all rows"


@declaration
class Best:
    """Reduces rows to the value of `over` at which the mean of `value` is highest (or `lowest`), for each combination of `each`;
    combinations in which `over` has a single value are left out."""

    value: str
    over: str
    each: Sequence[str] = ()
    lowest: bool = False

    def __call__(self, rows: Rows) -> Rows:
        """Returns the rows with the columns `each` and `over`."""
        keys = [*self.each, self.over]
        read: Any = pd.DataFrame({name: column(rows, name) for name in (*keys, self.value)}, dtype=object)
        means: Any = read.astype({self.value: float}).groupby(keys, as_index=False)[self.value].agg(mean_of_all).dropna()
        # A group of all rows, where nothing tells groups apart.
        means = means.assign(**{_ALL: 0})
        groups = [_ALL, *self.each]
        several = means[means.groupby(groups)[self.over].transform("size") > 1]
        values = several.groupby(groups)[self.value]
        return several.loc[values.idxmin() if self.lowest else values.idxmax(), keys].astype(object)


def mean_of_all(values: Any) -> float:
    """Returns the mean of a column, which is no number if one of the values is none."""
    return values.mean(skipna=False)


@declaration
class Selection:
    """Rows of the runs of `experiment` (a pattern; empty for the item's), or of its analysis' `table`.

    `where` keeps rows by a column's value: a number or text, a list of them, `min` or `max` of that column, or `!` and what it must not be.
    Fewer than `at_least` rows count as none. `best` reduces what is left.
    """

    experiment: str = ""
    table: str = ""
    where: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    at_least: int = 1
    best: Best | None = None

    def rows(self, evidence: Evidence, experiment: str) -> Rows:
        """Returns the selected rows; `experiment` is that of the item. Raises `ConfigError` for a column that no row has."""
        name = self.experiment or experiment
        tables = evidence.analysis(name) if self.table else {}
        require(not tables or self.table in tables, f"table: {self.table}", f"{name} has no such table", f"Use {', '.join(tables)}")
        rows = rows_of(tables[self.table].as_json()["rows"] if tables else ()) if self.table else evidence.trained(name)
        for key, wanted in self.where.items():
            values = column(rows, key)
            rows = rows[[value is not None and _matches(value, wanted, values) for value in values]]
        rows = rows if len(rows) >= self.at_least else rows[:0]
        return self.best(rows) if self.best and len(rows) else rows


def _matches(value: Any, wanted: Any, values: Sequence[Any]) -> bool:
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return any(_matches(value, one, values) for one in wanted)
    if isinstance(wanted, str) and wanted.startswith("!"):
        return not _matches(value, wanted[1:], values)
    if wanted in ("min", "max"):
        known = [one for one in values if one is not None]
        wanted = min(known) if wanted == "min" else max(known)
    return value == (_number(wanted) if isinstance(wanted, str) else wanted)


def column(rows: Rows, name: str) -> list[Any]:
    """Returns the value of a column in each row, `None` in a row without it. Raises `ConfigError` if no row has it."""
    if name in rows:
        values = list(rows[name])
    else:
        values = [feature(run, name) for run in rows["run"]] if "@" in name and "run" in rows else [None] * len(rows)
    if values and all(value is None for value in values):
        curves = {key for run in rows["run"] if isinstance(run, Run) for key in run.curves} if "run" in rows else set()
        known = sorted({*rows.columns, *curves} - {"run"})
        fix = f"Name a column that exists{nearest(name.partition('@')[0], known) or ': ' + ', '.join(known[:12])}"
        raise ConfigError(f"column {name}", f"none of the {len(rows)} rows selected has it", fix)
    return values


def feature(run: Any, name: str) -> Any:
    """Returns a feature of a curve of a run, named `metric@feature`; `None` if it is not a run with that curve.

    A feature is `first`, `last`, `peak`, `mean`, the mean over `begin:end` (fractions of the steps), `unevenness` (the standard deviation
    of the logarithm after the first tenth), or `points`: the whole curve. Two of them with a slash between are a quotient.
    """
    metric, _, features = name.partition("@")
    if not isinstance(run, Run) or not run.curves.get(metric):
        return None
    parts = [_feature(run, metric, one) for one in features.split("/")]
    return parts[0] if len(parts) == 1 else parts[0] / parts[1]


def cell(run: Run, name: str) -> Any:
    """Returns the value of a column of one run; `None` if the run does not have it."""
    return feature(run, name) if "@" in name else row_of(run).get(name)


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
    for run in evidence.trained(experiment).get("run", ()):
        knobs: dict[str, Any] = {key: _number(text) for key, text in run.config.items()} | {"run": run.run}
        finals.append(knobs | {metric: _drawn(metric, value) for metric, value in run.finals.items()})
        curves += [knobs | {"step": step, metric: _drawn(metric, value)} for metric, curve in run.curves.items() for step, value in curve]
    own = [line for line in evidence.published if line.experiment == experiment and line.value and line.point.count("=") == 1]
    places = [(line, *line.point.split("=")) for line in own]
    published = [{key: _number(place), "value": float(line.value), "metric": line.metric} for line, key, place in places]
    tables = {"finals": finals, "curves": curves, "published": published}
    return {name: Table.from_rows(name, rows) for name, rows in tables.items() if rows}


def _drawn(metric: str, value: int | float) -> int | float:
    return 100 * value if is_share(metric) else value
