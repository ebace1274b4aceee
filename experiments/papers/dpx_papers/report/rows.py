"""`results.csv`: every fact of every run that a page may show, one fact a row; and the runs read back from it.

Rows are (experiment, run, point, replicate, metric, step, value). `config/...` and `fact/...` rows hold text and have no step;
a measurement has the number of steps done, or `final`. `published.csv` beside it holds every number in a paper,
its place in the paper, how it was obtained, and the cost of running it.
"""

import csv
import dataclasses
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from dpx.declaration import ConfigError, require
from dpx.durable import write_durably
from dpx.pages.read_runs import FINAL, Run

COLUMNS = ("experiment", "run", "point", "replicate", "metric", "step", "value")
# How a sum is computed is not compared.
_NOT_A_POINT = ("microbatch", "clipping_method.name", "clipping_method")
_SPOILED = ("is cut short, or was changed by hand", "Restore it; results.csv can be collected again from the runs")
# The stages of a chain are the same at every point, which is in the keys below `point`.
_STAGES = "chain."
# How a number is known, in the words of a page.
MARKS = {
    "text": "printed in the text",
    "picture": "in a figure only",
    "computed": "computed from its settings",
    "claim": "stated without a number",
}


def labelled(runs: Iterable[Run]) -> list[Run]:
    """Returns the runs by experiment, point and replicate.

    The point is the knobs in which the runs of one experiment differ, `-` if none.
    """
    # Analyses read published.csv, and their plans need no pandas.
    import pandas as pd

    every, found = pd.Series(list(runs), dtype=object), []
    for _, own in every.groupby([run.experiment for run in every]):
        keys = sorted({key for run in own for key in run.config})
        swept = [key for key in keys if len({run.config.get(key) for run in own if run.config}) > 1]
        names = [key for key in swept if key not in _NOT_A_POINT and not key.startswith(_STAGES)] or swept
        for run in own:
            point = " ".join(f"{key}={run.config[key]}" for key in names if key in run.config)
            found.append(dataclasses.replace(run, point=point or "-"))
    return sorted(found, key=lambda run: (run.experiment, _natural(run.point), run.replicate, run.run))


def _natural(point: str) -> list[str | int]:
    """Returns a sort key by which 32 comes before 128."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", point)]


def write(path: Path, runs: Iterable[Run]) -> None:
    """Replaces `path` with sorted rows, so that a rebuilt file differs only where a fact does."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for run in sorted(labelled(runs), key=lambda run: run.key):
        for row in sorted(run.rows(), key=lambda row: (row[0], int(row[1]) if row[1].isdigit() else -1, len(row[1]))):
            writer.writerow((run.experiment, run.run, run.point, run.replicate, *row))
    write_durably(path, text.getvalue())


def lines(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields each line of a CSV file with its place, or nothing if the file does not exist.

    Raises `ConfigError` for other columns, and for a line that has more or fewer cells.
    """
    if not path.exists():
        return
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        require(tuple(reader.fieldnames or ()) == columns, path, "its columns are others", f"Give {', '.join(columns)}")
        for line in reader:
            place = f"{path}, line {reader.line_num}"
            require(None not in line and None not in line.values(), place, *_SPOILED)
            yield place, line


def read(path: Path) -> list[Run]:
    """Returns the runs of `path`, or none if it does not exist. Raises `ConfigError` for other columns, and for a malformed row."""
    runs: dict[tuple[str, str], Run] = {}
    for place, line in lines(path, COLUMNS):
        key, (kind, _, name) = (line["experiment"], line["run"]), line["metric"].partition("/")
        try:
            run = runs.setdefault(key, Run(*key, "-", int(line["replicate"]), {}, {}, {}, {}))
            if kind in ("config", "fact"):
                {"config": run.config, "fact": run.facts}[kind][name] = line["value"]
            elif line["step"] == FINAL:
                run.finals[line["metric"]] = float(line["value"])
            else:
                curve = run.curves.get(line["metric"], ())
                run.curves[line["metric"]] = tuple(sorted((*curve, (int(line["step"]), float(line["value"])))))
        except ValueError as error:
            raise ConfigError(place, *_SPOILED) from error
    return labelled(runs.values())


@dataclasses.dataclass(frozen=True)
class Published:
    """One published number. `value` is empty if it is only in a figure that was not digitised, or is a claim in prose.

    `metric` and `point` say which row of results.csv is ours at full scale; `h200_hours` and `flops` what making it costs.
    """

    item: str
    experiment: str
    quantity: str
    value: str
    unit: str
    mark: str
    where: str
    metric: str
    point: str
    h200_hours: str
    flops: str
    note: str

    def __post_init__(self) -> None:
        what = f"{self.item} {self.quantity}"
        require(self.mark in MARKS, what, f"its mark is {self.mark!r}", f"Use {', '.join(MARKS)}")
        has_value = bool(self.value) or self.mark not in ("text", "computed")
        require(has_value, what, f"a number from {self.mark} without a value", "Give it, or mark it as a picture's or a claim")


def read_published(path: Path) -> list[Published]:
    """Returns every line of the file; raises `ConfigError` for other columns, an unknown mark, and a line that is cut short."""
    require(path.is_file(), path, "the file of published values is missing", "Run it from the checkout, or set report.evidence")
    return [Published(**line) for _, line in lines(path, tuple(field.name for field in dataclasses.fields(Published)))]
