"""Who reads which parameter: a walk over the traced loss, before anything is computed.

Values of parameters are followed through calls, loops over stacked layers, branches, remat and indexing of a stack. An op that meets
them is a site; anything else that reads one is refused by name, since its part of the gradient would not be in the norm.

B: examples, U: units.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from dpx.clipping.probes import ELSEWHERE, Op, op_p
from dpx.declaration import Refused


class Layer(NamedTuple):
    """A leading axis of a parameter that a loop runs along; `depth` counts the loops around, the outermost is 0."""

    depth: int


@dataclasses.dataclass(frozen=True)
class Reference:
    """A parameter, or a part of it: what was taken of its leading axes, an index or a loop. `cut`: an index not yet squeezed."""

    path: str
    taken: tuple[int | Layer, ...] = ()
    cut: int | None = None

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(entry for entry in self.taken if isinstance(entry, int))

    @property
    def depths(self) -> tuple[int, ...]:
        """The loops that run along it; in any other around it, it is used in every round."""
        return tuple(entry.depth for entry in self.taken if isinstance(entry, Layer))

    def of(self, parameter: Any) -> Any:
        """The part of the whole parameter: indices taken, axes of loops still in front."""
        return parameter[tuple(slice(None) if isinstance(entry, Layer) else entry for entry in self.taken)]


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """An op at one place of the program. `leaves`: what each is, None for one that is not trained; `loops`: lengths of those around.

    `shapes`: of the leaves as the op sees them; `record`: its shapes, the loops' axes first. `is_narrow`: whether the op rounds to less
    than float32 anywhere on its way, though its record may be wide.
    """

    op: Op
    shapes: Any
    leaves: tuple[Reference | None, ...]
    loops: tuple[int, ...]
    record: Any
    is_narrow: bool


# What stands at an equation that matters: a site, or the scopes of its bodies, by the equation's place.
Scope = dict[int, Any]
Labels = dict[core.Var, Reference]


@dataclasses.dataclass
class _Walk:
    examples: int
    units: int
    sites: list[Site] = dataclasses.field(default_factory=list)
    # Computed from a parameter, and from the batch.
    derived: set[core.Var] = dataclasses.field(default_factory=set)
    data: set[core.Var] = dataclasses.field(default_factory=set)

    def over(self, jaxpr: core.Jaxpr, labels: Labels, loops: tuple[int, ...]) -> Scope:
        scope: Scope = {}
        for place, eqn in enumerate(jaxpr.eqns):
            before = len(self.sites)
            found = self._equation(eqn, labels, loops)
            if found is not None and len(self.sites) > before:
                scope[place] = found
            self._spread(eqn, len(self.sites) > before)
        return scope

    def _equation(self, eqn: Any, labels: Labels, loops: tuple[int, ...]) -> Any:
        held = [_label(var, labels) for var in eqn.invars]
        if eqn.primitive is primitives.cond_p and self._is(eqn.invars[0], self.data):
            raise Refused("a branch in the loss", "is chosen for all examples by the data of some", "Use jnp.where, example by example")
        if eqn.primitive is op_p:
            return self._site(eqn, held, loops)
        bodies = bodies_of(eqn)
        if bodies is not None:
            return self._bodies(eqn, bodies, held, labels, loops)
        self._pass_on(eqn, held, labels)
        return None

    def _bodies(self, eqn: Any, bodies: list[core.Jaxpr], held: list, labels: Labels, loops: tuple[int, ...]) -> list[Scope]:
        is_scan = eqn.primitive is primitives.scan_p
        first = 1 if eqn.primitive is primitives.cond_p else 0
        if is_scan:
            held = _in_loop(eqn, held, len(loops))
            loops = (*loops, eqn.params["length"])
        scopes = []
        for body in bodies:
            given = list(zip(body.invars, eqn.invars[first:], held[first:], strict=True))
            for kind in (self.derived, self.data):
                kind.update(inner for inner, outer, _ in given if self._is(outer, kind))
            if is_scan:
                _spread_carry(eqn, body, self.derived, is_from_ops=True)
                _spread_carry(eqn, body, self.data, is_from_ops=False)
            within = {inner: label for inner, _, label in given if label is not None}
            scopes.append(self.over(body, within, loops))
            for var in body.outvars:
                reference = _label(var, within)
                if reference is not None:
                    raise Refused(reference.path, f"is returned by the body of a {eqn.primitive.name}", ELSEWHERE)
        return scopes

    def _site(self, eqn: Any, held: list[Reference | None], loops: tuple[int, ...]) -> Site:
        op, (values, inputs) = eqn.params["op"], jax.tree.unflatten(eqn.params["tree"], [_shape(var) for var in eqn.invars])
        count = len(jax.tree.leaves(values))
        for reference, var, named in zip(held[:count], eqn.invars, eqn.params["named"], strict=False):
            if (reference.path if reference else None) != named or (reference and reference.cut is not None):
                changed = named or (reference.path if reference else "")
                raise Refused(changed, f"is changed on its way to op {op.name}", f"Give the op the parameter itself. {ELSEWHERE}")
            if reference is None and self._is(var, self.derived):
                reason = "has a leaf that is computed from parameters, whose gradient it would cut off"
                raise Refused(f"op {op.name}", reason, ELSEWHERE)
        for reference in held[count:]:
            if reference is not None:
                raise Refused(reference.path, f"is an input of op {op.name}, not one of its parameters", ELSEWHERE)
        for leaf in jax.tree.leaves(inputs):
            if leaf.shape[:1] != (self.examples,):
                reason = f"has an input {leaf.shape} whose leading axis is not the {self.examples} examples"
                raise Refused(f"op {op.name}", reason, "Keep the example axis first")
        site = _made(op, values, inputs, tuple(held[:count]), loops, self.units)
        self.sites.append(site)
        return site

    def _pass_on(self, eqn: Any, held: list[Reference | None], labels: Labels) -> None:
        """One index of a stack is followed; any other reader is refused, but for one that stops its gradient."""
        reference = next((label for label in held if label is not None), None)
        if reference is None or eqn.primitive is primitives.stop_gradient_p:
            return
        part = _indexed(eqn, reference)
        if part is None:
            raise Refused(reference.path, f"is used outside any op, by {eqn.primitive.name}, so its gradient there is unknown", ELSEWHERE)
        labels[eqn.outvars[0]] = part

    def _spread(self, eqn: Any, has_site: bool) -> None:
        if has_site or any(self._is(var, self.derived) for var in eqn.invars):
            self.derived.update(eqn.outvars)
        if any(self._is(var, self.data) for var in eqn.invars):
            self.data.update(eqn.outvars)

    def _is(self, var: Any, kind: set[core.Var]) -> bool:
        return isinstance(var, core.Var) and var in kind


def walk(jaxpr: core.Jaxpr, paths: Sequence[str], data: Sequence[core.Var], examples: int, units: int) -> tuple[Scope, list[Site]]:
    """Where the ops of a loss stand, whose first inputs are the parameters `paths`, and what each reads.

    Raises `Refused`, naming the parameter and what reads it.
    """
    found = _Walk(examples, units, data=set(data))
    labels = {var: Reference(path) for var, path in zip(jaxpr.invars, paths, strict=False)}
    scope = found.over(jaxpr, labels, ())
    for out in jaxpr.outvars:
        reference = _label(out, labels)
        if reference is not None:
            raise Refused(reference.path, "is returned by the loss as it is", "Return what is computed of examples")
    return scope, found.sites


def bodies_of(eqn: Any) -> list[core.Jaxpr] | None:
    """The bodies of a call, loop, branch or remat that ops may stand in, whose inputs are the equation's last ones; else None."""
    if eqn.primitive is primitives.cond_p and "branches_platforms" not in eqn.params:
        return [branch.jaxpr for branch in eqn.params["branches"]]
    if eqn.primitive in (primitives.jit_p, primitives.scan_p, primitives.remat_p, primitives.closed_call_p, primitives.call_p):
        body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        return [body.jaxpr if isinstance(body, core.ClosedJaxpr) else body]
    return None


