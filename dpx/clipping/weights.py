"""Clip weights: the factor of each example's gradient that makes its norm at most the clipping norm.

B: examples, K: groups of parameters clipped separately.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from dpx.declaration import require

Weights = Callable[[Float[Array, "..."]], Float[Array, "..."]]


def flat(limit: Any) -> Weights:
    """norms_B -> min(1, limit / norm): every contribution has at most the norm `limit`."""
    return lambda norms_B: limit / jnp.maximum(norms_B, limit)


def applied(weights: Weights, norms: Array) -> Array:
    """`weights(norms)`. Raises `ConfigError` unless the result is one floating-point number for each norm."""
    found = jnp.asarray(weights(norms))
    is_right = found.shape == norms.shape and jnp.issubdtype(found.dtype, jnp.floating)
    reason = f"gives an array {found.shape} of type {found.dtype} for norms {norms.shape}"
    require(is_right, "weights", reason, "Return one floating number for each norm, such as 1 / jnp.maximum(norms, 1)")
    return found


@dataclasses.dataclass(frozen=True)
class PerLayerWeights:
    """norms_KB -> c_KB, every group to C/sqrt(K): the whole then has norm at most C."""

    clipping_norm: float | Float[Array, ""]
    per_layer: bool = True

    def __call__(self, norms_KB: Float[Array, "K B"]) -> Float[Array, "K B"]:
        limit = self.clipping_norm / math.sqrt(norms_KB.shape[0])
        return limit / jnp.maximum(norms_KB, limit)
