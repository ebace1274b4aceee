"""Draws noise on a fixed grid of slices: every slice of every parameter has its own key, whatever the mesh.

A parameter [.., N] is seen as rows of N columns; a slice is a block of rows of at most 2^18 elements (one row if a row is
longer): drawing a slice takes nine times its size, and XLA may keep several parameters' draws alive at a time. Only rows are cut, so
each device draws the noise of its part of a parameter sharded over its last axis. Small parameters are drawn as one array, on
every device.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from dpx.mechanism.gaussian import gaussian, gaussians
from dpx.randomness import RootSecret, path_name

SLICE_ELEMENTS = 1 << 18
# A leaf of at most this many numbers is small: biases and norms of large models, every leaf of small models.
DRAWN_AS_ONE = 1 << 16


def _view(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns (rows, columns, rows of one slice) of a parameter."""
    columns = shape[-1] if shape else 1
    rows = math.prod(shape[:-1])
    return rows, columns, max(1, min(rows, SLICE_ELEMENTS // columns))


def row_blocks(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns (rows, columns) of every slice of a parameter, in order."""
    rows, columns, block = _view(shape)
    return [(min(block, rows - start), columns) for start in range(0, rows, block)]


def slice_keys(secret: RootSecret, step: int, params: Any) -> Any:
    """Returns a tree like `params` of uint32 [slices, 2]: one key for each (step, parameter path, slice)."""

    def keys(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
        return np.stack([secret.key("noise", step, path_name(path), index) for index in range(len(row_blocks(leaf.shape)))])

    return jax.tree_util.tree_map_with_path(keys, params)


def add_noise(total: Any, keys: Any, deviation: Float[Array, ""]) -> tuple[Any, Any]:
    """Returns (`total` plus `deviation` times standard normal draws, the sum of squares of each leaf's noise).

    `total` is a tree or one array; `keys` is a tree like it of uint32 [slices, 2].
    """
    leaves, tree = jax.tree.flatten(total)
    keys = tree.flatten_up_to(keys)
    small = [number for number, leaf in enumerate(leaves) if len(keys[number]) == 1 and leaf.size <= DRAWN_AS_ONE]
    drawn = gaussians([keys[number][0] for number in small], [_view(leaves[number].shape)[:2] for number in small])
    noise = dict(zip(small, drawn, strict=True))
    noisy = [
        _added(leaf, deviation * noise[number]) if number in noise else _added_by_slice(leaf, keys[number], deviation)
        for number, leaf in enumerate(leaves)
    ]
    return tree.unflatten([leaf for leaf, _ in noisy]), tree.unflatten([squares for _, squares in noisy])


def _added(total: Array, noise_RN: Array) -> tuple[Array, Array]:
    return total + noise_RN.reshape(total.shape), jnp.sum(jnp.square(noise_RN))


def _added_by_slice(total: Array, keys: UInt32[Array, "S 2"], deviation: Float[Array, ""]) -> tuple[Array, Array]:
    """Adds noise slice by slice in place, so that no more than one slice's draws are in memory at a time."""
    rows, columns, block = _view(total.shape)
    flat_RN = total.reshape(rows, columns)

    def add(flat_RN: Array, key: Array, start: Array | int, count: int) -> tuple[Array, Array]:
        noise_RN = deviation * gaussian(key, count, columns)
        part_RN = jax.lax.dynamic_slice_in_dim(flat_RN, start, count) + noise_RN
        return jax.lax.dynamic_update_slice_in_dim(flat_RN, part_RN, start, axis=0), jnp.sum(noise_RN * noise_RN, axis=0)

    def body(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        flat_RN, squares_N = add(carry[0], keys[index], index * block, block)
        return flat_RN, carry[1] + squares_N

    whole = rows // block
    # One square per column: if columns are sharded, a single sum would be reduced over devices in every round.
    flat_RN, squares_N = jax.lax.fori_loop(0, whole, body, (flat_RN, jnp.zeros((columns,), jnp.float32)))
    if rows % block:
        flat_RN, tail = add(flat_RN, keys[whole], whole * block, rows % block)
        squares_N = squares_N + tail
    return flat_RN.reshape(total.shape), jnp.sum(squares_N)
