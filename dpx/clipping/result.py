"""Defines the result of a clipped sum, and functions that all methods share.

B: examples (rows), U: units of R rows each (of one, unless said).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dpx.declaration import require
from dpx.randomness import path_name

LossesFn = Callable[[Any, Any], tuple[Array, dict[str, Array]]]

# Bytes that one microbatch may keep in memory between its passes, if there is a choice: per-example weight gradients instead of Gram
# products, in addition to what a fused stack of layers always needs.
KEPT_BYTES = 72 * 2**20


class ClippedSum(NamedTuple):
    """A clipped sum of gradients, with facts about each unit (an example, or `rows_per_unit` of them).

    Attributes:
        total: sum_b c_b grad_b, float32, a tree like the trained parameters.
        norms_B: Norms of gradients before clipping, [U]; `None` for a plain sum. A norm is an upper bound if so much of the gradient
            cancels that float32 cannot give it (`dpx.clipping.rounding`).
        losses_B: Losses, [U]: sums over the rows of a unit.
        counts: The counts that the loss returned, by name, [U]: sums over the rows of a unit.
        is_counted_B: [U]; false for padding and for a gradient that is not finite. Such a unit has zeros in all other fields.
    """

    total: Any
    norms_B: Float[Array, " U"] | None
    losses_B: Float[Array, " U"]
    counts: dict[str, Array]
    is_counted_B: Bool[Array, " U"]


def batch_size(batch: Any, name: str = "batch", fix: str = "Give arrays whose first axis is the example") -> int:
    """Returns the number of rows.

    Raises `ConfigError`, with `name` before each path and this `fix`, for leaves that are not arrays, for arrays that do not share their
    leading axis, and for a size that is a symbol.
    """
    leaves = [("/".join(filter(None, (name, path_name(path)))), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(batch)]
    name = name or "batch"
    require(bool(leaves), name, "contains no array", fix)
    for path, leaf in leaves:
        is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        require(is_array, path, f"is a {type(leaf).__name__} and not an array", fix)
        is_key = is_array and leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        require(not is_key, path, "is one random key for all examples", "Give one for each: jax.random.split(key, B)")
    sizes = {leaf.shape[0] if leaf.ndim else "none" for _, leaf in leaves}
    symbols = [size for size in sizes if not isinstance(size, (int, str))]
    reason = "is symbolic, but the choice of the values to keep for each example needs a known number"
    require(not symbols, f"{name} of {symbols and symbols[0]} rows", reason, "Trace it with a fixed number of rows")
    reason = "has arrays whose first axis is not the example"
    is_shared = len(sizes) == 1 and "none" not in sizes
    require(is_shared, f"{name} of leading axes {sorted(sizes, key=str)}", reason, fix)
    return int(sizes.pop())


def of_no_rows(run: Callable[[Any, Array], ClippedSum], batch: Any, rows: int) -> ClippedSum:
    """Returns the clipped sum of a batch without rows: zeros, and arrays of length zero.

    `run(batch, is_padding_B)` is called with one unit of padding, to find the shapes.
    """

    def stand_in(leaf: Any) -> Any:
        shape = (rows, *leaf.shape[1:])
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0, impl=jax.random.key_impl(leaf)), shape)
        return jnp.zeros(shape, leaf.dtype)

    found = run(jax.tree.map(stand_in, batch), jnp.ones((rows,), bool))
    return found._replace(**{name: jax.tree.map(lambda leaf: leaf[:0], getattr(found, name)) for name in found._fields if name != "total"})


def zero_unless(keep_B: Array, tree: Any) -> Any:
    """Returns every leaf [B, ...] with exact zeros in the rows that are not kept; it uses `where`, so that NaN does not survive."""
    return jax.tree.map(lambda leaf: jnp.where(keep_B.reshape((-1,) + (1,) * (leaf.ndim - 1)), leaf, jnp.zeros((), leaf.dtype)), tree)
