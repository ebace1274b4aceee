"""Handles parameters in two trees: trained parameters and frozen parameters.

Both are nested dicts, and a loss takes both as one tree. Only trained parameters have gradients, norms and sums.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dpx.declaration import ConfigError, require

FIX = "Give nested dicts, and put every parameter into exactly one of the two"


def merged(params: Any, frozen: Any) -> Any:
    """Returns both trees merged into one, or `params` unchanged if nothing is frozen.

    Raises `ConfigError` for a parameter that is in both, and for trees that are not nested dicts.
    """
    return _merged(params, frozen, "") if jax.tree.leaves(frozen) else params


def _merged(params: Any, frozen: Any, path: str) -> Any:
    both_dicts = isinstance(params, Mapping) and isinstance(frozen, Mapping)
    require(both_dicts, path or "params and frozen", "is in both trees, or one of them is not a nested dict", FIX)
    joined = dict(params)
    for name, leaf in frozen.items():
        joined[name] = _merged(joined[name], leaf, f"{path}/{name}".lstrip("/")) if name in joined else leaf
    return joined


def bound(losses_fn: Any, frozen: Any) -> Any:
    """Returns a function of the trained tree and the batch: `losses_fn` with the `frozen` parameters filled in.

    The returned function raises `ConfigError` where a parameter is in both trees.
    """
    if not jax.tree.leaves(frozen):
        return losses_fn
    frozen = jax.tree.map(jnp.asarray, frozen)
    return lambda params, *rest: losses_fn(merged(params, frozen), *rest)


def missing(error: Exception) -> ConfigError:
    """Returns the error for a loss that fails on parameters that were given in two trees."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return ConfigError(
        "params and frozen", f"together do not have the structure that the loss takes ({type(error).__name__}: {first})", FIX
    )
