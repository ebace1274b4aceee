"""Computes clipped gradients of a loss of one example, in any JAX code.

The loss is traced for one example. Where a parameter meets a product or a lookup, that equation becomes an op (reader_ops.py); any
other reader gets a copy of the parameter for each example, whose gradient autodiff forms. Then the whole is mapped over examples by
`jax.vmap`: the loss never sees the example's axis, so nothing of one example can be in the row of another.

B: examples.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core
from jax.extend.core import Primitive, primitives
from jax.interpreters import batching

from dpx.clipping import norms
from dpx.clipping.convolution_ops import Convolution
from dpx.clipping.probes import Looked, Matrix, Op, ProbeSession, bound, evaluated
from dpx.clipping.reader_ops import VIEWS, Box, Copied, Gathered, Product, View, is_lookup
from dpx.clipping.readers import body_of, scan_parts
from dpx.declaration import require

Route = Literal["product", "convolution", "lookup", "elementwise", "copies"]

# Readers that need every number of a parameter once: a copy for each example is at most as large as the gradient that must be formed.
ELEMENTWISE = (primitives.add_p, primitives.sub_p, primitives.mul_p, primitives.broadcast_in_dim_p)


@dataclasses.dataclass(frozen=True)
class Reader:
    """One operation that reads a parameter: its route and primitive, whether a loop runs it in each round, and the share that it reads.

    `box` is the part that a product reads as a matrix, and `is_matrix` says whether the reader's gradient can be joined with those of
    others that read some of the same numbers.
    """

    route: Route
    primitive: str
    is_repeated: bool
    is_matrix: bool = True
    share: float = 1.0
    box: Box | None = None


@dataclasses.dataclass
class Followed:
    """A parameter, or one layer of it, with the view of it that the equations so far have taken."""

    value: Any
    path: str
    view: View
    is_repeated: bool = False


@dataclasses.dataclass
class Joined:
    """Arrays and followed parameters that are concatenated along an axis, such as the kernels of a recurrent cell's gates."""

    parts: list[Any]
    axis: int

    @property
    def value(self) -> Any:
        """Returns the values of the parts."""
        return _arrays(self.parts)

    def then(self, eqn: Any) -> "Joined":
        """Returns the parts after a cast of the whole."""

        def cast(part: Any) -> Any:
            if not isinstance(part, Followed):
                return evaluated(eqn, [part])[0]
            return dataclasses.replace(part, view=View((*part.view.steps, eqn), part.view.shape, eqn.outvars[0].aval.dtype))

        return Joined([cast(part) for part in self.parts], self.axis)


