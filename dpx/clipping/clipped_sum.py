"""The clipped sum of per-example gradients of one microbatch: one interface, several methods, one result.

Free of collectives and of Python state: it may stand inside `shard_map`, `fori_loop` and `jit`.

B: examples.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dpx.clipping.weights import Weights
from dpx.declaration import Refused

LossesFn = Callable[[Any, Any], tuple[Array, dict[str, Array]]]


class ClippedSum(NamedTuple):
    """`total`: sum_b c_b grad_b (float32, like the parameters). Per example: norms before clipping, losses, counts and whether the
    example counted; they are zero where it did not (padding, or a non-finite gradient). `norms_B` is None for a plain sum."""

    total: Any
    norms_B: Float[Array, " B"] | None
    losses_B: Float[Array, " B"]
    counts: dict[str, Array]
    is_counted_B: Bool[Array, " B"]


def clipped_sum(
    losses_fn: LossesFn,
    params: Any,
    batch: Any,
    *,
    weights: Weights,
    is_padding_B: Bool[Array, " B"] | None = None,
    method: str = "vmap",
) -> ClippedSum:
    """sum_b c_b grad_b, where `losses_fn(params, batch) -> (losses_B, counts)` and c_B = weights(norms_B).

    Every array of `batch` has a leading example axis, and losses_B[b] must depend on row b alone. Raises `Refused` for an unknown method.
    """
    is_padding_B = jnp.zeros((batch_size(batch),), bool) if is_padding_B is None else is_padding_B
    if method == "vmap":
        return _vmap(losses_fn, params, batch, weights, is_padding_B)
    raise Refused(f"clipping={method}", "no such method", "Use vmap")


def plain_sum(losses_fn: LossesFn, params: Any, batch: Any, is_padding_B: Bool[Array, " B"] | None = None) -> ClippedSum:
    """sum_b grad_b over the rows that are not padding, without clipping: the non-private step's sum."""
    is_real_B = jnp.ones((batch_size(batch),), bool) if is_padding_B is None else ~is_padding_B

    def total_loss(params):
        losses_B, counts = losses_fn(params, batch)
        return jnp.sum(jnp.where(is_real_B, losses_B, 0)), (losses_B, counts)

    total, (losses_B, counts) = jax.grad(total_loss, has_aux=True)(params)
    losses_B, counts = zero_unless(is_real_B, (losses_B, counts))
    return ClippedSum(total, None, losses_B, counts, is_real_B)


def batch_size(batch: Any) -> int:
    return jax.tree.leaves(batch)[0].shape[0]


def zero_unless(keep_B: Array, tree: Any) -> Any:
    """Every leaf [B, ...] with exact zeros in the rows that are not kept; a where, so that NaN does not survive."""
    return jax.tree.map(lambda leaf: jnp.where(keep_B.reshape((-1,) + (1,) * (leaf.ndim - 1)), leaf, 0), tree)


def counted(squared_norms_B: Array, losses_B: Array, is_padding_B: Array) -> Array:
    """Real rows with a finite loss and squared norm. Float32 squares overflow at norms of 1e19: such a row counts as not finite."""
    return jnp.isfinite(squared_norms_B) & jnp.isfinite(losses_B) & ~is_padding_B


def _vmap(losses_fn: LossesFn, params: Any, batch: Any, weights: Weights, is_padding_B: Array) -> ClippedSum:
    """The reference: every example's gradient in memory, then one contraction with the clip vector."""

    def loss_of_one(params, example):
        losses_1, counts = losses_fn(params, jax.tree.map(lambda leaf: leaf[None], example))
        return losses_1[0], (losses_1[0], jax.tree.map(lambda leaf: leaf[0], counts))

    grads, (losses_B, counts) = jax.vmap(jax.grad(loss_of_one, has_aux=True), in_axes=(None, 0))(params, batch)
    squared_B = jnp.sum(jnp.stack([jnp.sum(jnp.square(leaf), axis=range(1, leaf.ndim)) for leaf in jax.tree.leaves(grads)]), axis=0)
    is_counted_B = counted(squared_B, losses_B, is_padding_B)
    norms_B = jnp.sqrt(jnp.where(is_counted_B, squared_B, 0))
    clip_B = jnp.where(is_counted_B, weights(norms_B), 0)
    # A contraction with the clip vector: scaling and then summing over the batch is 16 times slower on XLA's CPU backend.
    total = jax.tree.map(lambda leaf: jnp.tensordot(clip_B, leaf, 1, precision="highest"), zero_unless(is_counted_B, grads))
    losses_B, counts = zero_unless(is_counted_B, (losses_B, counts))
    return ClippedSum(total, norms_B, losses_B, counts, is_counted_B)
