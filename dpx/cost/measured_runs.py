"""Holds measured losses in one tidy table: a row for each record of a run, filled from run folders or read from a CSV file.

A record is the mean training loss of 100 steps, as in McKenna et al. 2025 (section 3.3). Losses of private text are private: no run's
privacy statement covers a fit on them.
"""

import csv
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpx.declaration import ConfigError, require
from dpx.files import results
from dpx.models.model_protocol import count
from dpx.statement import agreement
from dpx.statement.seals import STATEMENT, read_statement
from dpx.statement.statement_records import RunStatement

# The columns of a row, in the order of the CSV file.
TEXT, NUMBERS = (
    ("model",),
    ("parameters", "noise_batch_ratio", "learning_rate", "replicate", "batch_size", "sequence_length", "step", "loss"),
)
# A ratio below this is lost in the rounding of float32: clipping without noise.
NO_NOISE = 2.0**-30


@dataclasses.dataclass(frozen=True)
class Measurements:
    """The columns of the table, of equal length.

    `step` is the number of steps done, `loss` the mean training loss (nats) of the records up to it.
    """

    model: np.ndarray
    parameters: np.ndarray
    noise_batch_ratio: np.ndarray
    learning_rate: np.ndarray
    replicate: np.ndarray
    batch_size: np.ndarray
    sequence_length: np.ndarray
    step: np.ndarray
    loss: np.ndarray

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, name)) for name in (*TEXT, *NUMBERS)}
        require(
            len(lengths) == 1,
            f"columns of {sorted(lengths)} rows",
            "the columns of a table must have the same length",
            "Give every column a value in each row",
        )
        for name in NUMBERS:
            values = np.asarray(getattr(self, name))
            require(bool(np.isfinite(values).all()), f"column {name}", "contains a value that is not a finite number", "Remove such rows")
        for name in ("parameters", "learning_rate", "batch_size", "sequence_length", "step", "loss"):
            require(bool((getattr(self, name) > 0).all()), f"column {name}", "contains a value that is not positive", "Check its unit")
        ratios = self.noise_batch_ratio
        require(bool((ratios >= 0).all()), "column noise_batch_ratio", "contains a value below 0", "Give 0 for clipping without noise")

    def __len__(self) -> int:
        return len(self.model)

    @classmethod
    def from_rows(cls, rows: Sequence[dict[str, Any]]) -> "Measurements":
        """Returns the table of `rows`, each `{column: value}` (text or numbers).

        Raises `ConfigError` for no rows, a missing column, a value that is not a finite number, or two losses of one step.
        """
        require(bool(rows), "0 rows", "the table contains no measurements", "Name finished runs, or a table with measurements")
        for name in (*TEXT, *NUMBERS):
            require(name in rows[0], f"column {name!r}", "is missing", f"Give {', '.join((*TEXT, *NUMBERS))}")
        columns: dict[str, list[float]] = {name: [] for name in NUMBERS}
        for name in NUMBERS:
            for place, row in enumerate(rows, 1):
                try:
                    columns[name].append(float(row[name]))
                except (KeyError, TypeError, ValueError):
                    raise ConfigError(f"row {place}, column {name}", f"{row.get(name)!r} is not a number", "Give a number") from None
        table = cls(np.array([str(row["model"]) for row in rows]), **{name: np.array(values) for name, values in columns.items()})
        keys: set[tuple] = set()
        for row in zip(*(getattr(table, name).tolist() for name in (*TEXT, *NUMBERS[:-1])), strict=True):
            own = f"{row[0]} at ratio {row[2]:g}, rate {row[3]:g}, replicate {row[4]:g}, step {row[7]:g}"
            require(row not in keys, own, "has two different losses", "Remove one of them, or give the second run its own replicate")
            keys.add(row)
        return table

    @classmethod
    def read(cls, path: Path) -> "Measurements":
        """Returns the table in a CSV file with these columns. Raises `ConfigError` if the file has other columns."""
        try:
            with open(path, newline="", encoding="utf-8-sig") as file:
                lines = list(csv.DictReader(file))
        except (UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(path, f"is not a CSV table in UTF-8 ({error})", "Save it as a CSV table in UTF-8") from None
        return cls.from_rows(lines)

    def write(self, path: Path) -> None:
        """Writes a CSV file that `read` reads, with unrounded numbers."""
        names = (*TEXT, *NUMBERS)
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(names)
            writer.writerows(zip(*(getattr(self, name).tolist() for name in names), strict=True))

    def where(self, chosen: np.ndarray) -> "Measurements":
        """Returns the rows for which `chosen` (bool or indices) is true."""
        return Measurements(**{name: getattr(self, name)[chosen] for name in (*TEXT, *NUMBERS)})

    def updated(self, fresh: "Measurements") -> "Measurements":
        """Returns these rows and those of `fresh`, in the order of runs; of a run that both have, it takes the rows of `fresh`."""
        new = set(fresh._runs())
        kept = self.where(np.array([run not in new for run in self._runs()], bool))
        both = Measurements(**{name: np.concatenate([getattr(kept, name), getattr(fresh, name)]) for name in (*TEXT, *NUMBERS)})
        keys = ("step", "sequence_length", "batch_size", "replicate", "learning_rate", "noise_batch_ratio", "parameters")
        return both.where(np.lexsort([getattr(both, name) for name in keys]))

    def _runs(self) -> list[tuple[Any, ...]]:
        names = ("model", "noise_batch_ratio", "learning_rate", "replicate", "batch_size", "sequence_length")
        return list(zip(*(getattr(self, name).tolist() for name in names), strict=True))

    @property
    def is_noisy(self) -> np.ndarray:
        """Returns, for each row, whether its run had noise: a ratio that float32 can distinguish from 0."""
        return self.noise_batch_ratio > NO_NOISE


RECORD_EVERY = 100
# The settings that identify a run of a table.
SETTINGS = ("model", "parameters", "noise_batch_ratio", "learning_rate", "replicate", "batch_size", "sequence_length")


def record_means(losses: np.ndarray, is_drawn: np.ndarray, every: int = RECORD_EVERY) -> tuple[np.ndarray, np.ndarray]:
    """Returns (steps done, mean loss) of every whole window of `every` steps.

    A step in which no example `is_drawn` has no loss and does not count; an incomplete window, or one of such steps alone, is left out. A
    loss that is not finite makes its mean not finite.
    """
    whole = len(losses) // every
    windows, is_drawn = (values[: whole * every].reshape(whole, every) for values in (losses, is_drawn))
    drawn = is_drawn.sum(1)
    some = drawn > 0
    return (every * np.arange(1, whole + 1))[some], np.where(is_drawn, windows, 0.0).sum(1)[some] / drawn[some]


def measured(outputs: Path, match: str = "", every: int = RECORD_EVERY) -> tuple[Measurements, list[str]]:
    """Returns the measurements of every run under `outputs` whose folder begins with `match`, and a line on each omitted folder.

    A run counts as far as it went. A folder is omitted if it could not be read, or has the same settings as a run that went as far.

    Raises `ConfigError` where nothing is found.
    """
    kept: dict[tuple, tuple[str, list[dict[str, Any]]]] = {}
    left_out = []
    named = sorted(path for path in outputs.glob("*") if path.name.startswith(match))
    for folder in (path for path in named if (path / "private" / "metrics.jsonl").exists()):
        try:
            found = folder.name, _rows(folder, every)
        # A folder that cannot be read does not stop the others.
        except Exception as error:
            left_out.append(f"{folder.name}: not readable ({type(error).__name__}: {error})")
            continue
        if not found[1]:
            continue
        settings = tuple(found[1][0][name] for name in SETTINGS)
        if settings in kept:
            shorter, found = sorted((found, kept[settings]), key=lambda one: len(one[1]))
            left_out.append(f"{shorter[0]}: the settings of {found[0]}; give one of them its own replicate")
        kept[settings] = found
    rows = [row for _, rows in kept.values() for row in rows]
    require(
        bool(rows), f"{outputs}/{match}*", "no run in this folder has a record of its training loss", "Name the folder that holds the runs"
    )
    return Measurements.from_rows(rows), left_out


def shipped() -> Path:
    """Returns the table of losses that comes with dpx: `laptop/mckenna_grid`, on public text, as far as it has been trained."""
    package = Path(__file__).parent
    in_wheel = package / "laptop_grid.csv"
    return in_wheel if in_wheel.exists() else package.parents[1] / "experiments" / "mckenna2025" / "measurements.csv"


def load(place: str | Path, match: str = "") -> tuple[Measurements, list[str]]:
    """Returns the measurements of a CSV table (`Measurements.read`) or of a folder of runs (`measured`).

    Raises `ConfigError` if nothing is there.
    """
    path = Path(place)
    require(path.exists(), path, "no such file or folder", "Name a CSV table of measurements, or a folder that contains runs")
    return measured(path, match) if path.is_dir() else (Measurements.read(path), [])


def _rows(folder: Path, every: int) -> list[dict[str, Any]]:
    """Returns a row for each record of the run in `folder`, with the settings that identify the run."""
    from dpx.config import build, place_of, read

    agreement.check(folder)
    config = read(place_of(folder))
    lines = results.read(folder / "private")
    steps = [line["step"] for line in lines]
    require(steps == list(range(1, len(steps) + 1)), folder.name, "the record of its losses has gaps", "Resume the run")
    losses, is_drawn = (np.array([line.get(name, math.nan) for line in lines]) for name in ("train/loss", "train/examples"))
    steps_done, means = record_means(losses, is_drawn > 0, every)
    require(
        bool(np.isfinite(means).all()),
        folder.name,
        "its losses include a value that is not a finite number",
        "Remove the run, or lower its learning rate",
    )
    experiment, batch_size, noise = build(config)[0], config.batch_schedule.size, config.noise
    # A run without privacy has ratio 0, and counts as one without noise.
    if "noise_batch_ratio" in noise:
        ratio = noise.noise_batch_ratio
    elif "noise_multiplier" in noise:
        ratio = noise.noise_multiplier / batch_size
    else:
        claim = read_statement(folder / "release" / STATEMENT)
        sigma = claim.mechanism.noise_multiplier if isinstance(claim, RunStatement) else None
        ratio = 0.0 if sigma is None else sigma / batch_size
    same = {
        "model": config.model.name,
        "parameters": count(experiment.task.parameter_shapes(experiment.model, experiment.vocabulary_size)),
        "noise_batch_ratio": ratio,
        "learning_rate": config.lr_schedule.learning_rate,
        "replicate": config.replicate,
        "batch_size": batch_size,
        "sequence_length": config.data.sequence_length,
    }
    return [same | {"step": step, "loss": loss} for step, loss in zip(steps_done, means, strict=True)]
