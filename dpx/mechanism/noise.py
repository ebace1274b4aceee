"""Draws noise on a fixed grid of slices: every slice of every parameter has its own key, whatever the mesh.

A parameter [.., N] is seen as rows of N columns; a slice is a block of rows of at most 2^18 elements (one row if a row is
longer): drawing a slice takes nine times its size, and XLA may keep several parameters' draws alive at a time. Only rows are cut, so
each device draws the noise of its part of a parameter sharded over its last axis. Small parameters are drawn as one array, on
every device.

The tail of the Gaussian numbers reaches past 9 sigma in float32. `jax.random.normal` turns 23 bits into a uniform and stops at 5.42 sigma:
it cuts off 6e-8 per coordinate, more than the deltas of the papers. Here the radius of a Box-Muller pair comes from 64 bits, so draws reach
sqrt(2 * 64 * ln 2) = 9.42 sigma.

Shape legend: R rows, N columns of one slice; M pairs of all slices that are drawn together.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, UInt32

from dpx.randomness import RootSecret, path_name


def _minus_log_uniform(high: UInt32[Array, "..."], low: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Returns -ln((high * 2^32 + low + 1/2) / 2^64), accurate to float32 rounding at both ends."""
    near_zero = -jnp.log(high.astype(jnp.float32) + (low.astype(jnp.float32) + 0.5) * 2.0**-32) + 32 * jnp.log(2.0)
    # Near one, 1 - u has relative precision, so it is built from the complements of the words.
    rest = (~high).astype(jnp.float32) + ((~low).astype(jnp.float32) + 0.5) * 2.0**-32
    near_one = -jnp.log1p(-rest * 2.0**-32)
    return jnp.where(high < jnp.uint32(1 << 31), near_zero, near_one)


def gaussian(key: UInt32[Array, "2"], rows: int, columns: int) -> Float[Array, "R N"]:
    """Returns independent standard normal draws, float32 [rows, columns], from one 64-bit threefry key.

    Bits are a function of (key, position) alone, so a slice sharded over its columns holds the same values on any mesh.
    """
    pairs = (rows + 1) // 2
    bits = jax.random.bits(jax.random.wrap_key_data(key, impl="threefry2x32"), (3, pairs, columns), jnp.uint32)
    return jnp.concatenate(_box_muller(bits), axis=0)[:rows]


def gaussians(keys: Sequence[UInt32[Array, "2"]], shapes: Sequence[tuple[int, int]]) -> list[Array]:
    """Returns `gaussian(key, rows, columns)` for each key and its (rows, columns), with the same bits, drawn as one array.

    Tracing and compiling separate draws would take most of the start-up time of a small model's step.
    """
    if not keys:
        return []
    pairs = [(rows + 1) // 2 * columns for rows, columns in shapes]
    draw_M = jnp.concatenate([jnp.full(count, number) for number, count in enumerate(pairs)])
    place_M = jnp.concatenate([jnp.arange(count, dtype=jnp.uint32) for count in pairs])
    # The three words of a pair lie where jax.random.bits of shape (3, rows / 2, columns) has them.
    place_3M = place_M + jnp.arange(3, dtype=jnp.uint32)[:, None] * jnp.asarray(pairs, jnp.uint32)[draw_M]
    key_2M = jnp.stack(keys)[draw_M].T
    words = threefry2x32_p.bind(*(jnp.broadcast_to(word_M, place_3M.shape) for word_M in key_2M), jnp.zeros_like(place_3M), place_3M)
    halves_2M = jnp.stack(_box_muller(words[0] ^ words[1]))
    ends = itertools.accumulate(pairs)
    return [
        _whole(halves_2M[:, end - count : end].reshape(-1, columns)[:rows])
        for end, count, (rows, columns) in zip(ends, pairs, shapes, strict=True)
    ]


def _whole(draws: Array) -> Array:
    """Returns the draws replicated on every device, if a mesh is named.

    Otherwise the compiler shards them like the sums they are added to, and gathers them.
    """
    return draws if jax.sharding.get_abstract_mesh().empty else jax.lax.with_sharding_constraint(draws, PartitionSpec())


def _box_muller(bits: UInt32[Array, "3 ..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Returns two independent standard normal draws from every three words."""
    radius = jnp.sqrt(2.0 * _minus_log_uniform(bits[0], bits[1]))
    # 24 bits of angle, at the middle of their cells: exact in float32 and symmetric about zero.
    angle = (jnp.right_shift(bits[2], 8).astype(jnp.float32) + 0.5) * (2.0 * jnp.pi * 2.0**-24)
    return radius * jnp.cos(angle), radius * jnp.sin(angle)


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
