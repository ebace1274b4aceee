"""Which gradients are clipped together: all of them, or each layer by itself (`clip=per_layer`).

Stacked layers live under the top-level name `layers`, one group per index; any other top-level name is one group.

B: examples, L: stacked layers, K: groups.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

STACKED = "layers"


class Squares(NamedTuple):
    """Per-example squared gradient norms of some parameters: [B], or [L,B] where layers are stacked; `path` of one of them."""

    path: str
    values: Array

    @property
    def total_B(self) -> Array:
        return self.values.reshape(-1, self.values.shape[-1]).sum(0)


class Clipped(NamedTuple):
    """Norms before clipping, which examples count, and the clip weights of each entry of the squares, in their shapes."""

    norms_B: Float[Array, " B"]
    is_counted_B: Bool[Array, " B"]
    weights: list[Array]


def clip(weights: Any, squares: list[Squares], losses_B: Array, is_padding_B: Array) -> Clipped:
    """Examples that are padding or not finite weigh exactly zero. Float32 squares overflow at norms of 1e19: not finite."""
    total_B = sum((part.total_B for part in squares), jnp.zeros_like(losses_B))
    is_counted_B = jnp.isfinite(total_B) & jnp.isfinite(losses_B) & ~is_padding_B
    norms_B = jnp.sqrt(jnp.where(is_counted_B, total_B, 0))
    if not getattr(weights, "per_layer", False):
        clip_B = jnp.where(is_counted_B, weights(norms_B), 0)
        return Clipped(norms_B, is_counted_B, [jnp.broadcast_to(clip_B, part.values.shape) for part in squares])
    names, norms_KB = _grouped(squares, is_counted_B)
    clip_KB = jnp.where(is_counted_B, weights(norms_KB), 0)
    return Clipped(norms_B, is_counted_B, [_ungrouped(part, names, clip_KB) for part in squares])


def _top(path: str) -> str:
    return path.split("/")[0]


def _grouped(squares: list[Squares], is_counted_B: Array) -> tuple[list[str], Array]:
    """Names of the groups that are not layers, and all norms [K,B]: those first, then one for each layer."""
    names = sorted({_top(part.path) for part in squares} - {STACKED})
    groups = [jnp.stack([part.total_B for part in squares if _top(part.path) == name]).sum(0, keepdims=True) for name in names]
    layers = [part.values for part in squares if _top(part.path) == STACKED]
    if layers:
        groups.append(sum(layers[1:], layers[0]))
    return names, jnp.sqrt(jnp.where(is_counted_B, jnp.concatenate(groups), 0))


def _ungrouped(part: Squares, names: list[str], clip_KB: Array) -> Array:
    if _top(part.path) == STACKED:
        return clip_KB[len(names) :]
    return jnp.broadcast_to(clip_KB[names.index(_top(part.path))], part.values.shape)
