"""Handles parameters in two trees: trained parameters and frozen parameters.

Both are nested dicts, and a loss takes both as one tree. Only trained parameters have gradients, norms and sums.

Whether the losses depend on a trained parameter through differentiable operations is found from the traced program and never from numbers:
the first factor of a low-rank adapter has a zero gradient as long as the second factor is zero.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from dpx.clipping.probes import shapes_of
from dpx.clipping.readers import bodies_of, scan_parts
from dpx.clipping.result import with_counts
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


# Primitives whose derivative is zero wherever it exists; integers and truth values have none by their type.
FLAT = (primitives.stop_gradient_p, primitives.sign_p, primitives.floor_p, primitives.ceil_p, primitives.round_p)


def check_trained_reached(losses_fn: Any, params: Any, frozen: Any, batch: Any) -> None:
    """Raises `ConfigError` for a parameter of `params` that no differentiable path from the losses reaches.

    Checks nothing if `frozen` is None.
    """
    if frozen is None:
        return

    def losses(params: Any, frozen: Any, batch: Any) -> Any:
        return with_counts(losses_fn(merged(params, frozen), batch))[0]

    try:
        jaxpr = jax.make_jaxpr(losses)(params, frozen, batch).jaxpr
    except Exception as error:
        if isinstance(error, ConfigError) or not frozen:
            raise
        raise missing(error) from error
    check_reached(jaxpr, list(shapes_of(params)))


def check_reached(jaxpr: core.Jaxpr, paths: Sequence[str]) -> None:
    """Raises `ConfigError` for the first of the `paths`, which name the first inputs, that the first output does not depend on."""
    reached = _reached(jaxpr, [True] + [False] * (len(jaxpr.outvars) - 1))
    for path, is_reached in zip(paths, reached, strict=False):
        if not is_reached:
            reason = "is trained, but the loss does not depend on it through differentiable operations"
            raise ConfigError(path, reason, "Leave it in frozen, or out of the model")


def _reached(jaxpr: core.Jaxpr, wanted: Sequence[bool]) -> list[bool]:
    """Returns which inputs a differentiable path from the `wanted` outputs reaches."""
    live = {var for var, is_wanted in zip(jaxpr.outvars, wanted, strict=True) if is_wanted and _is_floating(var)}
    for eqn in reversed(jaxpr.eqns):
        outputs = [var in live for var in eqn.outvars]
        if any(outputs) and eqn.primitive not in FLAT:
            inputs = _through(eqn, outputs)
            live.update(var for var, is_reached in zip(eqn.invars, inputs, strict=True) if is_reached and _is_floating(var))
    return [var in live for var in jaxpr.invars]


def _through(eqn: Any, outputs: list[bool]) -> list[bool]:
    """Returns the inputs of an equation on which its wanted outputs depend: all of them, unless the equation's bodies can be inspected."""
    bodies = bodies_of(eqn)
    if bodies is None:
        return [True] * len(eqn.invars)
    if eqn.primitive is primitives.scan_p:
        return _settled(bodies[0], *scan_parts(eqn), outputs)
    before = [False] * (len(eqn.invars) - len(bodies[0].invars))
    return before + _any([_reached(body, outputs) for body in bodies])


def _settled(body: core.Jaxpr, consts: int, carry: int, outputs: list[bool]) -> list[bool]:
    """Returns `_reached` of a loop.

    What a round's carry depends on is wanted of the round before, until a round adds nothing.
    """
    wanted = list(outputs)
    while True:
        reached = _reached(body, wanted)
        carried = _any([wanted[:carry], reached[consts : consts + carry]])
        if carried == wanted[:carry]:
            return [*reached[:consts], *carried, *reached[consts + carry :]]
        wanted[:carry] = carried


def _any(each: Sequence[Sequence[bool]]) -> list[bool]:
    return [any(column) for column in zip(*each, strict=True)]


def _is_floating(var: Any) -> bool:
    return isinstance(var, core.Var) and jnp.issubdtype(getattr(var.aval, "dtype", int), jnp.floating)
