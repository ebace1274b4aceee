"""Grids of cases in fewer tests: a choice of cells in which every two values that meet in the grid still meet.

Most faults of a combination are faults of two of its values; the whole grids stay as slow tests.
"""

import itertools
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import pytest


def _met(cell: tuple[Hashable, ...]) -> Iterator[Any]:
    """What two places of a cell hold."""
    return itertools.combinations(enumerate(cell), 2)


def pairwise(cells: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Some of `cells`, tuples of equal length of values that can be hashed, in their order: every two values that meet in one of `cells`
    meet in one of these. The same cells give the same choice."""
    left = list(dict.fromkeys(cells))
    order = {cell: number for number, cell in enumerate(left)}
    missing, chosen = {pair for cell in left for pair in _met(cell)}, []
    while missing:
        best = max(left, key=lambda cell: sum(pair in missing for pair in _met(cell)))
        left.remove(best)
        chosen.append(best)
        missing.difference_update(_met(best))
    return sorted(chosen, key=order.__getitem__)


def others_slow(cells: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: all of `cells`, of which those that `pairwise` leaves out are slow."""
    every = list(dict.fromkeys(cells))
    kept = set(pairwise(every))
    return [pytest.param(*cell, marks=() if cell in kept else pytest.mark.slow) for cell in every]
