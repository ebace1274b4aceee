"""Maps what the loss of one example does over all examples: its ops, its branches, and arrays that are the same for all.

A parameter that is copied for each example is read from one array wherever `jax.vmap` would read one: in what is computed from parameters
and constants alone (a kernel times a number or a mask, a normalised kernel), and where a product or an index meets data. The copies only
take the gradients there, so that they are never held.

B: examples.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core
from jax.extend.core import Primitive, primitives
from jax.interpreters import batching

from dpx.clipping import norms
from dpx.clipping.convolution_ops import Convolution
from dpx.clipping.probes import Looked, Matrix, Op, ProbeSession, bound, evaluated
from dpx.clipping.reader_ops import Gathered, PartOfProduct, Product
from dpx.declaration import require

# Operations that are linear in a parameter, and whose other operands autodiff keeps in any case.
_LINEAR = (primitives.dot_general_p, primitives.conv_general_dilated_p, primitives.gather_p, primitives.dynamic_slice_p)


class Alike:
    """An array that is the same for all examples: `value`, and `copy`, which takes the gradient of each; None if it has no gradient."""

    def __init__(self, make: Callable[[], Any], copy: Any = None):
        self._make, self.copy = make, copy

    @cached_property
    def value(self) -> Any:
        """Returns the one array, which is computed where it is first needed: most copies are read alone."""
        return self._make()


def plain(value: Any) -> Any:
    """Returns an array for an operation that does not tell examples apart."""
    if not isinstance(value, Alike):
        return value
    return value.value if value.copy is None else value.copy


def results(eqn: Any, given: list[Any], tick: Any) -> list[Any]:
    """Returns the outputs of an equation without bodies of dpx: `Alike` if all of `given` are. `tick` is a zero of the example."""
    is_alike = all(isinstance(value, Alike) for value in given)
    has_copies = any(isinstance(value, Alike) and value.copy is not None for value in given)
    if eqn.primitive in _LINEAR and has_copies:
        copies = [_linear(lambda *values: evaluated(eqn, values)[0], given, tick)]
    else:
        copies = evaluated(eqn, [plain(value) for value in given])
    if not is_alike:
        return copies

    def shared(place: int) -> Alike:
        make = lambda: evaluated(eqn, [value.value for value in given])[place]  # noqa: E731
        is_float = jnp.issubdtype(eqn.outvars[place].aval.dtype, jnp.floating)
        is_read = has_copies and is_float and eqn.primitive is not primitives.stop_gradient_p
        return Alike(make, copies[place]) if is_read else Alike(make if has_copies else lambda: copies[place])

    return [shared(place) for place in range(len(copies))]


def carried(body: core.Jaxpr, given: list[Any], consts: int, count: int) -> list[bool]:
    """Returns which of the `count` values that a loop carries, after its `consts` constants, are constants alike in every round."""
    is_alike = [isinstance(value, Alike) and value.copy is None for value in given[: consts + count]]
    while True:
        known = {*body.constvars, *(var for var, own in zip(body.invars, is_alike, strict=False) if own)}
        for eqn in body.eqns:
            if all(isinstance(var, core.Literal) or var in known for var in eqn.invars):
                known.update(eqn.outvars)
        ends = [isinstance(var, core.Literal) or var in known for var in body.outvars[:count]]
        after = [own and end for own, end in zip(is_alike[consts:], ends, strict=True)]
        if after == is_alike[consts:]:
            return after
        is_alike[consts:] = after


def taken(run: Callable[..., Any], given: list[Any], tick: Any) -> Any:
    """Returns `run(*given)`, which is linear in the first of `given` and takes a part of it at a place that the others name."""
    copy = _linear(run, given, tick)
    if not all(isinstance(value, Alike) for value in given):
        return copy
    return Alike(lambda: run(*(value.value for value in given)), copy)


def _linear(run: Callable[..., Any], given: list[Any], tick: Any) -> Any:
    """Returns `run` of the one arrays, for which the copies take the gradients; it has the example's axis by the `tick`."""
    is_copied = [isinstance(value, Alike) and value.copy is not None for value in given]
    values = [value.value if isinstance(value, Alike) else value for value in given]

    @jax.custom_vjp
    def of_values(copies: list[Any], values: list[Any], tick: Any) -> Any:
        out = run(*values)
        return out + tick.astype(out.dtype)

    def forward(copies: list[Any], values: list[Any], tick: Any) -> tuple[Any, list[Any]]:
        return of_values(copies, values, tick), values

    def backward(values: list[Any], cotangent: Any) -> tuple[list[Any], list[Any], None]:
        by_value = jax.vjp(run, *values)[1](cotangent)
        return (
            [own for own, own_copied in zip(by_value, is_copied, strict=True) if own_copied],
            [None if own_copied else own for own, own_copied in zip(by_value, is_copied, strict=True)],
            None,
        )

    of_values.defvjp(forward, backward)
    return of_values([value.copy for value, own_copied in zip(given, is_copied, strict=True) if own_copied], values, tick)


