"""`clip=smooth`: gradients shrink before they reach the clipping norm."""

from typing import Any

from dpx.declaration import declaration
from dpx.mechanism.clip import Clip, Weights


@declaration
class Smooth(Clip):
    """clip(g) = C g / sqrt(C^2 + ||g||^2): its norm is below C, and nearly ||g|| where that is small."""

    clipping_norm: float
    kind: str = "smooth"

    def weights(self, limit: Any) -> Weights:
        import jax.numpy as jnp

        return lambda norms_B: limit / jnp.sqrt(limit**2 + norms_B**2)
