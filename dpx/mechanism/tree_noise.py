"""Defines `dpx.add_noise`: Gaussian noise for your own training loop, drawn in the same way as in runs."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from dpx.declaration import require
from dpx.mechanism import noise
from dpx.randomness import path_name


def add_noise(key: Any, total: Any, *, stddev: Any) -> Any:
    """Adds independent Gaussian noise to every number of a sum of clipped gradients; may be called under `jax.jit`.

    Add it once for each logical batch, after all its parts were added up. Draws reach past 9 standard deviations, in float32
    (`dpx.mechanism.noise`).

    Args:
        key: One random key of the generator threefry2x32, different for every sum: fold the step into a key from the operating system.
        total: A tree of float32 arrays, such as the `.total` of a clipped gradient.
        stddev: The standard deviation: the noise multiplier times the clipping norm, under any adjacency. A float, or a float [].

    Returns:
        A tree like `total`, float32.

    Raises:
        ConfigError: For another kind of key, for another kind of sum, and if `stddev` is not above zero.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import dpx
        >>> noisy = dpx.add_noise(jax.random.key(0), {"w": jnp.zeros((100, 100))}, stddev=2.0)  # a fixed key gives no privacy
        >>> bool(abs(noisy["w"].std() - 2.0) < 0.1)
        True
    """
    is_number = isinstance(stddev, (int, float)) and not isinstance(stddev, bool)
    dtype = getattr(stddev, "dtype", None)
    is_scalar = dtype is not None and getattr(stddev, "shape", None) == () and jnp.issubdtype(dtype, jnp.floating)
    fix = "Give the noise multiplier times the clipping norm"
    require(is_number or is_scalar, f"stddev={stddev!r}", "is not one real number", fix)
    if not isinstance(stddev, Tracer):
        require(0 < float(stddev) < math.inf, f"stddev={stddev}", "must be finite and above zero", fix)

    is_whole = hasattr(total, "total") and hasattr(total, "is_counted")
    require(not is_whole, "the sum", "is the whole result of a clipped gradient, including norms and losses", "Give only its .total")
    leaves = jax.tree_util.tree_leaves_with_path(total)
    require(bool(leaves), "the sum", "contains no array", "Give the .total of a clipped gradient")
    for path, leaf in leaves:
        name = path_name(path) or "the sum"
        is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        require(is_array, name, f"is a {type(leaf).__name__} and not an array", "Give the .total of a clipped gradient")
        require(leaf.dtype == jnp.float32, name, f"is of type {leaf.dtype}", "Give float32, the type of clipped sums")

    fix = "Give one key of threefry2x32, such as jax.random.fold_in(key, step)"
    is_array = hasattr(key, "dtype") and hasattr(key, "shape")
    require(is_array, "the key", f"is of type {type(key).__name__} and not a random key", fix)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        generator = str(jax.random.key_impl(key))
        require(generator == "threefry2x32", "the key", f"is a key of the generator {generator}", fix)
        require(key.shape == (), f"keys of shape {key.shape}", "are several keys, but one key is needed", fix)
    else:
        is_raw = key.dtype == jnp.uint32 and key.shape == (2,)
        require(is_raw, "the key", f"is an array {key.shape} of type {key.dtype} and not a random key", fix)
        key = jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")

    # One key for each slice of each array.
    counts = [len(noise.row_blocks(leaf.shape)) for _, leaf in leaves]
    keys = jax.random.key_data(jax.random.split(key, sum(counts)))
    starts = [sum(counts[:number]) for number in range(len(counts))]
    own = [keys[start : start + count] for start, count in zip(starts, counts, strict=True)]
    tree = jax.tree.structure(total)
    return noise.add_noise(total, jax.tree.unflatten(tree, own), jnp.asarray(stddev, jnp.float32))[0]
