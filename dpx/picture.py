"""The pictures of an analysis: columns of its tables plotted against one another, so that a picture never shows a number that is not in a
table.

An analysis that draws has `pictures() -> list[Picture]`; `dpx.report.pictures` does the drawing.
"""

import dataclasses
from typing import Literal

Scale = Literal["linear", "log", "category"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Axes:
    """What every panel has: the table that it draws, the column or columns across, and what is written on it."""

    table: str
    x: str | tuple[str, ...]
    title: str = ""
    x_label: str = ""
    y_label: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lines(_Axes):
    """One line for each column of `y`, times one for each value of the column `by`. `marks` are columns drawn without a line.

    `where` keeps rows whose column has that value. `x` may be several columns, joined; that is a category. `names` renames columns
    in the legend.
    """

    y: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    by: str = ""
    where: tuple[str, object] | None = None
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    names: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrows(_Axes):
    """An arrow at each (`x`, `y`) on doubling axes, whose parts are the columns `right` and `up`: 1 is a whole doubling."""

    x: str
    y: str
    right: str
    up: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cells(_Axes):
    """`value` written and shaded at each pair of (`x`, `y`)."""

    x: str
    y: str
    value: str


Panel = Lines | Arrows | Cells


@dataclasses.dataclass(frozen=True)
class Picture:
    """Panels side by side under one caption; `name` is the file's, without ending."""

    name: str
    caption: str
    panels: tuple[Panel, ...]
