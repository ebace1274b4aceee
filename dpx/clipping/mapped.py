"""Maps what the loss of one example does over all examples: its ops, its branches, and arrays that are the same for all.

A parameter that is copied for each example is read from one array wherever `jax.vmap` would read one: in what is computed from parameters
and constants alone (a kernel times a number or a mask, a normalised kernel), and where a product or an index meets data. The copies only
take the gradients there, so that they are never held. The ops for uses other than products are here: a lookup of rows, and a copy.

B: examples, U: units, V: rows of a table, d: numbers of a row.
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

from dpx.clipping import forms, norms
from dpx.clipping.op import ByRow, Looked, Matrix, Op, ProbeSession, bound, evaluated
from dpx.clipping.reader_ops import Convolution, PartOfProduct, Product, View
from dpx.declaration import require


@dataclasses.dataclass(frozen=True)
class Gathered(ByRow):
    """A `gather` of whole rows of `table`, perhaps in another type; ids outside the table are handled by the gather's mode.

    With `is_kept` the record is each unit's gradient, `table` [U, V, d], which is smaller than many cotangents.
    """

    view: View
    settings: tuple[tuple[str, Any], ...]
    is_kept: bool = False
    name: str = "gathered"
    rows_per_unit: int = 1

    def forward(self, leaves, inputs):
        (index_B,) = inputs
        table = self.view(leaves["table"])
        one = lambda index: primitives.gather_p.bind(table, index, **dict(self.settings))  # noqa: E731
        return jax.vmap(one)(index_B), index_B

    def input_cotangent(self, leaves, residuals, cotangent):
        V = self.view.shape[0]
        id_B, U = residuals[..., 0], residuals.shape[0] // self.rows_per_unit
        is_dropped = jnp.zeros(id_B.shape, bool)
        if dict(self.settings)["mode"] != jax.lax.GatherScatterMode.CLIP:
            is_dropped = (id_B < 0) | (id_B >= V)
        # The cotangent as [B, *ids, d], whatever axes the gather gives to the row.
        offset = tuple(axis + 1 for axis in dict(self.settings)["dimension_numbers"].offset_dims)
        rest = [axis for axis in range(cotangent.ndim) if axis not in offset]
        sizes = [cotangent.shape[axis] for axis in rest]
        g = jnp.where(is_dropped[..., None], 0, jnp.transpose(cotangent, (*rest, *offset)).reshape(*sizes, -1))
        id_UT = jnp.clip(id_B, 0, V - 1).reshape(U, -1)
        record = forms.Rows(id_UT.astype(jnp.float32), g.reshape(U, id_UT.shape[1], -1))
        return (None,), {"table": forms.formed(record, leaves["table"].shape)} if self.is_kept else record._asdict()

    def holds_gradients(self):
        return self.is_kept

    def squared_norm(self, leaves, record):
        return (norms.squares(record["table"]),) if self.is_kept else super().squared_norm(leaves, record)

    def gradients(self, shapes, record):
        return {"table": forms.Whole(record["table"])} if self.is_kept else super().gradients(shapes, record)

    def weighted_sum(self, leaves, record, weights):
        form = forms.Whole(record["table"]) if self.is_kept else forms.Rows(record["id"], record["g"])
        return {"table": forms.summed(form, weights[0], leaves["table"].shape)}


def is_lookup(eqn: Any, view: View) -> bool:
    """Returns whether a gather takes whole rows of a table by one id each.

    An index may have further entries only if they change nothing: those of axes that are taken whole, in the mode that clips.
    """
    numbers, shape, mode = eqn.params["dimension_numbers"], view.shape, eqn.params["mode"]
    whole_rows = eqn.params["slice_sizes"] == (1, *shape[1:]) and numbers.start_index_map[:1] == (0,)
    is_plain = not numbers.operand_batching_dims and numbers.collapsed_slice_dims in ((0,), ())
    is_one_id = numbers.start_index_map == (0,) or mode == jax.lax.GatherScatterMode.CLIP
    return view.is_cast and len(shape) == 2 and shape[0] < 2**24 and whole_rows and is_plain and is_one_id


@dataclasses.dataclass(frozen=True)
class Copied(Op):
    """A copy of a view for each example; autodiff forms its gradient, whatever operation uses the copy.

    With `is_repeated` it is a small part of a parameter that a loop copies in each round.
    """

    norm_sees_all = True
    is_shared = True
    view: View
    is_repeated: bool = False
    name: str = "copied"
    rows_per_unit: int = 1

    def holds_gradients(self):
        return True

    def forward(self, leaves, inputs):
        (tick_B,), parameter = inputs, self.view(leaves["parameter"])
        return jnp.broadcast_to(parameter, (tick_B.shape[0], *parameter.shape)), tick_B

    def input_cotangent(self, leaves, residuals, cotangent):
        return (jnp.zeros_like(residuals),), self.over_rows(norms.at_least_float32(cotangent))

    def squared_norm(self, leaves, record):
        return (norms.squares(record),)

    def weighted_sum(self, leaves, record, weights):
        summed = jnp.tensordot(weights[0], record, 1, precision="highest")
        return {"parameter": self.view.back(summed, leaves["parameter"])}

    def gradients(self, shapes, record):
        if self.is_repeated:
            # Each number is the product of one and its cotangent.
            g = record.reshape(record.shape[0], 1, -1, 1, 1)
            return {"parameter": forms.Part(jnp.ones_like(g), g, None, self)}
        return {"parameter": forms.Whole(jax.vmap(lambda one: self.view.back(one, shapes["parameter"]))(record))}

    def placed(self, gradient_E11, like):
        """Returns a gradient of the view as one of the parameter `like`."""
        return self.view.back(gradient_E11.reshape(self.view.shape), like)


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
        E, p, d = op.sizes()
        T = outputs[0].size // (E * d)
        whole = T * session.rows_per_unit
        form = norms.choose(whole, p, d, False) if op.form != "kept" else session.form(path, B, T, (p, d))
        session.matrices[path] = Matrix(whole, E, p, d, form)
        op = dataclasses.replace(op, form=form)
    if isinstance(op, Gathered):
        (V, d), rows = op.view.shape, session.rows_per_unit
        T = outputs[0].size // d * rows
        other = "by_id" if norms.is_added_by_id(T, V) else "pairs"
        is_cheaper = op.is_kept and norms.lookup_cost("kept", T, d, V) < norms.lookup_cost(other, T, d, V)
        # The gradient of a table is always kept if it is smaller than the cotangents of its rows.
        is_kept = is_cheaper and (V <= T or session.keep(path, 4 * (B // rows) * math.prod(session.shapes[path])))
        session.lookups[path] = Looked(T, d, V, is_kept)
        op = dataclasses.replace(op, is_kept=is_kept)
    shape = jax.ShapeDtypeStruct((B, *outputs[0].shape), outputs[0].dtype)
    result = bound(op.of_units(session.rows_per_unit), {leaf: parameter}, (path,), inputs, shape)
    return [result], [0]


batching.primitive_batchers[one_p] = _batched


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
