"""Draws Gaussian numbers whose tail reaches past 9 sigma in float32.

`jax.random.normal` turns 23 bits into a uniform and stops at 5.42 sigma: it cuts off 6e-8 per coordinate, more than the deltas of
the papers. Here the radius of a Box-Muller pair comes from 64 bits, so draws reach sqrt(2 * 64 * ln 2) = 9.42 sigma.

Shape legend: R rows, N columns of one slice; M pairs of all slices that are drawn together.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, UInt32


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
