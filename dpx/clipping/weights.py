"""Computes clip weights: the factor of each example's gradient that makes its norm at most the clipping norm.

B: examples, K: groups of parameters clipped separately.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from dpx.declaration import require

Weights = Callable[[Float[Array, "..."]], Float[Array, "..."]]


def flat(limit: Any) -> Weights:
    """Returns a function from norms_B to min(1, limit / norm): every contribution then has at most the norm `limit`."""
    return lambda norms_B: limit / jnp.maximum(norms_B, limit)


def applied(weights: Weights, norms: Array) -> Array:
    """Returns `weights(norms)`. Raises `ConfigError` unless the result is one floating-point number for each norm."""
    found = jnp.asarray(weights(norms))
    is_right = found.shape == norms.shape and jnp.issubdtype(found.dtype, jnp.floating)
    reason = f"gives an array {found.shape} of type {found.dtype} for norms {norms.shape}"
    require(is_right, "weights", reason, "Return one floating-point number for each norm, such as 1 / jnp.maximum(norms, 1)")
    return found


def no_factor(path: str) -> float:
    """Returns 1, the factor of a gradient that is clipped as it is."""
    return 1.0


@dataclasses.dataclass(frozen=True)
class FactoredWeights:
    """Clip weights for gradients that are multiplied by `factor(path)`, a positive constant, before their joint norm is taken.

    The clipped sum is of the multiplied gradients, so its sensitivity is that of `weights`. The weight of a unit depends on its norm alone.
    """

    weights: Weights
    factor: Callable[[str], float]
    # A run sums a batch by microbatches, so no weight can depend on all norms.
    is_by_unit: ClassVar[bool] = True

    @property
    def per_layer(self) -> bool:
        """Returns whether `weights` clip each layer separately."""
        return getattr(self.weights, "per_layer", False)

    def __call__(self, norms: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.weights(norms)


def factor_of(weights: Weights) -> Callable[[str], float]:
    """Returns the function from a parameter's path to the factor that multiplies its gradient before its norm is taken.

    The factor is 1 unless `weights` give another one.
    """
    return getattr(weights, "factor", no_factor)


@dataclasses.dataclass(frozen=True)
class PerLayerWeights:
    """Clip weights for norms_KB of K groups: each group is clipped to C/sqrt(K), so the whole has norm at most C."""

    clipping_norm: float | Float[Array, ""]
    per_layer: bool = True

    def __call__(self, norms_KB: Float[Array, "K B"]) -> Float[Array, "K B"]:
        limit = self.clipping_norm / math.sqrt(norms_KB.shape[0])
        return limit / jnp.maximum(norms_KB, limit)