@dataclasses.dataclass
class Tracer:
    """Evaluates a loss of one example with ops in place of the equations that read parameters.

    `copied` are the parameters that are copied for each example from the start, `shared` those with several readers, whose norm cannot be
    computed from kept gradients, `parted` those whose readers read separate parts, and `readers` are ordered by parameter and place.
    """

    session: ProbeSession
    tick: Any
    copied: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    parted: frozenset[str] = frozenset()
    readers: dict[str, dict[tuple, Reader]] = dataclasses.field(default_factory=dict)
    at: list[int] = dataclasses.field(default_factory=list)

    def run(self, jaxpr: core.Jaxpr, consts: Any, arguments: list[Any]) -> list[Any]:
        """Returns the outputs of `jaxpr`, with ops in place of the equations that read parameters."""
        values: dict[core.Var, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))
        for place, eqn in enumerate(jaxpr.eqns):
            given = [var.val if isinstance(var, core.Literal) else values[var] for var in eqn.invars]
            self.at.append(place)
            with eqn.ctx.manager:
                values.update(zip(eqn.outvars, self._equation(eqn, given), strict=True))
            self.at.pop()
        return [var.val if isinstance(var, core.Literal) else values[var] for var in jaxpr.outvars]

    def parameter(self, path: str, value: Any) -> Any:
        """Returns `value` as a followed parameter, or as a copy for each example if `path` is in `copied`."""
        view = View((), value.shape, value.dtype)
        return self._copy(Followed(value, path, view), "copies") if path in self.copied else Followed(value, path, view)

    def plain(self, value: Any, primitive: str) -> Any:
        """Returns `value` itself, or a copy for each example if it is a parameter that is still followed."""
        if isinstance(value, Joined):
            return jax.lax.concatenate(self._by_part(value, lambda part: self.plain(part, primitive)), value.axis)
        if not isinstance(value, Followed):
            return value
        route = "elementwise" if primitive in {p.name for p in ELEMENTWISE} else "copies"
        self._read(value, Reader(route, primitive, value.is_repeated, False))
        return self._copy(value, route)

    def _by_part(self, value: Joined, run: Callable[[Any], Any]) -> list[Any]:
        """Returns `run` of each part; two parts of one parameter have different places."""
        results = []
        for number, part in enumerate(value.parts):
            self.at.append(number)
            results.append(run(part))
            self.at.pop()
        return results

    def _copy(self, value: Followed, route: Route) -> Any:
        outputs = jax.ShapeDtypeStruct(value.view.shape, value.view.dtype)
        return self._bind(Copied(value.view, name=route), value, "parameter", (), outputs)

    def _read(self, value: Followed, reader: Reader) -> None:
        # By place: the body of a loop is traced again where its types settle.
        self.readers.setdefault(value.path, {})[tuple(self.at), value.view] = reader

    def _bind(self, op: Op, value: Followed, leaf: str, inputs: tuple, outputs: Any) -> Any:
        settings = {"op": op, "leaf": leaf, "path": value.path, "session": self.session, "outputs": (outputs,)}
        return one_p.bind(value.value, *inputs, self.tick, **settings)[0]

    def _equation(self, eqn: Any, given: list[Any]) -> list[Any]:
        followed = [value for value in given if isinstance(value, Followed | Joined)]
        if not followed:
            return evaluated(eqn, given)
        if any(isinstance(value, Joined) for value in followed):
            return self._of_joined(eqn, given)
        if eqn.primitive is primitives.concatenate_p and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
            return [Joined(given, eqn.params["dimension"])]
        if eqn.primitive is primitives.stop_gradient_p:
            return [given[0].view(eqn.primitive.bind(given[0].value))]
        if eqn.primitive in VIEWS and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
            return [dataclasses.replace(given[0], view=given[0].view.then(eqn))]
        if eqn.primitive.name == "split":
            return [dataclasses.replace(given[0], view=view) for view in given[0].view.parts(eqn)]
        if eqn.primitive is primitives.dot_general_p and len(followed) == 1 and _is_product(eqn):
            return [self._product(eqn, given)]
        if eqn.primitive is primitives.conv_general_dilated_p and len(followed) == 1 and _is_convolution(eqn, given):
            return [self._convolution(eqn, given)]
        if eqn.primitive is primitives.gather_p and isinstance(given[0], Followed) and is_lookup(eqn, given[0].view):
            return [self._lookup(eqn, given)]
        rebuilt = self._bodies(eqn, given)
        return evaluated(eqn, [self.plain(value, eqn.primitive.name) for value in given]) if rebuilt is None else rebuilt

    def _of_joined(self, eqn: Any, given: list[Any]) -> list[Any]:
        """Evaluates an equation that reads concatenated parameters: a product with each part in turn, or with copies."""
        (first, *_), is_float = given, jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
        if eqn.primitive is primitives.convert_element_type_p and is_float:
            return [first.then(eqn)]
        if eqn.primitive is primitives.dot_general_p and _is_product(eqn):
            place = next(place for place, value in enumerate(given) if isinstance(value, Joined))
            axis, other = _output_axis(eqn, place, given[place].axis), given[1 - place]
            if axis is not None and not isinstance(other, Followed | Joined):

                def of_part(part: Any) -> Any:
                    if isinstance(part, Followed) and 0 in part.view.shape:
                        part = self.plain(part, eqn.primitive.name)
                    pair = [part, other] if place == 0 else [other, part]
                    return self._product(eqn, pair, is_part=True) if isinstance(part, Followed) else evaluated(eqn, pair)[0]

                return [jax.lax.concatenate(self._by_part(given[place], of_part), axis)]
        if eqn.primitive not in (primitives.jit_p, primitives.closed_call_p, primitives.call_p, primitives.scan_p, primitives.remat_p):
            given = [self.plain(value, eqn.primitive.name) if isinstance(value, Joined) else value for value in given]
        rebuilt = self._bodies(eqn, given)
        return evaluated(eqn, [self.plain(value, eqn.primitive.name) for value in given]) if rebuilt is None else rebuilt

    def _product(self, eqn: Any, given: list[Any], is_part: bool = False) -> Any:
        """Evaluates a product with a parameter, which may be a part of the factor that the equation reads."""
        dimensions, is_first = eqn.params["dimension_numbers"], isinstance(given[1], Followed)
        (kernel, x) = (given[1], given[0]) if is_first else (given[0], given[1])
        if not is_first:
            dimensions = tuple(tuple(reversed(pair)) for pair in dimensions)
        settings = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}
        form: norms.Form = "gram" if kernel.path in self.shared else "kept"
        op = Product(kernel.view, _tuples(dimensions), is_first, tuple(settings.items()), form, kernel.path in self.parted)
        view, box = kernel.view, kernel.view.box if op.is_matrix else None
        # Padded to the whole, parts take more products than their copies do, which only a loop makes up for.
        is_matrix = op.is_matrix and len(view.shape) == len(box or ()) and (kernel.is_repeated or view.share == 1)
        self._read(kernel, Reader("product", eqn.primitive.name, kernel.is_repeated, is_matrix, view.share, box))
        outputs = _shape(eqn)
        if is_part:
            outputs = jax.eval_shape(op.one, *(jax.ShapeDtypeStruct(given.shape, given.dtype) for given in (x, kernel.view)))
        return self._bind(op, kernel, "kernel", (x,), outputs)

    def _convolution(self, eqn: Any, given: list[Any]) -> Any:
        x, kernel = given
        self._read(kernel, Reader("convolution", eqn.primitive.name, kernel.is_repeated, not kernel.is_repeated))
        return self._bind(Convolution(kernel.view, tuple(eqn.params.items())), kernel, "kernel", (x,), _shape(eqn))

    def _lookup(self, eqn: Any, given: list[Any]) -> Any:
        table, index = given
        self._read(table, Reader("lookup", eqn.primitive.name, table.is_repeated))
        op = Gathered(table.view, tuple(eqn.params.items()), is_kept=table.path not in self.shared)
        return self._bind(op, table, "table", (index,), _shape(eqn))

    def _bodies(self, eqn: Any, given: list[Any]) -> list[Any] | None:
        """Evaluates the bodies of a call, loop or branch in the same way; returns None for any other equation."""
        if eqn.primitive is primitives.scan_p:
            return self._loop(eqn, given)
        if eqn.primitive is primitives.cond_p:
            return None if "branches_platforms" in eqn.params else self._branches(eqn, given)
        if eqn.primitive in (primitives.jit_p, primitives.closed_call_p, primitives.call_p):
            body = body_of(eqn)
            return self.run(body.jaxpr, body.consts, given)
        if eqn.primitive is primitives.remat_p:
            run = lambda *arrays: self._within(body_of(eqn), given, arrays)  # noqa: E731
            options = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
            return list(jax.checkpoint(run, **options)(*_arrays(given)))
        return None

    def _branches(self, eqn: Any, given: list[Any]) -> list[Any]:
        """Evaluates branches through a primitive of dpx whose batching rule leaves parameters without the example's axis."""
        operands, bodies, consts = given[1:], [], []
        for number, branch in enumerate(eqn.params["branches"]):

            def run(tick: Any, *arrays: Any, branch: Any = branch) -> list[Any]:
                return dataclasses.replace(self, tick=tick)._within(branch, operands, arrays)

            self.at.append(number)
            closed = jax.make_jaxpr(run)(self.tick, *_arrays(operands))
            self.at.pop()
            bodies.append((closed.jaxpr, len(consts)))
            consts += closed.consts
        index = jax.lax.clamp(0, given[0].astype(jnp.int32), len(bodies) - 1)
        return choice_p.bind(index, self.tick, *_arrays(operands), *consts, bodies=tuple(bodies), count=len(operands))

    def _within(self, body: core.ClosedJaxpr, given: list[Any], arrays: Any, changes: list[dict] | None = None) -> list[Any]:
        """Returns the outputs of the body as plain values; `arrays` replace the values of `given`."""
        changed = changes or [{}] * len(given)

        def inside(value: Any, array: Any, change: dict) -> Any:
            if isinstance(value, Joined):
                return Joined([inside(*part, change) for part in zip(value.parts, array, strict=True)], value.axis)
            return dataclasses.replace(value, value=array, **change) if isinstance(value, Followed) else array

        inner = [inside(*each) for each in zip(given, arrays, changed, strict=True)]
        return [self.plain(value, "return") for value in self.run(body.jaxpr, body.consts, inner)]

    def _loop(self, eqn: Any, given: list[Any]) -> list[Any]:
        consts, count = scan_parts(eqn)
        start = consts + count
        body = eqn.params["jaxpr"]
        carry = [self.plain(value, "scan") for value in given[consts:start]]
        along = [value if isinstance(value, Followed) and value.view.is_cast else self.plain(value, "scan") for value in given[start:]]
        inner = [*given[:consts], *carry, *along]
        changes: list[dict] = [{"is_repeated": True} if isinstance(value, Followed | Joined) else {} for value in inner]
        for place, value in enumerate(along, start):
            if isinstance(value, Followed):
                # A view of the whole stack only casts; that of one layer does the same.
                changes[place] = {"view": View(value.view.steps, value.view.shape[1:], value.view.dtype)}

        def round_of(carried: Any, sliced: Any) -> Any:
            arrays = [*_arrays(given[:consts]), *carried, *sliced]
            results = self._within(body, inner, arrays, changes)
            return results[: len(carried)], results[len(carried) :]

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carried, stacked = jax.lax.scan(round_of, carry, _arrays(along), **options)
        return [*carried, *stacked]


