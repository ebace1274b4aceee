"""Computes clipped gradients of a loss of one example, in any JAX code.

The loss is traced for one example. Where a parameter meets a product or a lookup, that equation becomes an op (reader_ops.py); any
other reader gets a copy of the parameter for each example, whose gradient autodiff forms (mapped.py). Then the whole is mapped over
examples by `jax.vmap`: the loss never sees the example's axis, so nothing of one example can be in the row of another.

B: examples.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import primitives

from dpx.clipping import mapped, norms
from dpx.clipping.mapped import Alike, Copied, Gathered, choice_p, is_lookup, one_p
from dpx.clipping.op import Op, ProbeSession, evaluated
from dpx.clipping.reader_ops import VIEWS, Box, Convolution, PartOfProduct, Product, View
from dpx.clipping.readers import body_of, scan_parts

Route = Literal["product", "convolution", "lookup", "elementwise", "copies"]

# Readers that need every number of a parameter once: a copy for each example is at most as large as the gradient that must be formed.
ELEMENTWISE = (primitives.add_p, primitives.sub_p, primitives.mul_p, primitives.broadcast_in_dim_p)


@dataclasses.dataclass(frozen=True)
class Reader:
    """One operation that reads a parameter: its route and primitive, and whether a loop runs it in each round.

    `box` is the part that a product reads as a matrix. `is_matrix` says whether products between positions join the reader's gradient with
    those of others, and `is_part` whether it is a product, from whose factors the gradient of the parameter can be formed. `copied` is
    the size of the copies that all rounds of another reader make, beside the parameter's. `layers` counts loops along the parameter.
    """

    route: Route
    primitive: str
    is_repeated: bool
    is_matrix: bool = True
    is_part: bool = False
    copied: float = 0.0
    box: Box | None = None
    layers: int = 0


@dataclasses.dataclass
class Followed:
    """A parameter, or one layer of it, with the view of it that the equations so far have taken.

    `starts` is the place of a slice that is computed, along each axis.
    """

    value: Any
    path: str
    view: View
    is_repeated: bool = False
    layers: int = 0
    starts: tuple[Any, ...] = ()


@dataclasses.dataclass
class Joined:
    """Arrays and followed parameters that are concatenated along an axis, such as the kernels of a recurrent cell's gates."""

    parts: list[Any]
    axis: int

    @property
    def value(self) -> Any:
        """Returns the values of the parts."""
        return _arrays(self.parts)


