"""Holds measured losses in one tidy table: a row for each record of a run, filled from run folders or read from a CSV file.

Losses of private text are private: no run's privacy statement covers a fit on them.
"""

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpx.declaration import ConfigError, require

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
        table = cls(np.array([str(row["model"]) for row in rows]), **{name: _numbers(rows, name) for name in NUMBERS})
        keys: set[tuple] = set()
        for row in zip(*(getattr(table, name).tolist() for name in (*TEXT, *NUMBERS[:-1])), strict=True):
            own = f"{row[0]} at ratio {row[2]:g}, rate {row[3]:g}, replicate {row[4]:g}, step {row[7]:g}"
            require(row not in keys, own, "has two different losses", "Remove one of them, or give the second run its own replicate")
            keys.add(row)
        return table

    @classmethod
    def read(cls, path: Path) -> "Measurements":
        """Returns the table in a CSV file with these columns. Raises `ConfigError` if the file has other columns."""
        return cls.from_rows(_lines(path))

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


def _numbers(rows: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    values = []
    for place, row in enumerate(rows, 1):
        try:
            values.append(float(row[name]))
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"row {place}, column {name}", f"{row.get(name)!r} is not a number", "Give a number") from None
    return np.array(values)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a CSV file by their header's names, with or without a byte-order mark."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            return list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(path, f"is not a CSV table in UTF-8 ({error})", "Save it as a CSV table in UTF-8") from None
