"""What the loss of a step is differentiated by, where a mechanism replaces parameters by others (`Mechanism.reparametrised`)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from dpx.clipping.frozen import merged
from dpx.clipping.groups import LAYERS
from dpx.mechanism.carriers import leaves_by_path
from dpx.mechanism.protocol import Mechanism, Reparametrised
from dpx.randomness import RootSecret
from dpx.training import sharding


def shapes(mechanism: Mechanism, params: Any) -> Reparametrised:
    """The shapes of what the loss is differentiated by, from those of the trained parameters. No device is needed."""
    return jax.eval_shape(partial(_first, mechanism), params, _drawn(mechanism, params))


def in_first_step(mechanism: Mechanism, params: Any, frozen: Any) -> tuple[Any, Any]:
    """(what the loss is differentiated by, all other parameters), for measurements without a run: keys come from a fixed seed."""
    by = _first(mechanism, params, _drawn(mechanism, params))
    return by.trained, merged(by.constants, frozen)


def _drawn(mechanism: Mechanism, params: Any) -> Any:
    return mechanism.draw_first(RootSecret.from_seed(0), 0, params)


def _first(mechanism: Mechanism, params: Any, drawn: Any) -> Reparametrised:
    return mechanism.reparametrised(params, mechanism.kept_from_start(params), drawn)


def compiled(mechanism: Mechanism, by: Reparametrised, mesh: Mesh) -> Callable[..., Reparametrised] | None:
    """(parameters, kept, drawn) -> what the loss is differentiated by, stored as parameters of these shapes are; `None` for mechanisms
    that replace nothing."""
    if not mechanism.reparametrises:
        return None
    metrics = dict.fromkeys(by.metrics, NamedSharding(mesh, P()))
    shardings = Reparametrised(sharding.storage_shardings(by.trained, mesh), sharding.storage_shardings(by.constants, mesh), metrics)
    return jax.jit(mechanism.reparametrised, out_shardings=shardings)


def norms_of_rebuilt(gradient: Any, trained: Any) -> dict[str, Array]:
    """The norm of every gradient that was rebuilt, of each layer by itself where layers are stacked, as metrics by path."""
    clipped, norms = leaves_by_path(trained), {}
    for path, leaf in leaves_by_path(gradient).items():
        if path not in clipped:
            axes = tuple(range(1, leaf.ndim)) if path.startswith(f"{LAYERS}/") else None
            norms[f"carriers/rebuilt/{path}"] = jnp.sqrt(jnp.sum(jnp.square(leaf), axis=axes))
    return norms
