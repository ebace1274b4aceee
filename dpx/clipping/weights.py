"""Clip weights: what each example's gradient is multiplied by so that its norm is at most the clipping norm.

B: examples.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from dpx.mechanism.declarations import Clip, Flat, Normalised

Weights = Callable[[Float[Array, " B"]], Float[Array, " B"]]


def clip_weights(clip: Clip) -> Weights:
    """`norms_B -> c_B` with c * norm <= clipping norm. Flat: min(1, C/norm). Normalised: C/(norm + stability) (Bu et al. 2023)."""
    match clip:
        case Flat():
            return lambda norms_B: clip.clipping_norm / jnp.maximum(norms_B, clip.clipping_norm)
        case Normalised():
            return lambda norms_B: clip.clipping_norm / (norms_B + clip.stability)