def _is_product(eqn: Any) -> bool:
    """Returns whether the equation is a `dot_general` that multiplies floating-point numbers."""
    avals = [var.aval for var in (*eqn.invars, *eqn.outvars)]
    return all(aval.size and jnp.issubdtype(aval.dtype, jnp.floating) for aval in avals)


def _output_axis(eqn: Any, place: int, axis: int) -> int | None:
    """Returns the axis of a product that is this axis of its factor number `place`, or None for a contracted or a batch axis."""
    contracted, batch = eqn.params["dimension_numbers"]
    summed = [{*own, *shared} for own, shared in zip(contracted, batch, strict=True)]
    if axis in summed[place]:
        return None
    free = [[other for other in range(var.aval.ndim) if other not in gone] for var, gone in zip(eqn.invars, summed, strict=True)]
    return len(batch[0]) + place * len(free[0]) + free[place].index(axis)


def _is_convolution(eqn: Any, given: list[Any]) -> bool:
    """Returns whether a parameter is the kernel of the convolution, and every number of the output is of one image."""
    return isinstance(given[1], Followed) and eqn.params["batch_group_count"] == 1


def _arrays(given: list[Any]) -> list[Any]:
    return [value.value if isinstance(value, Followed | Joined) else value for value in given]


def _tuples(dimensions: Any) -> Any:
    """Returns the dimensions of (input, kernel) with the contracted axes in the kernel's order: in any order the product is the same."""
    contracted, batch = ([[int(axis) for axis in axes] for axes in pair] for pair in dimensions)
    ordered = sorted(zip(*contracted, strict=True), key=lambda pair: pair[1])
    return tuple(tuple(axes) for axes in zip(*ordered, strict=True)) or ((), ()), tuple(map(tuple, batch))


def _shape(eqn: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype)


one_p = Primitive("dpx_op_of_one_example")
one_p.multiple_results = True


@one_p.def_abstract_eval
def _abstract(*_: Any, outputs: tuple, **__: Any) -> list[Any]:
    return [ShapedArray(leaf.shape, leaf.dtype) for leaf in outputs]


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
    if isinstance(op, (Product, Convolution)):
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


@choice_p.def_abstract_eval
def _of_any(*_: Any, bodies: tuple, count: int) -> list[Any]:
    return [ShapedArray(var.aval.shape, var.aval.dtype) for var in bodies[0][0].outvars]


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
