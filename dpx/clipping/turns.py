"""Computes the clipped sum of a batch a few units at a time, for gradients that are formed once but do not fit in memory for all units.

B: rows, R: rows of a unit, U: units, c: units at once, n: turns.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpx.clipping.result import ClippedSum

# The most padding that turns may add to a batch, as a share of its units.
MOST_PADDING = 0.02


def units_at_once(units: int, most: int) -> int:
    """Returns the largest number of units, up to `most`, whose turns need little padding."""
    return next(count for count in range(min(units, most), 0, -1) if math.ceil(units / count) * count <= (1 + MOST_PADDING) * units)


def summed(run: Callable[[Any, Any], ClippedSum], batch: Any, is_padding_B: Any, rows: int, at_once: int) -> ClippedSum:
    """Returns the clipped sum of `batch` from `run(batch, is_padding_B)` of `at_once` units of R `rows` at a time.

    A turn takes every n-th unit, so that each device of a mesh has units in every turn.
    """
    units = is_padding_B.shape[0] // rows
    count = math.ceil(units / at_once)
    more = count * at_once - units

    def in_turns(leaf_B: Any) -> Any:
        by_unit = leaf_B.reshape(units, rows, *leaf_B.shape[1:])
        if more:
            by_unit = jnp.concatenate([by_unit, by_unit[:more]])
        by_turn = jnp.swapaxes(by_unit.reshape(at_once, count, rows, *leaf_B.shape[1:]), 0, 1)
        return by_turn.reshape(count, at_once * rows, *leaf_B.shape[1:])

    is_added = jnp.arange(units + more) >= units
    is_padding = in_turns(is_padding_B) | jnp.repeat(jnp.swapaxes(is_added.reshape(at_once, count), 0, 1), rows, 1)
    given = jax.tree.map(in_turns, batch), is_padding
    of_turn = jax.jit(run)
    start = jax.eval_shape(of_turn, *jax.tree.map(lambda leaf: leaf[0], given)).total

    def turn(total: Any, own: Any) -> tuple[Any, ClippedSum]:
        found = of_turn(*own)
        return jax.tree.map(jnp.add, total, found.total), found._replace(total=())

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), start)
    total, facts = jax.lax.scan(turn, zeros, given)
    of_units = lambda leaf: jnp.swapaxes(leaf, 0, 1).reshape(units + more, *leaf.shape[2:])[:units]  # noqa: E731
    return jax.tree.map(of_units, facts)._replace(total=total)