@dataclasses.dataclass
class Evaluation:
    """Evaluates a loss of one example with ops in place of the equations that read parameters.

    `copied` are the parameters that are copied for each example from the start, `shared` those with several readers, whose norm cannot be
    computed from kept gradients, `parted` those whose readers read separate parts, and `joined` those whose gradient is formed from the
    parts of all readers. A loop along one of `by_round` reads it by the number of the round, since others read it in another way.
    `readers` are ordered by parameter and place; `rounds` counts those of the loops around.
    """

    session: ProbeSession
    tick: Any
    copied: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    parted: frozenset[str] = frozenset()
    joined: frozenset[str] = frozenset()
    by_round: frozenset[str] = frozenset()
    rounds: int = 1
    readers: dict[str, dict[tuple, Reader]] = dataclasses.field(default_factory=dict)
    at: list[int] = dataclasses.field(default_factory=list)

    def run(self, jaxpr: core.Jaxpr, consts: Any, arguments: list[Any]) -> list[Any]:
        """Returns the outputs of `jaxpr`, with ops in place of the equations that read parameters."""
        constants = [Alike(lambda const=const: const) for const in consts]
        values: dict[core.Var, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))
        for place, eqn in enumerate(jaxpr.eqns):
            given = [_read(var, values) for var in eqn.invars]
            self.at.append(place)
            with eqn.ctx.manager:
                values.update(zip(eqn.outvars, self._equation(eqn, given), strict=True))
            self.at.pop()
        return [_read(var, values) for var in jaxpr.outvars]

    def parameter(self, path: str, value: Any) -> Any:
        """Returns `value` as a followed parameter, or as a copy for each example if `path` is in `copied`."""
        view = View((), value.shape, value.dtype)
        return self._copy(Followed(value, path, view), "copies") if path in self.copied else Followed(value, path, view)

    def plain(self, value: Any, primitive: str) -> Any:
        """Returns `value` as an array, which is a copy for each example if it is a parameter that is still followed."""
        if isinstance(value, Joined):
            parts = []
            for number, part in enumerate(value.parts):
                # Two parts of one parameter have different places.
                self.at.append(number)
                parts.append(self.plain(part, primitive))
                self.at.pop()
            return jax.lax.concatenate(parts, value.axis)
        return mapped.plain(self._copied(value, primitive))

    def _copied(self, value: Any, primitive: str) -> Any:
        """Returns `value` itself, or a copy for each example if it is a parameter that is still followed."""
        if isinstance(value, Joined):
            return self.plain(value, primitive)
        if not isinstance(value, Followed):
            return value
        if value.starts:
            whole = self._copied(dataclasses.replace(value, view=value.view.before, starts=()), primitive)
            part = lambda whole, *at: value.view.after(jax.lax.dynamic_slice(whole, at, value.view.taken.shape))  # noqa: E731
            return mapped.taken(part, [whole, *value.starts], self.tick)
        route = "elementwise" if primitive in {p.name for p in ELEMENTWISE} else "copies"
        copied = self.rounds * value.view.share
        self._read(value, Reader(route, primitive, value.is_repeated, False, copied=copied, layers=value.layers))
        return self._copy(value, route)

    def _copy(self, value: Followed, route: Route) -> Alike:
        outputs = jax.ShapeDtypeStruct(value.view.shape, value.view.dtype)
        copy = self._bind(Copied(value.view, value.is_repeated, name=route), value, "parameter", (), outputs)
        return Alike(lambda: value.view(primitives.stop_gradient_p.bind(value.value)), copy)

    def _read(self, value: Followed, reader: Reader) -> None:
        # By place: the body of a loop is traced again where its types settle.
        self.readers.setdefault(value.path, {})[tuple(self.at), value.view] = reader

    def _bind(self, op: Op, value: Followed, leaf: str, inputs: tuple, outputs: Any) -> Any:
        settings = {"op": op, "leaf": leaf, "path": value.path, "session": self.session, "outputs": (outputs,)}
        return one_p.bind(value.value, *inputs, self.tick, **settings)[0]

    def _equation(self, eqn: Any, given: list[Any]) -> list[Any]:
        followed = [value for value in given if isinstance(value, Followed | Joined)]
        if not followed:
            has_copies = any(isinstance(value, Alike) and value.copy is not None for value in given)
            rebuilt = self._bodies(eqn, given) if has_copies else None
            return mapped.results(eqn, given, self.tick) if rebuilt is None else rebuilt
        whole, given = given, [mapped.plain(value) for value in given]
        is_float = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating) if eqn.outvars else False
        if any(isinstance(value, Joined) for value in followed):
            return self._of_joined(eqn, given)
        if eqn.primitive is primitives.concatenate_p and is_float:
            return [Joined(given, eqn.params["dimension"])]
        if eqn.primitive.name == "stack" and is_float:
            return [Joined([_with_axis(value, eqn.params["axis"]) for value in given], eqn.params["axis"])]
        if eqn.primitive is primitives.stop_gradient_p:
            return [given[0].view(eqn.primitive.bind(given[0].value))]
        if eqn.primitive in VIEWS and is_float:
            return [dataclasses.replace(given[0], view=given[0].view.then(eqn))]
        if eqn.primitive.name == "split":
            return [dataclasses.replace(given[0], view=view) for view in given[0].view.parts(eqn)]
        is_of_rounds = isinstance(given[0], Followed) and given[0].is_repeated and not given[0].starts
        if eqn.primitive is primitives.dynamic_slice_p and is_of_rounds and is_float:
            return [dataclasses.replace(given[0], view=given[0].view.then(eqn), starts=tuple(given[1:]))]
        if eqn.primitive is primitives.dot_general_p and len(followed) == 1 and _is_product(eqn):
            return [self._product(eqn, given)]
        is_kernel = eqn.primitive is primitives.conv_general_dilated_p and isinstance(given[1], Followed)
        # In one group of images every number of the output is of one image.
        if is_kernel and len(followed) == 1 and eqn.params["batch_group_count"] == 1:
            x, kernel = given
            if kernel.starts:
                return evaluated(eqn, [x, self.plain(kernel, eqn.primitive.name)])
            self._read(kernel, Reader("convolution", eqn.primitive.name, kernel.is_repeated, not kernel.is_repeated, layers=kernel.layers))
            return [self._bind(Convolution(kernel.view, tuple(eqn.params.items())), kernel, "kernel", (x,), _shape(eqn))]
        if eqn.primitive is primitives.gather_p and isinstance(given[0], Followed) and is_lookup(eqn, given[0].view):
            table, index = given
            self._read(table, Reader("lookup", eqn.primitive.name, table.is_repeated, layers=table.layers))
            op = Gathered(table.view, tuple(eqn.params.items()), is_kept=table.path not in self.shared)
            return [self._bind(op, table, "table", (index,), _shape(eqn))]
        return self._by_bodies_or_copies(eqn, whole)

    def _by_bodies_or_copies(self, eqn: Any, given: list[Any]) -> list[Any]:
        rebuilt = self._bodies(eqn, given)
        if rebuilt is not None:
            return rebuilt
        return mapped.results(eqn, [self._copied(value, eqn.primitive.name) for value in given], self.tick)

    def _of_joined(self, eqn: Any, given: list[Any]) -> list[Any]:
        """Evaluates an equation that reads concatenated parameters: a product with each part in turn, or with copies."""
        (first, *_), is_float = given, jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
        if eqn.primitive is primitives.convert_element_type_p and is_float:
            dtype = eqn.outvars[0].aval.dtype
            parts = [
                dataclasses.replace(part, view=View((*part.view.steps, eqn), part.view.shape, dtype))
                if isinstance(part, Followed)
                else evaluated(eqn, [part])[0]
                for part in first.parts
            ]
            return [Joined(parts, first.axis)]
        if eqn.primitive is primitives.dot_general_p and _is_product(eqn):
            place = next(place for place, value in enumerate(given) if isinstance(value, Joined))
            # The axis of the other factor that meets the concatenated one, if one does, and whether products add it up.
            axis, pairs = given[place].axis, zip(eqn.params["dimension_numbers"], (True, False), strict=True)
            met = [(pair[1 - place][pair[place].index(axis)], is_added) for pair, is_added in pairs if axis in pair[place]]
            cut, is_added = met[0] if met else (None, False)
            # Sums of parts would be rounded to a narrow type once more for each part.
            if not isinstance(given[1 - place], Followed | Joined) and not (is_added and eqn.outvars[0].aval.dtype.itemsize < 4):
                return [self._product_of_joined(eqn, given, place, cut)]
        if eqn.primitive not in (primitives.jit_p, primitives.closed_call_p, primitives.call_p, primitives.scan_p, primitives.remat_p):
            given = [self.plain(value, eqn.primitive.name) if isinstance(value, Joined) else value for value in given]
        return self._by_bodies_or_copies(eqn, given)

    def _product_of_joined(self, eqn: Any, given: list[Any], place: int, cut: int | None) -> Any:
        """Evaluates a product with concatenated parameters part by part; the other factor is cut along `cut`, if it shares that axis."""
        joined, other, start, results = given[place], given[1 - place], 0, []
        for number, part in enumerate(joined.parts):
            size = (part.view if isinstance(part, Followed) else part).shape[joined.axis]
            x = other if cut is None else jax.lax.slice_in_dim(other, start, start + size, axis=cut)
            start += size
            pair = [part, x] if place == 0 else [x, part]
            self.at.append(number)
            if isinstance(part, Followed) and 0 not in part.view.shape:
                results.append(self._product(eqn, pair, is_part=True))
            else:
                results += evaluated(eqn, [self.plain(value, eqn.primitive.name) for value in pair])
            self.at.pop()
        contracted, batch = eqn.params["dimension_numbers"]
        if joined.axis in contracted[place]:
            return sum(results[1:], results[0])
        # The axis of the output that is this axis of the factor.
        if joined.axis in batch[place]:
            return jax.lax.concatenate(results, batch[place].index(joined.axis))
        gone = [{*own, *shared} for own, shared in zip(contracted, batch, strict=True)]
        free = [[axis for axis in range(var.aval.ndim) if axis not in own] for var, own in zip(eqn.invars, gone, strict=True)]
        return jax.lax.concatenate(results, len(batch[0]) + place * len(free[0]) + free[place].index(joined.axis))

    def _product(self, eqn: Any, given: list[Any], is_part: bool = False) -> Any:
        """Evaluates a product with a parameter, which may be a part of the factor that the equation reads."""
        dimensions, is_first = eqn.params["dimension_numbers"], isinstance(given[1], Followed)
        (kernel, x) = (given[1], given[0]) if is_first else (given[0], given[1])
        if not is_first:
            dimensions = tuple(tuple(reversed(pair)) for pair in dimensions)
        settings = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}
        # With the contracted axes in the kernel's order: in any order the product is the same.
        contracted, batch = ([[int(axis) for axis in axes] for axes in pair] for pair in dimensions)
        ordered = sorted(zip(*contracted, strict=True), key=lambda pair: pair[1])
        dimensions = tuple(tuple(axes) for axes in zip(*ordered, strict=True)) or ((), ()), tuple(map(tuple, batch))
        view = kernel.view
        if kernel.path in self.joined or kernel.starts:
            op = PartOfProduct(view, dimensions, is_first, tuple(settings.items()), "recomputed")
        else:
            form: norms.Form = "gram" if kernel.path in self.shared else "kept"
            op = Product(view, dimensions, is_first, tuple(settings.items()), form, kernel.path in self.parted)
        box = view.box if op.is_matrix else None
        is_matrix = op.is_matrix and len(view.shape) == len(box or ()) and view.share == 1
        self._read(kernel, Reader("product", eqn.primitive.name, kernel.is_repeated, is_matrix, True, box=box, layers=kernel.layers))
        outputs = _shape(eqn)
        if is_part:
            outputs = jax.eval_shape(op.one, *(jax.ShapeDtypeStruct(given.shape, given.dtype) for given in (x, kernel.view)))
        starts = tuple(jnp.asarray(start, jnp.int32) for start in kernel.starts)
        return self._bind(op, kernel, "kernel", (x, *starts), outputs)

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
        index, *operands = [mapped.plain(value) for value in given]
        bodies, consts = [], []
        for number, branch in enumerate(eqn.params["branches"]):

            def run(tick: Any, *arrays: Any, branch: Any = branch) -> list[Any]:
                return dataclasses.replace(self, tick=tick)._within(branch, operands, arrays)

            self.at.append(number)
            closed = jax.make_jaxpr(run)(self.tick, *_arrays(operands))
            self.at.pop()
            bodies.append((closed.jaxpr, len(consts)))
            consts += closed.consts
        index = jax.lax.clamp(0, index.astype(jnp.int32), len(bodies) - 1)
        return choice_p.bind(index, self.tick, *_arrays(operands), *consts, bodies=tuple(bodies), count=len(operands))

    def _within(self, body: core.ClosedJaxpr, given: list[Any], arrays: Any, changes: list[dict] | None = None) -> list[Any]:
        """Returns the outputs of the body as plain values; `arrays` replace the values of `given`."""
        changed = changes or [{}] * len(given)

        def inside(value: Any, array: Any, change: dict) -> Any:
            if isinstance(value, Joined):
                return Joined([inside(*part, change) for part in zip(value.parts, array, strict=True)], value.axis)
            if isinstance(value, Alike):
                return Alike(lambda: array[0], array[1])
            return dataclasses.replace(value, value=array, **change) if isinstance(value, Followed) else array

        inner = [inside(*each) for each in zip(given, arrays, changed, strict=True)]
        return [self.plain(value, "return") for value in self.run(body.jaxpr, body.consts, inner)]

    def _loop(self, eqn: Any, given: list[Any]) -> list[Any]:
        consts, count = scan_parts(eqn)
        start = consts + count
        body = eqn.params["jaxpr"]
        is_alike = mapped.carried(body.jaxpr, given, consts, count)
        carry = [self.plain(value, "scan") for value in given[consts:start]]
        # Whether the loop reads a parameter, along which it runs, by the number of the round.
        is_by_round = [
            isinstance(value, Followed)
            and not value.starts
            and value.view.shape[0] > 0
            and (not value.view.is_cast or value.path in self.by_round)
            for value in given[start:]
        ]
        along = [
            value if isinstance(value, Followed) and (by_round or value.view.is_cast and not value.starts) else self._copied(value, "scan")
            for value, by_round in zip(given[start:], is_by_round, strict=True)
        ]
        inner = [
            *given[:consts],
            *(given[consts + at] if own else value for at, (value, own) in enumerate(zip(carry, is_alike, strict=True))),
            *along,
        ]
        changes: list[dict] = [{"is_repeated": True} if isinstance(value, Followed | Joined) else {} for value in inner]
        for place, (value, by_round) in enumerate(zip(along, is_by_round, strict=True), start):
            if by_round:
                changes[place]["view"] = value.view.of_round()
            elif isinstance(value, Followed):
                # A view of the whole stack only casts; that of one layer does the same.
                changes[place] = {"view": View(value.view.steps, value.view.shape[1:], value.view.dtype), "layers": value.layers + 1}
        evaluation = dataclasses.replace(self, rounds=self.rounds * max(1, eqn.params["length"]))
        constants = _arrays(given[:consts])

        def round_of(carried: Any, own: Any) -> Any:
            number, sliced = own
            slices = iter(sliced)
            for place, (value, by_round) in enumerate(zip(along, is_by_round, strict=True), start):
                if by_round:
                    changes[place]["starts"] = (number, *[np.int32(0)] * (len(value.view.shape) - 1))
            rest = [value.value if by_round else next(slices) for value, by_round in zip(along, is_by_round, strict=True)]
            held = [(value, None) if own else value for value, own in zip(carried, is_alike, strict=True)]
            results = evaluation._within(body, inner, [*constants, *held, *rest], changes)
            return results[: len(carried)], results[len(carried) :]

        sliced = [array for array, by_round in zip(_arrays(along), is_by_round, strict=True) if not by_round]
        number = jnp.arange(eqn.params["length"], dtype=jnp.int32) if any(is_by_round) else None
        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carried, stacked = jax.lax.scan(round_of, carry, (number, sliced), **options)
        return [*carried, *stacked]


