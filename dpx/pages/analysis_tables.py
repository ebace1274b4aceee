"""Holds the results of an analysis as tables of plain values, so that JSON, CSV and a terminal show the same values.

Pictures plot columns of these tables, so that a picture shows no number that is not in a table. An analysis with pictures has
`pictures(tables) -> list[Picture]`; `dpx.pages.pictures` draws them.
"""

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.table import Table as RichTable

from dpx.declaration import declaration


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


Scale = Literal["linear", "log", "category"]


@declaration
class _Axes:
    """Holds what every panel has: its table, the column or columns of the x axis, and its labels."""

    table: str
    x: str | Sequence[str]
    title: str = ""
    x_label: str = ""
    y_label: str = ""


@declaration
class Lines(_Axes):
    """Draws one line for each column of `y` and each value of the column `by`. `marks` are columns drawn without a line.

    `where` selects the rows whose columns have these values. `x` may be several columns, joined to a category. `names` renames columns in
    the legend. `band` are two columns, the lower and the upper edge of what is shaded around the line of `y`. `runs` is a column that tells
    replicates apart: each is drawn as a thin line, or as a mark, and their mean as a thick line. `series` are the values of `by` in the
    order of their colours; the picture then has no legend, because one beside it serves several.
    `values` writes the value of each mark beside it. `level` is the height of a dotted line; on a page, it may be an experiment, and the
    mean of its runs is drawn.
    """

    y: Sequence[str] = ()
    marks: Sequence[str] = ()
    by: str = ""
    band: Sequence[str] = ()
    series: Sequence[str] = ()
    where: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    names: Sequence[Sequence[str]] = ()
    runs: str = ""
    values: bool = False
    level: float | str | None = None
    x_limits: Sequence[float] = ()
    y_limits: Sequence[float] = ()


@declaration
class Arrows(_Axes):
    """Draws an arrow at each point (`x`, `y`) on logarithmic axes; its components are the columns `right` and `up`, where 1 is a whole
    doubling."""

    x: str
    y: str
    right: str
    up: str


@declaration
class Cells(_Axes):
    """Writes and shades the mean of `value` over the rows of each pair (`x`, `y`), of the rows that `where` selects."""

    x: str
    y: str
    value: str
    where: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Panel = Lines | Arrows | Cells


@dataclasses.dataclass(frozen=True)
class Picture:
    """Places panels under one caption, `columns` of them in a row (by default all of three, and two of four); `name` is the file's name
    without its extension."""

    name: str
    caption: str
    panels: tuple[Panel, ...]
    columns: int = 0
