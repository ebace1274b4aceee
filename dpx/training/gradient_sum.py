"""Sums the gradients of one microbatch in a run: each example's gradient is clipped, or unchanged without privacy."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from dpx.clipping.clipped_sum import clipped_sum, plain_sum
from dpx.clipping.declarations import ClippingMethod
from dpx.clipping.result import ClippedSum, LossesFn
from dpx.clipping.weights import FactoredWeights, no_factor
from dpx.cost.memory import Method
from dpx.mechanism.declarations import Clip, Mechanism
from dpx.privacy.declarations import Privacy


@dataclasses.dataclass(frozen=True)
class GradientSum:
    """The function that sums the gradients of one microbatch, with its settings.

    `clip` is `None` if gradients are not clipped. `clipping_method` says how the clipped sum is computed; `rows_per_unit` rows are clipped
    as one. `factor(path)` multiplies the gradient of each array before it is clipped.
    """

    clip: Clip | None
    clipping_method: ClippingMethod
    rows_per_unit: int
    factor: Callable[[str], float] = no_factor

    @classmethod
    def build(cls, mechanism: Mechanism, clip: Clip, clipping_method: ClippingMethod, privacy: Privacy) -> "GradientSum":
        """Returns the gradient sum of a declared run."""
        clip_or_none = clip if mechanism.clips_gradients else None
        return cls(clip_or_none, clipping_method, privacy.rows_per_example, mechanism.gradient_factor)

    @property
    def method(self) -> Method:
        """Returns the method that computes the clipped sum; `plain` if gradients are not clipped."""
        return self.clipping_method.name if self.clip is not None else "plain"

    def __call__(
        self, losses: LossesFn, params: Any, batch: Any, limit: Any, *, frozen: Any = None, is_padding_B: Array | None = None
    ) -> ClippedSum:
        """Returns the sum over `batch` with gradients clipped to the norm `limit`, a number or a traced float32 []. Runs under jit."""
        if self.clip is None:
            # A model in any JAX code does not use the ops for which blocks exist.
            options = {"fused": self.clipping_method.name != "traced", "rows_per_unit": self.rows_per_unit, "frozen": frozen or None}
            return plain_sum(losses, params, batch, is_padding_B, **options)
        # The tests of every family check that our own losses keep examples apart; a run does not check it again.
        options = {"method": self.clipping_method.name, "rows_per_unit": self.rows_per_unit, "checked": False, "frozen": frozen or None}
        weights = FactoredWeights(self.clip.weights(limit), self.factor)
        return clipped_sum(losses, params, batch, weights=weights, is_padding_B=is_padding_B, **options)
