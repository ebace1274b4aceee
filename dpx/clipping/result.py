"""What a clipped sum comes to, and what every method of computing one shares.

B: examples (rows), U: units of R rows each (of one, unless said).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dpx.declaration import require

LossesFn = Callable[[Any, Any], tuple[Array, dict[str, Array]]]

# What one microbatch may leave in memory between its passes, where there is a choice: per-example weight gradients instead of Gram
# products, once a fused stack of layers has what it needs anyway.
KEPT_BYTES = 72 * 2**20


class ClippedSum(NamedTuple):
    """`total`: sum_b c_b grad_b (float32, like the parameters). Per example: norms before clipping, losses, counts and whether the
    example counted; they are zero where it did not (padding, or a non-finite gradient). `norms_B` is None for a plain sum.
    Where examples are units of several rows, all of these have one entry a unit, sums over its rows."""

    total: Any
    norms_B: Float[Array, " U"] | None
    losses_B: Float[Array, " U"]
    counts: dict[str, Array]
    is_counted_B: Bool[Array, " U"]


def batch_size(batch: Any) -> int:
    """Raises `ConfigError` for arrays that do not share their leading axis."""
    sizes = sorted({leaf.shape[0] if leaf.ndim else 0 for leaf in map(jnp.asarray, jax.tree.leaves(batch))})
    reason = "has arrays whose first axis is not the example"
    require(len(sizes) == 1 and sizes[0] > 0, f"batch of leading axes {sizes}", reason, "Give arrays [B, ...]")
    return sizes[0]


def zero_unless(keep_B: Array, tree: Any) -> Any:
    """Every leaf [B, ...] with exact zeros in the rows that are not kept; a where, so that NaN does not survive."""
    return jax.tree.map(lambda leaf: jnp.where(keep_B.reshape((-1,) + (1,) * (leaf.ndim - 1)), leaf, 0), tree)
