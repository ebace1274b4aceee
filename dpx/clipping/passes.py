"""Runs an op's backward pass in one of several kinds: one kind for each result that clipping needs beside the inputs' cotangents.

A record (for example an op's input and its output cotangent) is returned as the cotangent of a dummy input, the tap; a parameter's summed
gradient as the cotangent of a second dummy input, zeros in its shape. So one `vjp` through a loss made of ops yields all of it, and no
Python state outlives a trace.

Leaves out of a loop's stacked outputs what it only passes on: an input in another shape, or a value that is stacked twice.

The backward pass of a loop over layers or time returns, for each op, the activations that it was given. Stacked again, they would be held
twice.

U: units.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from dpx.clipping.probes import Op, evaluated, leaf_names
from dpx.clipping.readers import scan_parts

# record: the tap's cotangent is the record. norm: it is the squared norms. weighted: the tap holds weights, and the sums' cotangent is
# the gradient weighted by them, rows of weight zero masked. plain: the sums' alone. through: nothing, for an op that trains nothing.
Pass = Literal["record", "norm", "weighted", "plain", "through"]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run(op: Op, kind: Pass, values: Any, inputs: tuple, tap: Any, sums: tuple) -> Any:
    """Returns the op's outputs.

    `sums` has one array for each leaf, or None for a leaf that is not trained or whose sum is not needed.
    """
    return op.outputs(values, inputs)


def _forward(op: Op, kind: Pass, values: Any, inputs: tuple, tap: Any, sums: tuple) -> Any:
    outputs, residuals = op.forward(values, inputs)
    return outputs, (values, residuals, tap if kind == "weighted" else None, tuple(total is not None for total in sums))


def _backward(op: Op, kind: Pass, saved: Any, cotangent: Any) -> Any:
    values, residuals, weights, wanted = saved
    if kind == "plain":
        inputs, gradient = op.gradient(values, residuals, cotangent)
        return None, inputs, None, _of_wanted(op, values, gradient, wanted)
    inputs, record = op.backward(values, residuals, cotangent)
    if kind == "weighted":
        # Not above zero: a weight may be negative.
        keep_U = jnp.stack([jnp.any(part.reshape(-1, part.shape[-1]) != 0, axis=0) for part in weights]).any(0)
        keep_U = keep_U if op.norm_sees_all else keep_U & op.is_finite(record, keep_U.shape[0])
        gradient = op.masked_sum(values, record, weights, keep_U)
        return None, inputs, jax.tree.map(jnp.zeros_like, weights), _of_wanted(op, values, gradient, wanted)
    tap = record if kind == "record" else _finite_squares(op, values, record) if kind == "norm" else None
    return None, inputs, tap, (None,) * len(wanted)


run.defvjp(_forward, _backward)


def _of_wanted(op: Op, values: Any, gradient: Any, wanted: tuple[bool, ...]) -> tuple:
    return tuple(leaf if is_wanted else None for leaf, is_wanted in zip(by_leaf(op, values, gradient), wanted, strict=True))


def by_leaf(op: Op, leaves: Any, summed: Any) -> list[Any]:
    """Returns an op's sums with one entry for each of its leaves: None for frozen leaves."""
    sums = iter(jax.tree.leaves(summed))
    return [next(sums) if op.trains(name) else None for name in leaf_names(leaves)]


def _finite_squares(op: Op, values: Any, record: Any) -> tuple:
    """Returns the squared norms, with NaN for a unit whose sum would not be finite.

    No record outlives the pass, so this is the last time to look.
    """
    squares = op.squared_norm(values, record)
    if op.norm_sees_all:
        return squares
    is_finite_U = op.is_finite(record, jax.tree.leaves(squares)[0].shape[-1])
    return jax.tree.map(lambda square: jnp.where(is_finite_U, square, jnp.nan), squares)


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
