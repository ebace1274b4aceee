"""Defines a clip: a clipping norm, the weights that limit examples to it, and its state from step to step.

The clip is part of the privacy statement. How the clipped sum is computed is declared as `clipping_method`.

A clip has `weights` (under jit); `initial_state`, `in_force`, `draw` and `next_clipping_norm`, for a norm that changes; `ledger_fields` for
the ledger; `step_metrics`, `published` and `explanation` for what is shown. `Clip` implements all except the weights, for a constant norm.

The norm of `clip=quantile` changes after each step by that step's noisy count (Andrew et al. 2021). Step t clips to C_t and scales its
noise by C_t. Both are fixed before its rows are drawn; its rows influence C_{t+1} only through the noisy count. All C_t are therefore
released values. Each example is counted by its own norm alone, so an example that changes moves the count only by its own share, whatever
the places of the others in the step.

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
    # What the run publishes about the clip, as text; the privacy statement covers it.
    published: ClassVar[tuple[str, ...]] = ()

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
        from dpx.clipping.groups import PerLayerWeights

        return PerLayerWeights(limit)


def flat_weights(limit: Any) -> Weights:
    """Returns the function min(1, C / norm) of the norms."""
    from dpx.clipping.groups import flat

    return flat(limit)


# An example counts +1/2 or -1/2, a missing example 0.
COUNT_SENSITIVITY = 0.5

# The norm stays within this factor of the first one, and never falls below the smallest: noise alone must not drive it out of float32.
RANGE = 1e6


@declaration
class AdaptiveClip(Clip):
    """Flat clipping at a norm C_t that follows a quantile of the examples' norms (Andrew et al. 2021).

    Each step also releases how many of its examples have a norm within C_t, on the same draw as the sum and with separate noise;
    C_{t+1} = C_t exp(-`learning_rate` (noisy fraction - `target_quantile`)). An example counts +1/2 within C_t and -1/2 beyond it, so the
    sensitivity of the count is 1/2 (the paper's sigma_b is half of `count_noise_multiplier`).

    Attributes:
        target_quantile: Fraction of the examples whose norm should be within the clipping norm.
        learning_rate: How fast the norm follows the quantile.
        count_noise_multiplier: Standard deviation of the count's noise over its sensitivity of 1/2.
        clipping_norm: The norm C_0 of the first step.
    """

    target_quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise_multiplier: float = 20.0
    kind: Literal["quantile"] = "quantile"
    is_adaptive: ClassVar[bool] = True
    published: ClassVar[tuple[str, ...]] = (
        "the clipping norm of every step, which follows noisy counts of examples within it (release/telemetry.jsonl)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 < self.target_quantile < 1,
            f"clip.target_quantile={self.target_quantile}",
            "a quantile must be above 0 and below 1",
            "Use 0.5 for the median",
        )
        require(
            0 < self.learning_rate <= 1,
            f"clip.learning_rate={self.learning_rate}",
            "the clipping norm would never change, or would change by too large steps",
            "Use a value in (0, 1]",
        )
        require(
            0 < self.count_noise_multiplier < float("inf"),
            f"clip.count_noise_multiplier={self.count_noise_multiplier}",
            "a count without noise has no guarantee",
            "Give a value above 0",
        )

    def weights(self, limit: Any) -> Weights:
        return flat_weights(limit)

    def initial_state(self) -> Any:
        """Returns C_0, float32 []."""
        import jax.numpy as jnp

        return jnp.float32(self.clipping_norm)

    def draw(self, secret: RootSecret, step: int, state: Any) -> np.ndarray | None:
        return None if state is None else secret.key("count_noise", step)

    def next_clipping_norm(self, state: Any, counts: dict[str, Any], key: Any, expected_batch: Any) -> Any:
        """Returns C_{t+1}, float32 [], from C_t and a step's counts (`units`, `non_finite`, `clipped`).

        The fraction within C_t is (sum of +-1/2 + noise) / B + 1/2 with B the expected batch size: unbiased, with a public divisor.
        """
        import jax.numpy as jnp

        from dpx.mechanism.noise import gaussian

        if key is None:
            return state
        counted = counts["units"] - counts["non_finite"]
        centred = COUNT_SENSITIVITY * counted - counts["clipped"]
        noise = COUNT_SENSITIVITY * self.count_noise_multiplier * gaussian(key, 1, 1)[0, 0]
        within = (centred + noise) / expected_batch + 0.5
        moved = state * jnp.exp(-self.learning_rate * (within - self.target_quantile))
        largest = min(self.clipping_norm * RANGE, LARGEST_CLIPPING_NORM)
        return jnp.clip(moved, max(self.clipping_norm / RANGE, SMALLEST_CLIPPING_NORM), largest)

    def ledger_fields(self) -> dict[str, Any]:
        """Returns the ledger fields of the noisy count. The entry has no norm, since each step has its own."""
        return {"clipping_norm": None, "count_noise_multiplier": self.count_noise_multiplier}

    def step_metrics(self, state: Any) -> dict[str, Any]:
        return {} if state is None else {"released/clipping_norm": state}

    def explanation(self) -> str:
        noise = f"noise of {self.count_noise_multiplier / 2:.4g} examples"
        return f"a norm that starts at {self.clipping_norm:.4g} and follows the {self.target_quantile:.4g} quantile by counts with {noise}"
