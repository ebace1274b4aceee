"""Defines a clip: a clipping norm, the weights that limit examples to it, and its state from step to step.

The clip is part of the privacy statement. How the clipped sum is computed is declared as `clipping_method`.

A clip has `weights` (under jit); `initial_state`, `in_force`, `draw` and `next_clipping_norm`, for a norm that changes; `ledger_fields` for
the ledger; `step_metrics`, `published` and `explanation` for what is shown. `Clip` implements all except the weights, for a constant norm.

Shape legend: B examples, K groups of parameters clipped separately.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from dpx.clipping.rounding import LARGEST_CLIPPING_NORM, SMALLEST_CLIPPING_NORM
from dpx.declaration import declaration, require
from dpx.randomness import RootSecret

Weights = Callable[[Any], Any]


@declaration
class Clip:
    """The base class of clips, which say how much one example may contribute. Its defaults are right for a constant norm, without state.

    A clip must define `weights`.

    Attributes:
        clipping_norm: Largest L2 norm of one example's contribution to the sum.
    """

    if TYPE_CHECKING:

        @property
        def kind(self) -> str: ...

    clipping_norm: float
    # Whether the norm adapts to the examples, through a noisy count that is released with each sum.
    is_adaptive: ClassVar[bool] = False

    def weights(self, limit: Any) -> Weights:
        """Returns the function that gives each example its factor in the sum.

        Args:
            limit: The largest norm of a contribution: a number, or a traced float32 []. It is the clipping norm less a margin for rounding.

        Returns:
            A function of norms, float32 [B], to factors, float32 [B], with factor times norm at most `limit` for every norm. It runs under
            jit.
        """
        raise NotImplementedError

    def initial_state(self) -> Any:
        """Returns the state before the first step, an array; `None` for a clip without state."""
        return None

    def in_force(self, state: Any) -> Any:
        """Returns the norm to which the next step clips, float32 [].

        If it adapts, it is a device scalar, and the host does not wait for it.
        """
        return np.float32(self.clipping_norm) if state is None else state

    def draw(self, secret: RootSecret, step: int, state: Any) -> np.ndarray | None:
        """Returns the key for what the clip releases beside the step's sum; `None` if it releases nothing.

        It is derived from `secret` under its own purpose.
        """
        return None

    def next_clipping_norm(self, state: Any, counts: dict[str, Any], key: Any, expected_batch: Any) -> Any:
        """Returns the state of the next step, under jit. Without a key the state does not change.

        Args:
            state: The state of this step.
            counts: Sums over this step's examples by name, float32 [] each, without noise.
            key: What `draw` returned.
            expected_batch: The expected batch size, float32 [].
        """
        return state

    def ledger_fields(self) -> dict[str, Any]:
        """Returns the clip's fields of a ledger entry: its norm, if it is known before the step, and the noise of what it releases."""
        return {"clipping_norm": self.clipping_norm, "count_noise_multiplier": None}

    def step_metrics(self, state: Any) -> dict[str, Any]:
        """Returns metrics of a step that the privacy statement covers, by name."""
        return {}

    def published(self) -> list[str]:
        """Returns, as text, what the run publishes about the clip; the privacy statement covers it."""
        return []

    def explanation(self) -> str:
        """Returns the norm to which gradients are clipped, as text for `job=explain`."""
        return f"norm {self.clipping_norm:.4g}"

    def __post_init__(self) -> None:
        require(
            self.clipping_norm >= SMALLEST_CLIPPING_NORM,
            f"clip.clipping_norm={self.clipping_norm}",
            "float32 cannot clip gradients to such a small norm" if self.clipping_norm > 0 else "the clipping norm must be positive",
            f"Give a norm of {SMALLEST_CLIPPING_NORM:g} or more",
        )
        require(
            self.clipping_norm <= LARGEST_CLIPPING_NORM,
            f"clip.clipping_norm={self.clipping_norm}",
            "is larger than the largest number of float32",
            f"Give a norm of {LARGEST_CLIPPING_NORM:g} or less",
        )


@declaration
class Flat(Clip):
    """Clips the whole parameter vector: clip(g) = g * min(1, C / ||g||)."""

    kind: Literal["flat"] = "flat"

    def weights(self, limit: Any) -> Weights:
        return flat_weights(limit)


@declaration
class Normalised(Clip):
    """Scales every gradient to a norm near C: clip(g) = C * g / (||g|| + stability) (Bu et al. 2023, AUTO-S).

    Attributes:
        stability: Constant that is added to the norm; a larger one leaves small gradients smaller.
    """

    stability: float = 0.01
    kind: Literal["normalised"] = "normalised"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.stability > 0,
            f"clip.stability={self.stability}",
            "the clipping factor of a zero gradient would divide by zero",
            "Give a value above 0",
        )

    def weights(self, limit: Any) -> Weights:
        return lambda norms_B: limit / (norms_B + self.stability)


@declaration
class PerLayer(Clip):
    """Clips each group of parameters (a layer, the embeddings, a head) alone to C / sqrt(groups); the whole has norm at most C."""

    kind: Literal["per_layer"] = "per_layer"

    def weights(self, limit: Any) -> Weights:
        """Returns a function from norms_KB to c_KB, with one norm for each group."""
        from dpx.clipping.weights import PerLayerWeights

        return PerLayerWeights(limit)


def flat_weights(limit: Any) -> Weights:
    """Returns the function min(1, C / norm) of the norms."""
    from dpx.clipping.weights import flat

    return flat(limit)
