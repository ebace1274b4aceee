"""Groups the gradients that are clipped together: all parameters, or each layer separately (`clip=per_layer`).

The gradient of each parameter may be multiplied by a constant first.

Layers are under the top-level name `layers`, stacked (one group for each index of the first axis) or in a list; any other
top-level name is one group.

Computes clip weights: the factor of each example's gradient that makes its norm at most the clipping norm.

B: examples, L: stacked layers, K: groups.

B: examples, K: groups of parameters clipped separately.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

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


LAYERS = "layers"

# The layer of a stack to which some parameters belong: one, each (the first axis of their norms), or no stack.
Layer = int | Literal["each"] | None


class Squares(NamedTuple):
    """Per-example squared gradient norms of some parameters, [..., B]; `path` is the path of one of them."""

    path: str
    values: Array
    layer: Layer = None

    @property
    def total_B(self) -> Array:
        """Returns the squared norms summed over all axes but the last, [B]."""
        return self.values.sum(tuple(range(self.values.ndim - 1))) if self.values.ndim > 1 else self.values


class Clipped(NamedTuple):
    """Gradient norms and clip weights of each example.

    `norms_B` are the norms before clipping. `is_finite_B` includes padding, `is_counted_B` does not. `weights` holds the clip weights by
    group, or under "" if all parameters are clipped together. `factor(path)` multiplies the gradient of a parameter before clipping
    (`weights.factor_of`).
    """

    norms_B: Float[Array, " B"]
    is_counted_B: Bool[Array, " B"]
    is_finite_B: Bool[Array, " B"]
    weights: dict[str, Float[Array, " B"]]
    factor: Callable[[str], float] = no_factor

    def weights_of(self, path: str, layer: Layer, layers: int = 0) -> Array:
        """Returns the factor of each example's gradient at `path` in the sum, [B].

        It is [layers, B] if each layer of a stack is a separate group.
        """
        own, factor = self._clip_weights(path, layer, layers), self.factor(path)
        return own if factor == 1 else own * factor

    def _clip_weights(self, path: str, layer: Layer, layers: int) -> Array:
        if "" in self.weights:
            return self.weights[""]
        if layer == "each" and is_stacked(path):
            return jnp.stack([self.weights[group(path, at)] for at in range(layers)])
        return self.weights[group(path, layer)]


def group(path: str, layer: Layer) -> str:
    """Returns the name of the group to which the parameter at `path` belongs, such as "layers/3" or "embeddings"."""
    if is_stacked(path) and isinstance(layer, int):
        return f"{LAYERS}/{layer}"
    parts = path.split("/")
    return "/".join(parts[: 2 if parts[0] == LAYERS else 1])


def is_stacked(path: str) -> bool:
    """Returns whether the first axis of the parameter at `path` is the axis of the layers."""
    top, _, rest = path.partition("/")
    return top == LAYERS and not rest.split("/")[0].isdigit()


def clip(weights: Any, squares: list[Squares], losses_B: Array, is_padding_B: Array) -> Clipped:
    """Returns norms and clip weights.

    Padding and examples that are not finite get weight exactly zero. So do norms of 1e19 and more, whose squares overflow float32.
    """
    factor = factor_of(weights)
    squares = [part if factor(part.path) == 1 else part._replace(values=part.values * factor(part.path) ** 2) for part in squares]
    total_B = sum((part.total_B for part in squares), jnp.zeros_like(losses_B))
    is_finite_B = jnp.isfinite(total_B) & jnp.isfinite(losses_B)
    is_counted_B = is_finite_B & ~is_padding_B
    norms_B = _root(total_B, is_counted_B)
    if not getattr(weights, "per_layer", False):
        return Clipped(norms_B, is_counted_B, is_finite_B, {"": _finite(applied(weights, norms_B), is_counted_B)}, factor)
    grouped = _grouped(squares)
    clip_KB = applied(weights, jnp.stack([_root(square_B, is_counted_B) for square_B in grouped.values()]))
    return Clipped(norms_B, is_counted_B, is_finite_B, dict(zip(grouped, _finite(clip_KB, is_counted_B), strict=True)), factor)


def _finite(clip: Any, is_counted_B: Array) -> Array:
    """Returns `clip` with zeros in place of weights that are not finite.

    C / norm is infinite for a zero gradient, and infinity times zero is NaN.
    """
    return jnp.where(is_counted_B & jnp.isfinite(clip), clip, 0)


def _root(square_B: Array, is_counted_B: Array) -> Array:
    return jnp.sqrt(jnp.where(is_counted_B, jnp.maximum(square_B, 0), 0))


def _grouped(squares: list[Squares]) -> dict[str, Array]:
    by_group: dict[str, Array] = {}
    for part in squares:
        if part.layer == "each" and is_stacked(part.path):
            values_LB = part.values.sum(tuple(range(1, part.values.ndim - 1)))
            own = {group(part.path, at): values_LB[at] for at in range(values_LB.shape[0])}
        else:
            own = {group(part.path, part.layer): part.total_B}
        for name, square_B in own.items():
            by_group[name] = by_group[name] + square_B if name in by_group else square_B
    return by_group
