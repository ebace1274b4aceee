"""The clipping norm that adapts: a state of the run, moved after each step by that step's noisy count (Andrew et al. 2021).

Step t clips to C_t and scales its noise by C_t, both fixed before its rows are drawn; what its rows say about the norm reaches C_{t+1}
through the noisy count alone. All C_t are therefore released values.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from dpx.experiment import Experiment
from dpx.mechanism.declarations import Quantile
from dpx.mechanism.gaussian import gaussian
from dpx.randomness import RootSecret

# An example counts +1/2 or -1/2, one that is missing 0.
COUNT_SENSITIVITY = 0.5

# The norm stays within this factor of the first one: noise alone must not drive it out of float32.
RANGE = 1e6


def initial(experiment: Experiment) -> dict[str, Array]:
    """The part of a run's state that the clip carries: `{"clipping_norm": C_0}` where the norm adapts, else nothing."""
    return {"clipping_norm": jnp.float32(experiment.clip.clipping_norm)} if _adapts(experiment) else {}


def in_force(experiment: Experiment, state: dict[str, Any]) -> np.float32 | Array:
    """The norm that the next step clips to: the state's where it adapts (a device scalar, not waited for), else the declared one."""
    return state["clipping_norm"] if _adapts(experiment) else np.float32(experiment.clip.clipping_norm)


def count_key(experiment: Experiment, secret: RootSecret, step: int) -> np.ndarray | None:
    """The key of step `step`'s count noise, under a purpose of its own; `None` where nothing is counted."""
    return secret.key("count_noise", step) if _adapts(experiment) else None


def following(
    experiment: Experiment,
    state: dict[str, Any],
    counts: dict[str, Array],
    key: UInt32[Array, "2"] | None,
    expected_batch: Float[Array, ""],
) -> dict[str, Array]:
    """`{"clipping_norm": C_{t+1}}` from C_t and a step's counts (`units`, `non_finite`, `clipped`); nothing where it does not adapt.

    The fraction within C_t is (sum of +-1/2 + noise) / B + 1/2 with B the expected batch size: unbiased, with a public divisor.
    Without a key nothing is counted and the norm stays.
    """
    clip = experiment.clip
    if not isinstance(clip, Quantile) or key is None:
        return {name: state[name] for name in initial(experiment)}
    counted = counts["units"] - counts["non_finite"]
    centred = COUNT_SENSITIVITY * counted - counts["clipped"]
    noise = COUNT_SENSITIVITY * clip.count_noise_multiplier * gaussian(key, 1, 1)[0, 0]
    within = (centred + noise) / expected_batch + 0.5
    moved = state["clipping_norm"] * jnp.exp(-clip.learning_rate * (within - clip.target_quantile))
    return {"clipping_norm": jnp.clip(moved, clip.clipping_norm / RANGE, clip.clipping_norm * RANGE)}


def _adapts(experiment: Experiment) -> bool:
    return experiment.is_private and isinstance(experiment.clip, Quantile)
