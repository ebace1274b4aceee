"""Finds the parameters on which the losses depend through differentiable operations, from the traced program and never from numbers.

A sum of zeros is not evidence: the first factor of a low-rank adapter has a zero gradient as long as the second factor is zero.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from dpx.clipping.probes import shapes_of
from dpx.clipping.program import Program, with_counts
from dpx.clipping.readers import bodies_of, scan_parts
from dpx.clipping.trained_and_frozen import merged, missing
from dpx.declaration import ConfigError

# Primitives whose derivative is zero wherever it exists; integers and truth values have none by their type.
FLAT = (primitives.stop_gradient_p, primitives.sign_p, primitives.floor_p, primitives.ceil_p, primitives.round_p)


def check(losses_fn: Any, params: Any, frozen: Any, batch: Any) -> None:
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


def check_program(program: Program) -> None:
    """Does the same as `check` for a program that is already traced and whose first output is the losses."""
    check_reached(program.closed.jaxpr, program.paths)


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
