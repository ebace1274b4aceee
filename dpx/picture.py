"""The pictures of an analysis: columns of its tables plotted against one another, so that a picture never shows a number that is not in a
table.

An analysis that draws has `pictures() -> list[Picture]`; `dpx.report.pictures` does the drawing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from dpx.declaration import declaration

Scale = Literal["linear", "log", "category"]


@declaration
class _Axes:
    """What every panel has: the table that it draws, the column or columns across, and what is written on it."""

    table: str
    x: str | Sequence[str]
    title: str = ""
    x_label: str = ""
    y_label: str = ""


@declaration
class Lines(_Axes):
    """One line for each column of `y`, times one for each value of the column `by`. `marks` are columns drawn without a line.

    `where` keeps rows whose column has that value. `x` may be several columns, joined; that is a category. `names` renames columns
    in the legend. `runs` is a column that tells replicates apart: each is drawn thin, or as a mark, and their mean thick. `values` writes
    the value of each mark beside it, `level` is the height of a dotted line; on a page, it may be an experiment, whose
    runs' mean is drawn.
    """

    y: Sequence[str] = ()
    marks: Sequence[str] = ()
    by: str = ""
    where: Sequence[Any] | None = None
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
    """An arrow at each (`x`, `y`) on doubling axes, whose parts are the columns `right` and `up`: 1 is a whole doubling."""

    x: str
    y: str
    right: str
    up: str


@declaration
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
