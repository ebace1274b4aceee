"""`results.csv`: every fact of every run that a page may show, one fact a row; and the runs read back from it.

Rows are (experiment, run, point, replicate, metric, step, value). `config/...` and `fact/...` rows hold text and have no step;
a measurement has the number of steps done, or `final`.
"""

import csv
import dataclasses
import io
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dpx.declaration import require
from dpx.durable import write_durably

COLUMNS = ("experiment", "run", "point", "replicate", "metric", "step", "value")
FINAL = "final"
# The repeat's number, and how a sum is computed, are not compared.
_NOT_A_POINT = ("microbatch", "clipping_method.name", "clipping_method")


@dataclasses.dataclass(frozen=True)
class Row:
    """One fact of one run; `run` is the folder's name without the experiment's."""

    experiment: str
    run: str
    replicate: int
    metric: str
    step: str
    value: str


@dataclasses.dataclass(frozen=True)
class Run:
    """One run, read from its rows. `curves[metric]` are (steps done, value) in the order of steps."""

    experiment: str
    run: str
    point: str
    replicate: int
    config: dict[str, str]
    facts: dict[str, str]
    finals: dict[str, float]
    curves: dict[str, tuple[tuple[int, float], ...]]

    def number(self, key: str) -> float:
        """A knob as a number; raises `KeyError` if the run has no knob of that name."""
        return float(self.config[key])


def write(path: Path, rows: Iterable[Row]) -> None:
    """Replaces `path`; rows sorted, so that a rebuilt file differs only where a fact does."""
    ordered = sorted(set(rows), key=_order)
    labels = points(ordered)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in ordered:
        writer.writerow([row.experiment, row.run, labels[row.experiment, row.run], row.replicate, row.metric, row.step, row.value])
    write_durably(path, text.getvalue())


def read(path: Path) -> list[Row]:
    """The rows of `path`; empty if it does not exist. Raises `ConfigError` for other columns, and for a malformed row."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        require(tuple(reader.fieldnames or ()) == COLUMNS, path, "its columns are others", f"Give {', '.join(COLUMNS)}")
        return [_row(path, reader.line_num, line) for line in reader]


def _row(path: Path, number: int, line: dict[Any, Any]) -> Row:
    is_whole = None not in line and None not in line.values()
    try:
        row = Row(line["experiment"], line["run"], int(line["replicate"]), line["metric"], line["step"], line["value"])
        if row.metric.partition("/")[0] not in ("config", "fact"):
            float(row.value)
            int(row.step if row.step != FINAL else 0)
    except (TypeError, ValueError, AttributeError):
        is_whole = False
    require(is_whole, f"{path}, line {number}", "is cut short, or was changed by hand", "Restore it, or collect again from the runs")
    return row


def _order(row: Row) -> tuple[str, str, str, int, int]:
    return (row.experiment, row.run, row.metric, int(row.step) if row.step.isdigit() else -1, len(row.step))


def by_run(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows of each (experiment, run)."""
    grouped: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row.experiment, row.run].append(row)
    return dict(grouped)


def points(rows: Iterable[Row]) -> dict[tuple[str, str], str]:
    """A label by (experiment, run): the knobs in which the runs of one experiment differ, `-` if none differs."""
    configs: dict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    for (experiment, run), own in by_run(rows).items():
        configs[experiment][run] = {row.metric.removeprefix("config/"): row.value for row in own if row.metric.startswith("config/")}
    labels = {}
    for experiment, of_runs in configs.items():
        keys = {key for config in of_runs.values() for key in config}
        swept = sorted(key for key in keys if len({config.get(key) for config in of_runs.values() if config}) > 1)
        named = [key for key in swept if key not in _NOT_A_POINT] or swept
        for run, config in of_runs.items():
            labels[experiment, run] = " ".join(f"{key}={config[key]}" for key in named if key in config) or "-"
    return labels


def runs_of(rows: Iterable[Row]) -> list[Run]:
    """The runs in `rows`, by experiment, point and replicate."""
    rows = list(rows)
    labels = points(rows)
    runs = [_run(key, labels[key], group) for key, group in by_run(rows).items()]
    return sorted(runs, key=lambda run: (run.experiment, _natural(run.point), run.replicate, run.run))


def _natural(point: str) -> list[str | int]:
    """A key by which 32 is before 128."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", point)]


def _run(key: tuple[str, str], point: str, rows: list[Row]) -> Run:
    config, facts, finals = {}, {}, {}
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        kind, _, name = row.metric.partition("/")
        if kind == "config":
            config[name] = row.value
        elif kind == "fact":
            facts[name] = row.value
        elif row.step == FINAL:
            finals[row.metric] = float(row.value)
        else:
            curves[row.metric].append((int(row.step), float(row.value)))
    ordered = {metric: tuple(sorted(curve)) for metric, curve in curves.items()}
    return Run(key[0], key[1], point, rows[0].replicate, config, facts, finals, ordered)
