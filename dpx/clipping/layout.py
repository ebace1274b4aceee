"""Describes which axis of an array in a traced loss indexes the examples.

B: examples (units, where these have several rows).
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import SupportsIndex


@dataclasses.dataclass(frozen=True)
class Rows:
    """An array in which every number depends on one example.

    The number at index i along `axis` depends on example (i // after) % B. The axis has before * B * after entries.
    """

    axis: int
    before: int = 1
    after: int = 1

    def at(self, axis: SupportsIndex) -> "Rows":
        """Returns the same layout along another axis; jax gives some axes as numpy's numbers."""
        return dataclasses.replace(self, axis=axis.__index__())


@dataclasses.dataclass(frozen=True)
class Mixed:
    """An array in which some number may depend on several examples; `by` names the cause."""

    by: str


# No number depends on an example; in the body of a loop over examples, all numbers depend on that of the round.
SHARED, OWN = "shared", "own"
Layout = Rows | Mixed | str


class Crosses(Exception):
    """An equation that reads, or may read, several examples for one number; the message says how."""


def joined(first: Layout, second: Layout) -> Layout:
    """Returns the layout of an array that is one of two arrays."""
    if first == second or second == SHARED:
        return first
    if first == SHARED:
        return second
    mixed = [layout for layout in (first, second) if isinstance(layout, Mixed)]
    return mixed[0] if mixed else Mixed("a choice between arrays with the examples along different axes")


def the_same(layouts: Iterable[Layout]) -> Rows | None:
    """Returns the one layout with rows among `layouts`, or None if no layout has rows. Raises `Crosses` if they differ."""
    rows = {layout for layout in layouts if isinstance(layout, Rows)}
    if len(rows) > 1:
        raise Crosses("meets examples along two axes")
    return next(iter(rows), None)


def reshaped(rows: Rows, old: Sequence[int], new: Sequence[int], examples: int) -> Rows:
    """Returns the layout after a reshape; raises `Crosses` if no single axis holds the examples."""
    outer, inner = math.prod(old[: rows.axis]) * rows.before, rows.after * math.prod(old[rows.axis + 1 :])
    for axis, size in enumerate(new):
        earlier, later = math.prod(new[:axis]), math.prod(new[axis + 1 :])
        if outer % earlier == 0 and inner % later == 0 and outer // earlier * examples * (inner // later) == size:
            return Rows(axis, outer // earlier, inner // later)
    raise Crosses("cuts the examples' axis")
