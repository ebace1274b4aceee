"""Leaves out of a loop's stacked outputs what it only passes on: an input in another shape, or a value that is stacked twice.

The backward pass of a loop over layers or time returns, for each op, the activations that it was given. Stacked again, they would be held
twice.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.extend.core import primitives

from dpx.clipping.probes import evaluated
from dpx.clipping.readers import scan_parts

# Operations that only write the same numbers in another shape or order.
_SHAPES = frozenset({"reshape", "transpose", "squeeze", "expand_dims"})


class _Output(NamedTuple):
    """A stacked output: the variable of the loop's body whose value it holds, and the operations that give it its shape, in order."""

    source: Any
    shaped_by: tuple[Any, ...]

    def shaped(self, stacked: Any) -> Any:
        """Returns the output from the stacked values of `source`."""
        for eqn in self.shaped_by:
            stacked = jax.vmap(lambda value, eqn=eqn: eqn.primitive.bind(value, **eqn.params))(stacked)
        return stacked


def without_copies(run: Callable[[], Any]) -> Any:
    """Returns the result of `run`, whose loops stack each value once; values that it closes over may be traced."""
    closed, shapes = jax.make_jaxpr(run, return_shape=True)()
    values: dict[core.Var, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else values[var]

    for eqn in closed.jaxpr.eqns:
        with eqn.ctx.manager:
            results = (_loop if eqn.primitive is primitives.scan_p else evaluated)(eqn, [read(var) for var in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return jax.tree.unflatten(jax.tree.structure(shapes), [read(var) for var in closed.jaxpr.outvars])


def _loop(eqn: Any, given: list[Any]) -> list[Any]:
    consts, count = scan_parts(eqn)
    carry, body = consts + count, eqn.params["jaxpr"]
    # By identity: a literal has no hash.
    stacked_inputs = dict(zip(map(id, body.jaxpr.invars[carry:]), given[carry:], strict=True))
    made_by = {var: inner for inner in body.jaxpr.eqns for var in inner.outvars}
    outputs = [_output(var, made_by) for var in body.jaxpr.outvars[count:]]
    stacked = {id(one.source): one.source for one in outputs if id(one.source) not in stacked_inputs}
    run = core.jaxpr_as_fun(core.ClosedJaxpr(body.jaxpr.replace(outvars=[*body.jaxpr.outvars[:count], *stacked.values()]), body.consts))

    def round_of(carried: Any, sliced: Any) -> Any:
        results = run(*given[:consts], *carried, *sliced)
        return results[:count], results[count:]

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carried, values = jax.lax.scan(round_of, given[consts:carry], given[carry:], **options)
    known = stacked_inputs | dict(zip(stacked, values, strict=True))
    return [*carried, *(one.shaped(known[id(one.source)]) for one in outputs)]


def _output(var: Any, made_by: dict[Any, Any]) -> _Output:
    """Follows a stacked output back to the value that it shows. A literal is not followed."""
    shaped_by: list[Any] = []
    while not isinstance(var, core.Literal) and var in made_by and made_by[var].primitive.name in _SHAPES:
        shaped_by.insert(0, made_by[var])
        var = made_by[var].invars[0]
    return _Output(var, tuple(shaped_by))
