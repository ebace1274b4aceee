"""Noise correlated over a band of steps: the noise released at step t is (z_t - sum_j c_j noise_{t-j}) / c_0, row t of C^-1 z.

Past noise is state: it starts at zero, is saved with every checkpoint, and starts at zero again in a new noise epoch or fork, which is then
a mechanism of its own.

Shape legend: J past steps (bands - 1), most recent first.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpx.experiment import Experiment
from dpx.mechanism.declarations import Banded

AddNoise = Callable[..., tuple[Array, Array]]


def initial(experiment: Experiment, params: Any) -> dict[str, Any]:
    """`{"past_noise": a tree of zeros [J, ...]}` for a banded mechanism, else nothing."""
    mechanism = experiment.mechanism
    if not isinstance(mechanism, Banded):
        return {}
    return {"past_noise": jax.tree.map(lambda leaf: jnp.zeros((mechanism.bands - 1, *leaf.shape), jnp.float32), params)}


def with_noise(
    total: Any, keys: Any, deviation: Float[Array, ""], past: Any, strategy: Float[Array, " bands"], add_noise: AddNoise
) -> tuple[Any, Array, Any]:
    """(noisy sum, sum of squares of its noise, past noise for the next step); `add_noise` draws z_t by slice keys."""

    def leaf(total: Array, keys: Array, past_J: Array) -> tuple[Array, Array, Array]:
        carried = -jnp.tensordot(strategy[1:], past_J, axes=1)
        noise = add_noise(carried, keys, deviation)[0] / strategy[0]
        return total + noise, jnp.sum(jnp.square(noise)), jnp.concatenate([noise[None], past_J[:-1]])

    leaves, tree = jax.tree.flatten(total)
    found = [leaf(*parts) for parts in zip(leaves, jax.tree.leaves(keys), jax.tree.leaves(past), strict=True)]
    noisy, squares, moved = zip(*found, strict=True)
    return jax.tree.unflatten(tree, noisy), jnp.sum(jnp.stack(squares)), jax.tree.unflatten(tree, moved)
