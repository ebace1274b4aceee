"""Computes a checksum of arrays on their devices: of the sum to which a step adds noise, and of every part of a checkpoint.

Every number's bits are mixed with its position and summed modulo 2^32. A sum of integers does not depend on their order, so the checksum
is the same however the arrays are spread over devices. Two lanes with different constants make 64 bits. It distinguishes an accident (a
different sum under the same key) from a replay. It is not a signature, and it depends on the data, so it stays under private/.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

# Odd multipliers of the 32-bit finalisers lowbias32 and its sibling (Wellons 2018): every bit of a word reaches every bit of the mix.
_LANES = ((0x7FEB352D, 0x846CA68B), (0x21F0AAAD, 0x735A2D97))
_PLACE, _LEAF = 0x9E3779B1, 0x85EBCA77


def checksum(tree: Any) -> UInt32[Array, "2"]:
    """Returns the checksum of all leaves of `tree`, in the tree's own order; positions are counted within each leaf.

    Leaves are booleans, integers or real numbers of 8 to 64 bits. A tree without leaves has the checksum 0.
    """
    sums = [_of_leaf(jnp.asarray(leaf), number) for number, leaf in enumerate(jax.tree.leaves(tree))]
    return jnp.sum(jnp.stack(sums), axis=0, dtype=jnp.uint32) if sums else jnp.zeros(2, jnp.uint32)


def checksums(parts: dict[str, Any]) -> dict[str, str]:
    """Returns the checksum of each of `parts` (trees of arrays) as text, computed on their devices.

    Leaves of equal shape and type share one program.
    """
    found = {name: [_of_one(leaf, np.uint32(number)) for number, leaf in enumerate(jax.tree.leaves(part))] for name, part in parts.items()}
    return {name: as_text(np.sum([np.zeros(2, np.uint32), *sums], axis=0, dtype=np.uint32)) for name, sums in jax.device_get(found).items()}


def _of_leaf(leaf: Array, number: Any) -> UInt32[Array, "2"]:
    """Returns the checksum of one leaf; `number` is its position in its tree."""
    words = leaf
    if leaf.dtype != jnp.bool_:
        # The bits of each number as a word of 32 bits; a number of 64 bits gives two words, along a further axis.
        own = jnp.dtype(f"uint{min(leaf.dtype.itemsize * 8, 32)}")
        words = leaf if leaf.dtype == own else jax.lax.bitcast_convert_type(leaf, own)
    words = words.astype(jnp.uint32)
    # The row-major number of every element, modulo 2^32. It is computed axis by axis, so that a leaf need not be laid out flat.
    shape = words.shape
    strides = [math.prod(shape[axis + 1 :]) & 0xFFFFFFFF for axis in range(len(shape))]
    numbers = [jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride) for axis, stride in enumerate(strides)]
    place = jnp.uint32(number + 1) * jnp.uint32(_LEAF) + sum(numbers, jnp.zeros(shape, jnp.uint32)) * jnp.uint32(_PLACE)
    return jnp.stack([jnp.sum(_mixed(words ^ _mixed(place, *_LANES[1 - lane]), *_LANES[lane]), dtype=jnp.uint32) for lane in (0, 1)])


_of_one = jax.jit(_of_leaf)


def _mixed(word: UInt32[Array, "..."], first: int, second: int) -> UInt32[Array, "..."]:
    word = (word ^ (word >> 16)) * jnp.uint32(first)
    word = (word ^ (word >> 15)) * jnp.uint32(second)
    return word ^ (word >> 16)


def as_text(values: Any) -> str:
    """Returns a checksum (uint32 [2]) as 16 hexadecimal digits, as the ledger holds it."""
    return f"{int(values[0]):08x}{int(values[1]):08x}"
