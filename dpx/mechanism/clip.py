"""Defines a clip: a norm, the weights that limit examples to it, and its state from step to step. It is part of the claim; how the clipped
sum is computed is declared as `clipping`.

A clip has `weights` (under jit); `initial_state`, `in_force`, `draw` and `next_clipping_norm`, for a norm that changes; `ledger_fields` for
the ledger; `step_metrics`, `published` and `explanation` for what is shown. `Clip` implements all except the weights, for a constant norm.

Shape legend: B examples, K groups of parameters clipped separately.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from dpx.clipping.rounding import SMALLEST_CLIPPING_NORM
from dpx.declaration import declaration, require
from dpx.randomness import RootSecret

Weights = Callable[[Any], Any]


@declaration
class Clip:
    """A clip with the declared, constant norm. Its state is `None`."""

    if TYPE_CHECKING:

        @property
        def kind(self) -> str: ...

    clipping_norm: float
    # Whether the norm adapts to the examples, through a noisy count that is released with each sum.
    is_adaptive: ClassVar[bool] = False

    def weights(self, limit: Any) -> Weights:
        """`norms_B -> c_B`, float32, with c * norm <= `limit`: a number, or a traced float32 []. Runs under jit."""
        raise NotImplementedError

    def initial_state(self) -> Any:
        """The clip's state before the first step, as an array; `None` if it has no state."""
        return None

    def in_force(self, state: Any) -> Any:
        """The norm that the next step clips to, float32 []: a device scalar, not waited for, where it adapts."""
        return np.float32(self.clipping_norm) if state is None else state

    def draw(self, secret: RootSecret, step: int, state: Any) -> np.ndarray | None:
        """The key for what the clip releases in addition to a step's sum, under its own purpose; `None` if it releases nothing."""
        return None

    def next_clipping_norm(self, state: Any, counts: dict[str, Any], key: Any, expected_batch: Any) -> Any:
        """The state of the next step, from this step's counts (float32 [] each), under jit. Without a key the state does not change."""
        return state

    def ledger_fields(self) -> dict[str, Any]:
        """The clip's fields in a ledger entry: its norm, if that is known before the step, and the noise of the clip's release."""
        return {"clipping_norm": self.clipping_norm, "count_noise_multiplier": None}

    def step_metrics(self, state: Any) -> dict[str, Any]:
        """Metrics of a step that the claim covers, by name."""
        return {}

    def published(self) -> list[str]:
        """What the run publishes of the clip, covered by its claim, as text."""
        return []

    def explanation(self) -> str:
        """The norm to which gradients are clipped, as text."""
        return f"norm {self.clipping_norm:.4g}"

    def __post_init__(self) -> None:
        require(
            self.clipping_norm >= SMALLEST_CLIPPING_NORM,
            f"clip.clipping_norm={self.clipping_norm}",
            "float32 cannot clip gradients to so small a norm" if self.clipping_norm > 0 else "the clipping norm must be positive",
            f"Give a norm of {SMALLEST_CLIPPING_NORM:g} or more",
        )


@declaration
class Flat(Clip):
    """clip(g) = g * min(1, C / ||g||), over the whole parameter vector."""

    kind: Literal["flat"] = "flat"

    def weights(self, limit: Any) -> Weights:
        return flat_weights(limit)


@declaration
class Normalised(Clip):
    """clip(g) = C * g / (||g|| + stability): every clipped gradient has norm near C (Bu et al. 2023, AUTO-S)."""

    stability: float = 0.01
    kind: Literal["normalised"] = "normalised"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.stability > 0, f"clip.stability={self.stability}", "a zero gradient would divide by zero", "Give a value above 0")

    def weights(self, limit: Any) -> Weights:
        return lambda norms_B: limit / (norms_B + self.stability)


@declaration
class PerLayer(Clip):
    """Each group of parameters (a layer, the embeddings, a head) is clipped alone to C / sqrt(groups); the whole has norm at most C."""

    kind: Literal["per_layer"] = "per_layer"

    def weights(self, limit: Any) -> Weights:
        """`norms_KB -> c_KB`, one norm per group."""
        from dpx.clipping.weights import PerLayerWeights

        return PerLayerWeights(limit)


def flat_weights(limit: Any) -> Weights:
    """min(1, C / norm)."""
    from dpx.clipping.weights import flat

    return flat(limit)
