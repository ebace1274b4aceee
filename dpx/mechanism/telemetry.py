"""Loss and accuracy that may be seen: sums over a step's examples, each held to a range, released with noise beside the gradient's sum.

An example's loss, held to 0..L, and its accuracy in 0..1 are centred: it moves their sums by L/2 and 1/2 at most, an example that is
missing or not finite by nothing. Each sum gets noise of sqrt(2) z over its sensitivity, so both together have noise multiplier z.

Shape legend: B examples.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from dpx.clipping.clipped_sum import ClippedSum
from dpx.experiment import Experiment
from dpx.mechanism.declarations import ReleasedTelemetry
from dpx.mechanism.gaussian import gaussian
from dpx.randomness import RootSecret


def ranges(experiment: Experiment) -> dict[str, float]:
    """The width of each released value's range by name; nothing where telemetry is secret."""
    telemetry = experiment.telemetry
    return {"loss": telemetry.loss_limit, experiment.task.metric: 1.0} if isinstance(telemetry, ReleasedTelemetry) else {}


def count_name(value: str) -> str:
    """The name under which a step accumulates a value's centred sum."""
    return f"released_{value}"


def noise_key(experiment: Experiment, secret: RootSecret, step: int) -> np.ndarray | None:
    """The key of a step's telemetry noise, under a purpose of its own; `None` where nothing is released."""
    return secret.key("telemetry_noise", step) if ranges(experiment) else None


def centred_sums(experiment: Experiment, result: ClippedSum) -> dict[str, Float[Array, ""]]:
    """Centred sums of one microbatch, by `count_name`."""
    correct, predicted = experiment.task.accuracy_counts
    accuracy_B = result.counts[correct] / (1 if predicted is None else jnp.maximum(result.counts[predicted], 1))
    values = {"loss": result.losses_B, experiment.task.metric: accuracy_B}
    sums = {}
    for name, width in ranges(experiment).items():
        centred_B = jnp.clip(values[name].astype(jnp.float32), 0, width) - width / 2
        sums[count_name(name)] = jnp.sum(jnp.where(result.is_counted_B, centred_B, 0))
    return sums


def released(
    experiment: Experiment, counts: dict[str, Array], key: UInt32[Array, "2"] | None, expected_batch: Float[Array, ""]
) -> dict[str, Array]:
    """`{"released/<value>": noisy mean}`: (centred sum + noise) / B + half the range, B the expected batch size."""
    telemetry, widths = experiment.telemetry, ranges(experiment)
    if not isinstance(telemetry, ReleasedTelemetry) or key is None:
        return {}
    noise = gaussian(key, len(widths), 1)[:, 0]
    found: dict[str, Any] = {}
    for index, (name, width) in enumerate(widths.items()):
        deviation = math.sqrt(len(widths)) * telemetry.noise_multiplier * width / 2
        found[f"released/{name}"] = (counts[count_name(name)] + deviation * noise[index]) / expected_batch + width / 2
    return found
