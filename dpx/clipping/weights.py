"""Clip weights: what each example's gradient is multiplied by so that its norm is at most the clipping norm.

B: examples, K: groups of parameters clipped apart.
"""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from dpx.mechanism.declarations import Clip, Flat, Normalised, PerLayer, Quantile

Weights = Callable[[Float[Array, "..."]], Float[Array, "..."]]


@dataclasses.dataclass(frozen=True)
class PerLayerWeights:
    """norms_KB -> c_KB, every group to C/sqrt(K): the whole then has norm at most C."""

    clipping_norm: float | Float[Array, ""]
    per_layer: bool = True

    def __call__(self, norms_KB: Float[Array, "K B"]) -> Float[Array, "K B"]:
        limit = self.clipping_norm / math.sqrt(norms_KB.shape[0])
        return limit / jnp.maximum(norms_KB, limit)


def clip_weights(clip: Clip, margin: float = 0.0, clipping_norm: Float[Array, ""] | None = None) -> Weights:
    """`norms_B -> c_B` with c * norm <= C, the clipping norm less `margin` of itself (see rounding.py).

    Flat: min(1, C/norm). Normalised: C/(norm + stability) (Bu et al. 2023). Per layer: `norms_KB -> c_KB`, one norm a group,
    marked by its attribute `per_layer`. `clipping_norm`, which may be traced, stands in for the declared one where the norm adapts.
    """
    limit = (clip.clipping_norm if clipping_norm is None else clipping_norm) * (1 - margin)
    match clip:
        case Flat() | Quantile():
            return lambda norms_B: limit / jnp.maximum(norms_B, limit)
        case Normalised():
            return lambda norms_B: limit / (norms_B + clip.stability)
        case PerLayer():
            return PerLayerWeights(limit)
