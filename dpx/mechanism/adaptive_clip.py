"""Declares `clip=quantile`: a clipping norm that changes after each step by that step's noisy count (Andrew et al. 2021).

Step t clips to C_t and scales its noise by C_t. Both are fixed before its rows are drawn; its rows influence C_{t+1} only through the noisy
count. All C_t are therefore released values. Each example is counted by its own norm alone, so an example that changes moves the count
only by its own share, whatever the places of the others in the step.
"""

from typing import Any, ClassVar, Literal

import numpy as np

from dpx.clipping.rounding import LARGEST_CLIPPING_NORM, SMALLEST_CLIPPING_NORM
from dpx.declaration import declaration, require
from dpx.mechanism.clip import Clip, Weights, flat_weights
from dpx.randomness import RootSecret

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

        from dpx.mechanism.gaussian import gaussian

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

    def published(self) -> list[str]:
        return ["the clipping norm of every step, which follows noisy counts of examples within it (release/telemetry.jsonl)"]

    def explanation(self) -> str:
        noise = f"noise of {self.count_noise_multiplier / 2:.4g} examples"
        return f"a norm that starts at {self.clipping_norm:.4g} and follows the {self.target_quantile:.4g} quantile by counts with {noise}"