one_p = Primitive("dpx_op_of_one_example")
one_p.multiple_results = True
one_p.def_abstract_eval(lambda *_, outputs, **__: [ShapedArray(leaf.shape, leaf.dtype) for leaf in outputs])


def _batched(given: Any, axes: Any, *, op: Op, leaf: str, path: str, session: ProbeSession, outputs: tuple) -> Any:
    """Evaluates the op for all examples: `given` is (parameter, *inputs, tick), and the tick always has the examples' axis."""
    parameter, *inputs, tick = given
    reason = "is mapped over the example axis together with the examples"
    require(axes[0] is None, path, reason, "Give parameters without an example axis")
    B = tick.shape[axes[-1]]
    moved = [
        jnp.broadcast_to(x, (B, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip((*inputs, tick), axes[1:], strict=True)
    ]
    inputs = tuple(moved[:-1]) or (moved[-1],)
    if isinstance(op, PartOfProduct):
        op = dataclasses.replace(op, is_shared=all(axis is None for axis in axes[2:-1]))
    elif isinstance(op, (Product, Convolution)):
        op = dataclasses.replace(op, form=_form(op, outputs[0].size, B, path, session))
    if isinstance(op, Gathered):
        op = dataclasses.replace(op, is_kept=_is_kept(op, outputs[0].size, B, path, session))
    shape = jax.ShapeDtypeStruct((B, *outputs[0].shape), outputs[0].dtype)
    result = bound(op.of_units(session.rows_per_unit), {leaf: parameter}, (path,), inputs, shape)
    return [result], [0]


batching.primitive_batchers[one_p] = _batched


def _form(op: Product | Convolution, outputs: int, B: int, path: str, session: ProbeSession) -> norms.Form:
    E, p, d = op.sizes()
    T = outputs // (E * d)
    whole = T * session.rows_per_unit
    form = norms.choose(whole, p, d, False) if op.form != "kept" else session.form(path, B, T, (p, d))
    session.matrices[path] = Matrix(whole, E, p, d, form)
    return form


def _is_kept(op: Gathered, outputs: int, B: int, path: str, session: ProbeSession) -> bool:
    """Returns whether the gradient of a table is kept: always if it is smaller than the cotangents of its rows."""
    (V, d), rows = op.view.shape, session.rows_per_unit
    T = outputs // d * rows
    other = "by_id" if norms.is_added_by_id(T, V) else "pairs"
    is_cheaper = op.is_kept and norms.lookup_cost("kept", T, d, V) < norms.lookup_cost(other, T, d, V)
    is_kept = is_cheaper and (V <= T or session.keep(path, 4 * (B // rows) * math.prod(session.shapes[path])))
    session.lookups[path] = Looked(T, d, V, is_kept)
    return is_kept


choice_p = Primitive("dpx_choice_of_one_example")
choice_p.multiple_results = True
choice_p.def_abstract_eval(lambda *_, bodies, count: [ShapedArray(var.aval.shape, var.aval.dtype) for var in bodies[0][0].outvars])


def _chosen(given: Any, axes: Any, *, bodies: tuple, count: int) -> Any:
    """Evaluates one branch if all examples take the same one (for example by a loop's round); else all branches, and selects by example."""
    index, tick, *rest = given

    def branch(jaxpr: core.Jaxpr, start: int) -> Any:
        def run(tick: Any, *rest: Any) -> list[Any]:
            consts = rest[count + start : count + start + len(jaxpr.constvars)]
            return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, consts))(tick, *rest[:count])

        return jax.vmap(run, in_axes=tuple(axes[1:]), axis_size=tick.shape[axes[1]])

    runs = [branch(*body) for body in bodies]
    if axes[0] is None:
        results = jax.lax.switch(index, runs, tick, *rest)
    else:
        cases = zip(*(run(tick, *rest) for run in runs), strict=True)
        results = [jax.vmap(jax.lax.select_n)(jnp.moveaxis(index, axes[0], 0), *each) for each in cases]
    return results, [0] * len(results)


batching.primitive_batchers[choice_p] = _chosen
