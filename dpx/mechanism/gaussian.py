"""Gaussian draws whose tail reaches past 9 sigma in float32.

`jax.random.normal` turns 23 bits into a uniform and stops at 5.42 sigma: a cut of 6e-8 a coordinate, above the deltas of
the papers. Here the radius of Box and Muller's pair comes from 64 bits, so draws reach sqrt(2 * 64 * ln 2) = 9.42 sigma.

Shape legend: R rows, N columns of one slice.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from dpx.mechanism.tail import REACH as REACH


def _minus_log_uniform(high: UInt32[Array, "R N"], low: UInt32[Array, "R N"]) -> Float[Array, "R N"]:
    """-ln((high * 2^32 + low + 1/2) / 2^64), accurate to float32 rounding at both ends."""
    near_zero = -jnp.log(high.astype(jnp.float32) + (low.astype(jnp.float32) + 0.5) * 2.0**-32) + 32 * jnp.log(2.0)
    # Near one, 1 - u is what has relative precision; it is built from the complements of the words.
    rest = (~high).astype(jnp.float32) + ((~low).astype(jnp.float32) + 0.5) * 2.0**-32
    near_one = -jnp.log1p(-rest * 2.0**-32)
    return jnp.where(high < jnp.uint32(1 << 31), near_zero, near_one)


def gaussian(key: UInt32[Array, "2"], rows: int, columns: int) -> Float[Array, "R N"]:
    """Independent standard normal draws, float32 [rows, columns], from one 64-bit threefry key.

    Bits are a function of (key, position) alone, so a slice sharded over its columns holds the same values on any mesh.
    """
    pairs = (rows + 1) // 2
    bits = jax.random.bits(jax.random.wrap_key_data(key, impl="threefry2x32"), (3, pairs, columns), jnp.uint32)
    radius = jnp.sqrt(2.0 * _minus_log_uniform(bits[0], bits[1]))
    # 24 bits of angle, at the middle of their cells: exact in float32 and symmetric about zero.
    angle = (jnp.right_shift(bits[2], 8).astype(jnp.float32) + 0.5) * (2.0 * jnp.pi * 2.0**-24)
    return jnp.concatenate([radius * jnp.cos(angle), radius * jnp.sin(angle)], axis=0)[:rows]
