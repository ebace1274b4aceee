"""Tests orders, with a tolerance for a few points that measured surfaces need."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from dpx_papers.report.shape import Part

# A measured surface has noise: at least this share of the pairs that differ must be in order.
IN_ORDER = 0.9

One = TypeVar("One")


def neighbours(points: Iterable[One], same: Callable[[One], Any], by: Callable[[One], Any]) -> list[tuple[One, One]]:
    """Returns pairs of consecutive entries in the order of `by`, within each group of equal `same`."""
    groups: dict[Any, list[One]] = defaultdict(list)
    for one in points:
        groups[same(one)].append(one)
    return [pair for group in groups.values() for pair in itertools.pairwise(sorted(group, key=by))]


def ascending(claim: str, pairs: Iterable[tuple[float, float]]) -> Part:
    """Judges whether the second of each pair is above the first. Equal ones do not count, unless all are equal."""
    pairs = list(pairs)
    if not pairs:
        return Part.of(claim, None, "no two points inside the grid compare")
    up, down = sum(one < other for one, other in pairs), sum(one > other for one, other in pairs)
    words = f"{up} of {up + down} pairs in order, {len(pairs) - up - down} equal"
    return Part.of(claim, up > 0 and up >= IN_ORDER * (up + down), words)
