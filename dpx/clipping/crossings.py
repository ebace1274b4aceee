"""Refuses operations that can carry data from one example to another even if `jax.vmap` maps the loss over examples.

`jax.vmap` itself keeps examples apart. The remaining cases are collectives over an axis that is bound outside the loss, batching rules
from outside jax (`custom_vmap`, a user-defined primitive), host functions that are given all rows at once, and side effects.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import batching

from dpx.declaration import ConfigError, require

COLLECTIVES = frozenset(
    "psum psum_invariant pmax pmin pmean ppermute pbroadcast pgather psend precv all_gather all_gather_invariant all_gather_reduced".split()
    + "all_to_all ragged_all_to_all reduce_scatter psum_scatter unreduced_psum unreduced_reduce_scatter".split()
)
# Effects of a printed value, and of reading an axis: nothing comes back into the loss.
HARMLESS = ("DebugEffect", "OrderedDebugEffect", "NamedAxisEffect")
HOST = ("pure_callback", "ffi_call")


def check(loss: Callable[..., Any], *arguments: Any) -> None:
    """Raises `ConfigError` for operations through which `loss`, or its gradient with respect to the first argument, could mix examples.

    `loss` returns (number, counts) of one example. The gradient is checked too because a user-defined backward pass may contain operations
    that the loss does not show.
    """
    for function in (loss, jax.grad(loss, has_aux=True)):
        check_program(jax.make_jaxpr(function)(*arguments))


def check_program(closed: core.ClosedJaxpr) -> None:
    """Raises `ConfigError` for operations of a traced program that could mix examples."""
    for effect in sorted(type(effect).__name__ for effect in closed.effects):
        reason = f"has a side effect ({effect}), through which one example could reach another"
        require(effect in HARMLESS, "the loss", reason, "Remove it")
    for eqn, bound in _equations(closed.jaxpr, frozenset()):
        _check_collective(eqn, bound)
        _check_rule(eqn)


def check_collectives(jaxpr: core.Jaxpr) -> None:
    """Raises `ConfigError` for a collective over an axis that is not bound in this program."""
    for eqn, bound in _equations(jaxpr, frozenset()):
        _check_collective(eqn, bound)


def _check_collective(eqn: Any, bound: frozenset) -> None:
    if eqn.primitive.name not in COLLECTIVES:
        return
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = named if isinstance(named, (tuple, list)) else (named,)
    outside = [str(axis) for axis in axes if not isinstance(axis, int) and axis not in bound]
    if outside:
        value = f"{eqn.primitive.name} over {', '.join(outside)} in the loss"
        reason = "mixes examples of several devices, or of an outer vmap, before they are clipped"
        raise ConfigError(value, reason, "Remove it from the loss, and add up the clipped sums instead")


def _check_rule(eqn: Any) -> None:
    name, fix = eqn.primitive.name, "Call a function that jax.vmap maps by itself"
    if name in HOST and not str(eqn.params.get("vmap_method")).startswith("sequential"):
        reason = f"sends all examples to the host at once (vmap_method={eqn.params.get('vmap_method')})"
        raise ConfigError(f"{name} in the loss", reason, "Use vmap_method='sequential'")
    require(name != "custom_vmap_call", "custom_vmap in the loss", "has its own rule, which reads all examples at once", fix)
    rule = batching.fancy_primitive_batchers.get(eqn.primitive)
    reason = "has a batching rule from outside jax, which reads all examples at once"
    require(rule is None or _is_jaxs(rule), f"{name} in the loss", reason, fix)


@functools.lru_cache(maxsize=1024)
def _is_jaxs(rule: Any) -> bool:
    return all(_is_of_jax(function) for function in _functions(rule))


def _functions(rule: Any) -> list[Any]:
    """Returns a batching rule and, if it is a partial or a closure, the functions of which it is made."""
    waiting, seen, found = [rule], set(), []
    while waiting:
        one = waiting.pop()
        if id(one) in seen or not callable(one) or isinstance(one, core.Primitive):
            continue
        seen.add(id(one))
        if isinstance(one, functools.partial):
            waiting += [one.func, *one.args]
            continue
        found.append(one)
        waiting += inspect.getclosurevars(one).nonlocals.values() if inspect.isfunction(one) else ()
    return found


def _is_of_jax(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "jax").split(".")[0] in ("jax", "jaxlib", "dpx")


def _equations(jaxpr: core.Jaxpr, bound: frozenset) -> Iterator[tuple[Any, frozenset]]:
    """Yields every equation, also those inside bodies, with the names of the axes that are bound around it in this program."""
    for eqn in jaxpr.eqns:
        yield eqn, bound
        mesh, own = eqn.params.get("mesh"), eqn.params.get("axis_name")
        inside = bound | frozenset(getattr(mesh, "axis_names", ()))
        if eqn.primitive.name == "xla_pmap":
            inside |= {own}
        for body in _bodies(eqn.params.values()):
            yield from _equations(body, inside)


def _bodies(values: Any) -> Iterator[core.Jaxpr]:
    for value in values:
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _bodies(value)