def _spread_carry(eqn: Any, body: core.Jaxpr, kind: set[core.Var], is_from_ops: bool) -> None:
    """Adds to `kind` what a loop carries that comes from it, in this round or the next."""
    consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
    carried = list(zip(body.invars[consts : consts + carry], body.outvars[:carry], strict=True))
    while True:
        reached = set(kind)
        for inner in body.eqns:
            if any(isinstance(var, core.Var) and var in reached for var in inner.invars) or (is_from_ops and _holds_op(inner)):
                reached.update(inner.outvars)
        found = {start for start, end in carried if isinstance(end, core.Var) and end in reached} - kind
        if not found:
            return
        kind.update(found)


def _holds_op(eqn: Any) -> bool:
    return eqn.primitive is op_p or any(any(map(_holds_op, body.eqns)) for body in bodies_of(eqn) or [])


def _label(var: Any, labels: Labels) -> Reference | None:
    return labels.get(var) if isinstance(var, core.Var) else None


def _shape(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def _in_loop(eqn: Any, held: list[Reference | None], depth: int) -> list[Reference | None]:
    consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
    for reference in held[consts : consts + carry]:
        if reference is not None:
            raise Refused(reference.path, "is carried from round to round of a loop", "Close over it, or scan along its layers")
    if any(reference is not None and reference.cut is not None for reference in held):
        raise Refused(next(label.path for label in held if label), "is sliced before a loop over it", ELSEWHERE)
    layers = [label and dataclasses.replace(label, taken=(*label.taken, Layer(depth))) for label in held[consts + carry :]]
    return [*held[: consts + carry], *layers]


def _indexed(eqn: Any, reference: Reference) -> Reference | None:
    """The layer that a constant index takes of a stack: a slice of length one, then a squeeze."""
    shape = eqn.invars[0].aval.shape
    if eqn.primitive is primitives.slice_p and reference.cut is None and shape:
        starts, limits, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
        whole = starts[1:] == (0,) * (len(shape) - 1) and limits[1:] == shape[1:] and not (strides and set(strides) != {1})
        return dataclasses.replace(reference, cut=starts[0]) if whole and limits[0] - starts[0] == 1 else None
    if eqn.primitive is primitives.squeeze_p and reference.cut is not None and eqn.params["dimensions"] == (0,):
        return Reference(reference.path, (*reference.taken, reference.cut))
    return None


def has_narrow(jaxpr: core.Jaxpr) -> bool:
    """Whether any equation gives floats of less than 32 bits."""
    return any(
        any(_is_narrow(getattr(out.aval, "dtype", int)) for out in eqn.outvars) or any(map(has_narrow, bodies_of(eqn) or []))
        for eqn in jaxpr.eqns
    )


def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _made(op: Op, values: Any, inputs: tuple, leaves: tuple[Reference | None, ...], loops: tuple[int, ...], units: int) -> Site:
    def record_of(values, inputs):
        outputs, residuals = op.forward(values, inputs)
        return *op.input_cotangent(values, residuals, jax.tree.map(jnp.zeros_like, outputs)), (outputs, residuals)

    cotangents, one, on_the_way = jax.eval_shape(record_of, values, inputs)
    for given, back in zip(inputs, cotangents, strict=True):
        if back is not None and any(x.shape != y.shape for x, y in zip(*map(jax.tree.leaves, (given, back)), strict=True)):
            raise Refused(f"op {op.name}", f"has a cotangent of another shape than its input {given.shape}", "Give parameters its shape")
    if not jax.tree.leaves(one) or not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(one)):
        raise Refused(f"op {op.name}", "keeps a record that is not of floating arrays", "Keep arrays; integers as float32")
    squares = jax.eval_shape(op.squared_norm, values, one)
    if not isinstance(squares, tuple):
        raise Refused(f"op {op.name}", "gives squared norms that are not a tuple", "Give a tuple, one array a part")
    shape = (jax.tree.leaves(values)[0].shape[0], units) if op.stacked else (units,)
    if len(squares) != op.parts or any(square.shape != shape for square in squares):
        reason = f"gives squared norms {[square.shape for square in squares]} for {op.parts} parts of {units} units"
        raise Refused(f"op {op.name}", reason, "Give each part one number an example")
    weights = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for _ in squares)
    summed = jax.eval_shape(op.weighted_sum, values, one, weights)
    if jax.tree.structure(summed) != jax.tree.structure(values):
        raise Refused(f"op {op.name}", "gives sums for other leaves than it has", "Give each leaf its sum, and nothing else")
    for leaf, total, reference in zip(jax.tree.leaves(values), jax.tree.leaves(summed), leaves, strict=True):
        if leaf.shape != total.shape:
            reason = f"has shape {leaf.shape} where op {op.name} has a gradient {total.shape} for it"
            raise Refused(reference.path if reference else "a leaf", reason, "Give the parameter the shape it is used in")
    record = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*loops, *leaf.shape), leaf.dtype), one)
    is_narrow = any(_is_narrow(leaf.dtype) for leaf in jax.tree.leaves((inputs, one, on_the_way)))
    return Site(op, values, leaves, loops, record, is_narrow)
