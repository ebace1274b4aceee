"""Holds the results of an analysis as tables of plain values, so that JSON, CSV and a terminal show the same values."""

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable


@dataclasses.dataclass(frozen=True)
class Table:
    """Holds one table of an analysis.

    Attributes:
        name: The name of its CSV file, without ending.
        columns: Names of the columns.
        rows: Cells by row: text, numbers, booleans or `None`, as many as there are columns.
        title: What is printed above it; the name by default.
        notes: Sentences that a reader of the numbers must know.

    Raises:
        ValueError: For a row with another number of cells.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    title: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.name}: a row of {len(row)} cells under {len(self.columns)} columns")

    @classmethod
    def from_rows(cls, name: str, rows: Sequence[Mapping[str, Any]], title: str = "", notes: Sequence[str] = ()) -> "Table":
        """Returns the table of `rows`, each a dict by column as in `as_json`; a missing column becomes None."""
        columns = tuple(dict.fromkeys(column for row in rows for column in row))
        return cls(name, columns, tuple(tuple(row.get(column) for column in columns) for row in rows), title, tuple(notes))

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "rows": [dict(zip(self.columns, row, strict=True)) for row in self.rows],
            "notes": list(self.notes),
        }

    def write_csv(self, folder: Path) -> Path:
        """Writes `<name>.csv` into `folder`, with unrounded numbers; returns its path."""
        path = folder / f"{self.name}.csv"
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([self.columns, *self.rows])
        return path

    def shown(self) -> RichTable:
        """Returns the table for a terminal, with floats to five significant digits."""
        table = RichTable(*self.columns, title=self.title or self.name, title_justify="left")
        for row in self.rows:
            table.add_row(*(_cell(value) for value in row))
        return table


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"