def _with_axis(value: Any, axis: int) -> Any:
    """Returns an array or a followed parameter with one more axis, of length one."""
    if not isinstance(value, Followed):
        return jnp.expand_dims(value, axis)
    shape = (*value.view.shape[:axis], 1, *value.view.shape[axis:])
    cut = jax.make_jaxpr(lambda view: jax.lax.reshape(view, shape))
    (eqn,) = cut(jax.ShapeDtypeStruct(value.view.shape, value.view.dtype)).jaxpr.eqns
    return dataclasses.replace(value, view=value.view.then(eqn))


def _is_product(eqn: Any) -> bool:
    """Returns whether the equation is a `dot_general` that multiplies floating-point numbers."""
    avals = [var.aval for var in (*eqn.invars, *eqn.outvars)]
    return all(aval.size and jnp.issubdtype(aval.dtype, jnp.floating) for aval in avals)


def _arrays(given: list[Any]) -> list[Any]:
    return [
        (value.value, value.copy) if isinstance(value, Alike) else value.value if isinstance(value, Followed | Joined) else value
        for value in given
    ]


def _read(var: Any, values: dict[core.Var, Any]) -> Any:
    return Alike(lambda: var.val) if isinstance(var, core.Literal) else values[var]


def _shape(eqn: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype)
