"""Tests orders, with a tolerance for a few points that measured surfaces need."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from dpx_papers.report import shape
from dpx_papers.report.shape import Part

# A measured surface has noise: at least this share of the pairs that differ must be in order.
IN_ORDER = 0.9


def neighbours(rows: Any, same: Sequence[str], by: str, value: str) -> list[tuple[float, float]]:
    """Returns pairs of values of consecutive rows in the order of `by`, within each group of equal `same`."""
    groups = rows.sort_values(by, kind="stable").groupby(list(same))[value] if len(rows) else ()
    return [pair for _, own in groups for pair in itertools.pairwise(own.tolist())]


def ascending(claim: str, pairs: Iterable[tuple[float, float]]) -> Part:
    """Judges whether the second of each pair is above the first. Equal ones do not count, unless all are equal."""
    pairs = list(pairs)
    if not pairs:
        return Part.of(claim, None, "no two points inside the grid compare")
    up, down = sum(one < other for one, other in pairs), sum(one > other for one, other in pairs)
    words = f"{up} of {up + down} pairs in order, {len(pairs) - up - down} equal"
    return Part.of(claim, up > 0 and up >= IN_ORDER * (up + down), words)


@dataclasses.dataclass(frozen=True)
class Slope:
    """A least-squares slope of logarithms, with its 95 % interval, and the number of points."""

    slope: float
    low: float
    high: float
    points: int

    def words(self) -> str:
        """Returns it for a reader."""
        return f"{self.slope:.2f} (95 %: {self.low:.2f} to {self.high:.2f}, {self.points} points)"


def slope(rows: Any, x: str, y: str) -> Slope:
    """Returns the slope of the logarithm of one column against that of another."""
    points = list(zip(rows[x].astype(float), rows[y].astype(float), strict=True))
    return Slope(shape.slope(points), *shape.slope_interval(points), len(points))
