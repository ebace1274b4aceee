"""Describes the pictures of an analysis, which plot columns of its tables, so that a picture shows no number that is not in a table.

An analysis with pictures has `pictures(tables) -> list[Picture]`; `dpx.pages.pictures` draws them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from dpx.declaration import declaration

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

    `where` selects the rows whose column has that value. `x` may be several columns, joined to a category. `names` renames columns in the
    legend. `runs` is a column that tells replicates apart: each is drawn as a thin line, or as a mark, and their mean as a thick line.
    `series` are the values of `by` in the order of their colours; the picture then has no legend, because one beside it serves several.
    `values` writes the value of each mark beside it. `level` is the height of a dotted line; on a page, it may be an experiment, and the
    mean of its runs is drawn.
    """

    y: Sequence[str] = ()
    marks: Sequence[str] = ()
    by: str = ""
    series: Sequence[str] = ()
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
    """Draws an arrow at each point (`x`, `y`) on logarithmic axes; its components are the columns `right` and `up`, where 1 is a whole
    doubling."""

    x: str
    y: str
    right: str
    up: str


@declaration
class Cells(_Axes):
    """Writes and shades `value` at each pair (`x`, `y`)."""

    x: str
    y: str
    value: str


Panel = Lines | Arrows | Cells


@dataclasses.dataclass(frozen=True)
class Picture:
    """Places panels side by side under one caption; `name` is the file's name without its extension."""

    name: str
    caption: str
    panels: tuple[Panel, ...]
