"""Clip weights: what each example's gradient is multiplied by so that its norm is at most the clipping norm.

B: examples, K: groups of parameters clipped apart.
"""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

Weights = Callable[[Float[Array, "..."]], Float[Array, "..."]]


@dataclasses.dataclass(frozen=True)
class PerLayerWeights:
    """norms_KB -> c_KB, every group to C/sqrt(K): the whole then has norm at most C."""

    clipping_norm: float | Float[Array, ""]
    per_layer: bool = True

    def __call__(self, norms_KB: Float[Array, "K B"]) -> Float[Array, "K B"]:
        limit = self.clipping_norm / math.sqrt(norms_KB.shape[0])
        return limit / jnp.maximum(norms_KB, limit)
