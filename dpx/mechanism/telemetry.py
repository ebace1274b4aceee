"""Declares which training measurements may be published: sums of clamped losses and accuracies of a step's examples, with noise.

An example's loss, clamped to 0..L, and its accuracy in 0..1 are centred, so an example moves their sums by L/2 and 1/2 at most, and an
example that is missing or not finite does not move them; the places of the others in the step do not matter. Each sum gets noise of
standard deviation sqrt(2) z times its sensitivity, so that both together have noise multiplier z.

Shape legend: B examples.
"""

import math
from typing import Any, ClassVar, Literal

import numpy as np

from dpx.declaration import declaration, require
from dpx.randomness import RootSecret


def count_name(value: str) -> str:
    """Returns the name under which a step accumulates the centred sum of a value."""
    return f"released_{value}"


class Telemetry:
    """The base class of telemetry, which releases no training measurement."""

    is_released: ClassVar[bool] = False
    # The values that the run publishes through it under its privacy statement, as text.
    published: ClassVar[tuple[str, ...]] = ()

    def ranges(self, metric: str) -> dict[str, float]:
        """Returns the width of each released value's range by name; `metric` is the name of the task's accuracy."""
        return {}

    def draw(self, secret: RootSecret, step: int) -> np.ndarray | None:
        """Returns the key of a step's telemetry noise, under its own purpose; `None` if nothing is released."""
        return None

    def centred_sums(self, task: Any, result: Any) -> dict[str, Any]:
        """Returns centred sums of one microbatch (a `ClippedSum`), float32 [] by `count_name`. Runs under jit."""
        return {}

    def step_metrics(self, metric: str, counts: dict[str, Any], key: Any, expected_batch: Any) -> dict[str, Any]:
        """Returns `{"released/<value>": noisy mean}`, float32 [], or nothing without a key. Runs under jit."""
        return {}

    def ledger_fields(self) -> dict[str, Any]:
        """Returns the telemetry's fields in a ledger entry."""
        return {"telemetry_noise_multiplier": None}


@declaration
class SecretTelemetry(Telemetry):
    """Keeps all measurements of training under private/, because they depend on the data without noise."""

    kind: Literal["secret"] = "secret"


@declaration
class ReleasedTelemetry(Telemetry):
    """Releases each step's mean loss and mean accuracy, with noise.

    Attributes:
        noise_multiplier: Noise multiplier of both values together, over their joint sensitivity (dpx.mechanism.telemetry).
        loss_limit: Each example's loss is clamped to 0 up to this value.
    """

    noise_multiplier: float = 20.0
    loss_limit: float = 10.0
    kind: Literal["released"] = "released"
    is_released: ClassVar[bool] = True
    published: ClassVar[tuple[str, ...]] = ("noisy loss and accuracy of every step (release/telemetry.jsonl)",)

    def __post_init__(self) -> None:
        require(
            0 < self.noise_multiplier < float("inf"),
            f"telemetry.noise_multiplier={self.noise_multiplier}",
            "released values need a positive amount of noise",
            "Give a value above 0, or telemetry=secret",
        )
        require(self.loss_limit > 0, f"telemetry.loss_limit={self.loss_limit}", "every loss would be clipped to 0", "Give a value above 0")

    def ranges(self, metric: str) -> dict[str, float]:
        return {"loss": self.loss_limit, metric: 1.0}

    def draw(self, secret: RootSecret, step: int) -> np.ndarray | None:
        return secret.key("telemetry_noise", step)

    def centred_sums(self, task: Any, result: Any) -> dict[str, Any]:
        import jax.numpy as jnp

        correct, predicted = task.accuracy_counts
        accuracy_B = result.counts[correct] / (1 if predicted is None else jnp.maximum(result.counts[predicted], 1))
        values = {"loss": result.losses_B, task.metric: accuracy_B}
        sums = {}
        for name, width in self.ranges(task.metric).items():
            centred_B = jnp.clip(values[name].astype(jnp.float32), 0, width) - width / 2
            sums[count_name(name)] = jnp.sum(jnp.where(result.is_counted_B, centred_B, 0))
        return sums

    def step_metrics(self, metric: str, counts: dict[str, Any], key: Any, expected_batch: Any) -> dict[str, Any]:
        """Returns (centred sum + noise) / B + half the range for each value, with B the expected batch size."""
        from dpx.mechanism.noise import gaussian

        if key is None:
            return {}
        widths = self.ranges(metric)
        noise, values = gaussian(key, len(widths), 1)[:, 0], dict[str, Any]()
        for index, (name, width) in enumerate(widths.items()):
            deviation = math.sqrt(len(widths)) * self.noise_multiplier * width / 2
            values[f"released/{name}"] = (counts[count_name(name)] + deviation * noise[index]) / expected_batch + width / 2
        return values

    def ledger_fields(self) -> dict[str, Any]:
        return {"telemetry_noise_multiplier": self.noise_multiplier}
