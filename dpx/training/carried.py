"""Gives the arrays by which the loss of a step is differentiated, for a mechanism that replaces parameters (`Mechanism.reparametrised`)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from dpx.clipping.groups import LAYERS
from dpx.clipping.trained_and_frozen import merged
from dpx.mechanism.carriers import leaves_by_path
from dpx.mechanism.mechanism_protocol import Mechanism, Reparametrised
from dpx.randomness import RootSecret
from dpx.training import sharding


def shapes(mechanism: Mechanism, params: Any) -> Reparametrised:
    """Returns the shapes of the arrays by which the loss is differentiated, from those of the trained parameters. No device is needed."""
    return jax.eval_shape(partial(_first, mechanism), params, _drawn(mechanism, params))


def in_first_step(mechanism: Mechanism, params: Any, frozen: Any) -> tuple[Any, Any]:
    """Returns (the arrays by which the loss is differentiated, all other parameters), for measurements without a run.

    Keys come from a fixed seed.
    """
    by = _first(mechanism, params, _drawn(mechanism, params))
    return by.trained, merged(by.constants, frozen)


def _drawn(mechanism: Mechanism, params: Any) -> Any:
    return mechanism.draw_first(RootSecret.from_seed(0), 0, params)


def _first(mechanism: Mechanism, params: Any, drawn: Any) -> Reparametrised:
    return mechanism.reparametrised(params, mechanism.kept_from_start(params), drawn)


def compiled(mechanism: Mechanism, by: Reparametrised, mesh: Mesh) -> Callable[..., Reparametrised] | None:
    """Returns the compiled function of (parameters, kept, drawn) that gives these arrays; `None` for mechanisms that replace nothing.

    The arrays are stored in the same layout as parameters of their shapes.
    """
    if not mechanism.reparametrises:
        return None
    metrics = dict.fromkeys(by.metrics, NamedSharding(mesh, P()))
    shardings = Reparametrised(sharding.storage_shardings(by.trained, mesh), sharding.storage_shardings(by.constants, mesh), metrics)
    return jax.jit(mechanism.reparametrised, out_shardings=shardings)


def norms_of_rebuilt(gradient: Any, trained: Any) -> dict[str, Array]:
    """Returns the norm of every gradient that was rebuilt, as metrics by path; stacked layers have one norm each."""
    clipped, norms = leaves_by_path(trained), {}
    for path, leaf in leaves_by_path(gradient).items():
        if path not in clipped:
            axes = tuple(range(1, leaf.ndim)) if path.startswith(f"{LAYERS}/") else None
            norms[f"carriers/rebuilt/{path}"] = jnp.sqrt(jnp.sum(jnp.square(leaf), axis=axes))
    return norms
