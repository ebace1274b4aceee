"""Sums one microbatch's gradients by each variant that runs in jax: plain, clipped and jax-privacy's have one signature."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpx.clipping.clipped_sum import clipped_sum, plain_sum
from dpx.mechanism.clip import Clip


def variant_sum(objective: Any, clip: Clip, variant: str, physical_batch: int, **options: Any) -> Callable[[Any, Any], Any]:
    """Returns the function (parameters, batch) -> float32 sum of (clipped) gradients.

    `physical_batch` is what jax-privacy holds at a time; `options` are those of `clipped_sum`.
    """

    def losses(params: Any, batch: Any) -> Any:
        return objective.losses(params, batch, jnp.zeros(2, jnp.uint32))

    if variant in ("autodiff", "plain"):
        return lambda params, batch: plain_sum(losses, params, batch, fused=variant == "plain").total
    if variant == "loop":
        return _loop(losses, clip)
    if variant == "jax_privacy":
        return _jax_privacy(losses, clip, physical_batch)
    weights = clip.weights(clip.clipping_norm)
    return lambda params, batch: clipped_sum(losses, params, batch, weights=weights, method=variant, checked=False, **options).total


def _loop(losses: Any, clip: Clip) -> Callable[[Any, Any], Any]:
    """Returns the sum that computes one example after the other, whatever the physical batch."""
    weights = clip.weights(clip.clipping_norm)

    def run(params: Any, batch: Any) -> Any:
        def one(total: Any, example: Any) -> tuple[Any, None]:
            alone = jax.tree.map(lambda leaf: leaf[None], example)
            clipped = clipped_sum(losses, params, alone, weights=weights, method="vmap").total
            return jax.tree.map(jnp.add, total, clipped), None

        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        return jax.lax.scan(one, zero, batch)[0]

    return run


def _jax_privacy(losses: Any, clip: Clip, microbatch_size: int) -> Callable[[Any, Any], Any]:
    """Returns jax-privacy's own transformation, which loops over microbatches of that size."""
    from jax_privacy.clipping import clipped_grad  # pyright: ignore[reportMissingImports]

    def loss(params: Any, alone: Any) -> Any:
        return losses(params, alone)[0][0]

    return clipped_grad(loss, l2_clip_norm=clip.clipping_norm, batch_argnums=1, microbatch_size=microbatch_size)
