"""Integer sums and integer noise, for `mechanism=discrete_gaussian`.

int32 arithmetic wraps around: sums and noise are taken modulo 2^32, which is a function of their exact values and so costs nothing.
"""

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dpx.mechanism.discrete_gaussian import discrete_gaussian
from dpx.mechanism.noise import path_name, row_blocks
from dpx.randomness import RootSecret

# Clamped coordinates are no further apart than before, and conversion to int32 is defined for them.
LARGEST = 2.0**30


def to_grid(tree: Any, spacing: float) -> Any:
    """Every leaf rounded to the nearest multiple of `spacing`, as int32 multiples."""
    return jax.tree.map(lambda leaf: jnp.clip(jnp.round(leaf / spacing), -LARGEST, LARGEST).astype(jnp.int32), tree)


def grid_noise(secret: RootSecret, step: int, params: Any, deviation: Fraction) -> Any:
    """A tree like `params` of int32 draws on the host: one keyed stream for each (step, parameter path, slice)."""

    def leaf(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
        sizes = [rows * columns for rows, columns in row_blocks(leaf.shape)]
        streams = [secret.stream("grid_noise", step, path_name(path), index) for index in range(len(sizes))]
        drawn = [discrete_gaussian(stream, deviation, size) for stream, size in zip(streams, sizes, strict=True)]
        return np.concatenate(drawn).astype(np.int32).reshape(leaf.shape)

    return jax.tree_util.tree_map_with_path(leaf, params)


def with_grid_noise(total: Any, noise: Any, spacing: float) -> tuple[Any, Any, Array]:
    """(sum, noisy sum, sum of squares of the noise) in the gradient's units, from int32 trees."""
    float_of = lambda leaf: leaf.astype(jnp.float32) * spacing  # noqa: E731
    squares = jnp.sum(jnp.stack([jnp.sum(jnp.square(float_of(leaf))) for leaf in jax.tree.leaves(noise)]))
    return jax.tree.map(float_of, total), jax.tree.map(lambda a, b: float_of(a + b), total, noise), squares
