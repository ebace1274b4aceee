"""Finds the operations that read each parameter, by walks over the traced loss before anything is computed.

Values of parameters are followed through calls, loops over stacked layers, branches, remat and indexing of a stack. An op that reads
them is a site: its leaves, its record, and whether it fulfils the contract of an op. Any other operation that reads a parameter is
refused by name, since its part of the gradient would not be in the norm.

Parameters are in two trees, nested dicts: trained and frozen ones. A loss takes both as one tree; only trained parameters have gradients,
norms and sums. Whether the losses depend on a trained parameter through differentiable operations is found from the traced program and
never from numbers: the first factor of a low-rank adapter has a zero gradient as long as the second factor is zero.

B: examples, U: units.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from dpx.clipping.groups import with_counts
from dpx.clipping.op import ELSEWHERE, Op, leaf_names, op_p, shapes_of
from dpx.declaration import ConfigError, require


class Layer(NamedTuple):
    """A leading axis of a parameter that a loop runs along; `depth` counts the loops around it, from 0 for the outermost."""

    depth: int


@dataclasses.dataclass(frozen=True)
class Reference:
    """A parameter, or a part of it.

    `selected` says what was selected along each of its leading axes, an index or the layers of a loop; `cut` is an index whose axis is not
    squeezed yet. With `is_frozen` it is not trained, so any operation may read it.
    """

    path: str
    selected: tuple[int | Layer, ...] = ()
    cut: int | None = None
    is_frozen: bool = False

    @property
    def indices(self) -> tuple[int, ...]:
        """Returns the constant indices that were selected, without loops."""
        return tuple(entry for entry in self.selected if isinstance(entry, int))

    @property
    def depths(self) -> tuple[int, ...]:
        """Returns the loops that run along its axes; in all other loops around it, it is used in every round."""
        return tuple(entry.depth for entry in self.selected if isinstance(entry, Layer))

    def select(self, parameter: Any) -> Any:
        """Returns the part of the whole parameter: indices are applied, and the axes of loops stay in front."""
        return parameter[tuple(slice(None) if isinstance(entry, Layer) else entry for entry in self.selected)]


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """An op at one place of a traced program.

    `shapes`: its leaves as the op sees them; `leaves`: the parameter that each of them is, None if it is not trained; `loops`: the
    lengths of the loops around it, outermost first; `record`: the shapes of its record, the loops' axes first; `is_narrow`: whether
    the op computes anything in less than float32, even if its record is wider; `values`: the parameters whose values its norms and
    sums need, by leaf.
    """

    op: Op
    shapes: Any
    leaves: tuple[Reference | None, ...]
    loops: tuple[int, ...]
    record: Any
    is_narrow: bool
    values: tuple[Reference | None, ...]

    @property
    def is_trained(self) -> bool:
        """Returns whether any of its leaves is trained."""
        return any(reference is not None for reference in self.leaves)

    @property
    def first(self) -> str:
        """Returns the path of its first parameter."""
        return next(reference.path for reference in self.leaves if reference is not None)

    def over_loops(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns `run` mapped over rounds: it takes what the op leaves in each round, in arrays that have the loops' axes first."""
        for _ in self.loops:
            run = jax.vmap(run)
        return run


def is_narrow(dtype: Any) -> bool:
    """Returns whether the type is a floating-point type narrower than float32."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _check_record(op: Op, values: Any, one: Any, leaves: tuple[Reference | None, ...], units: int) -> None:
    name, is_float = f"op {op.name}", [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(one)]
    reason = "keeps a record that contains other values than floating-point arrays"
    fix = "Keep floating-point arrays; convert integers to float32"
    require(bool(is_float) and all(is_float), name, reason, fix)
    squares, fix = jax.eval_shape(op.squared_norm, values, one), "Give a tuple with one array for each part"
    require(isinstance(squares, tuple), name, "gives squared norms that are not a tuple", fix)
    shape = (jax.tree.leaves(values)[0].shape[0], units) if op.stacked else (units,)
    shapes = [square.shape for part in squares for square in jax.tree.leaves(part)]
    if len(squares) != op.parts or any(own != shape for own in shapes):
        reason = f"gives squared norms {shapes} for {op.parts} parts of {units} units"
        raise ConfigError(name, reason, "Give each part one number for each example")
    weights = (jax.ShapeDtypeStruct(shape, jnp.float32),) * op.parts
    summed = jax.eval_shape(op.weighted_sum, values, one, weights)
    places = [place for place, name in enumerate(leaf_names(values)) if op.trains(name)]
    is_like_leaves = bool(op.frozen) or jax.tree.structure(summed) == jax.tree.structure(values)
    is_own = is_like_leaves and leaf_names(summed) == [leaf_names(values)[place] for place in places]
    require(is_own, name, "gives sums for leaves that are not its own", "Give exactly one sum for each of its leaves")
    for place, total in zip(places, jax.tree.leaves(summed), strict=True):
        leaf, reference = jax.tree.leaves(values)[place], leaves[place]
        if leaf.shape != total.shape:
            reason = f"has shape {leaf.shape}, but op {op.name} gives a gradient of shape {total.shape} for it"
            raise ConfigError(reference.path if reference else "a leaf", reason, "Give the parameter the shape in which the op uses it")


# By an equation's place: the site that it is, or the scopes of its bodies, if there are sites in them.
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
        """Finds the ops in a program and returns their places; `labels` are the parameters that its variables hold."""
        scope: Scope = {}
        for place, eqn in enumerate(jaxpr.eqns):
            before = len(self.sites)
            here = self._equation(eqn, labels, loops)
            has_site = len(self.sites) > before
            if here is not None and has_site:
                scope[place] = here
            if has_site or any(self._is(var, self.derived) for var in eqn.invars):
                self.derived.update(eqn.outvars)
            if any(self._is(var, self.data) for var in eqn.invars):
                self.data.update(eqn.outvars)
        return scope

    def _equation(self, eqn: Any, labels: Labels, loops: tuple[int, ...]) -> Any:
        held = [_label(var, labels) for var in eqn.invars]
        is_choice, fix = eqn.primitive is primitives.cond_p, "Use jnp.where, example by example"
        is_of_data = is_choice and self._is(eqn.invars[0], self.data)
        require(not is_of_data, "a branch in the loss", "is chosen for all examples by the data of some examples", fix)
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
            consts, carry = scan_parts(eqn)
            for reference in map(_trained, held[consts : consts + carry]):
                if reference is not None:
                    fix = "Use it as a constant of the loop, or scan along its layers"
                    raise ConfigError(reference.path, "is carried from one iteration of a loop to the next", fix)
            for reference in map(_trained, held):
                if reference is not None and reference.cut is not None:
                    raise ConfigError(reference.path, "is sliced before a loop over it", ELSEWHERE)
            held = [label if label and label.cut is None else None for label in held]
            depth = Layer(len(loops))
            layers = [label and dataclasses.replace(label, selected=(*label.selected, depth)) for label in held[consts + carry :]]
            held, loops = [*held[:consts], *[None] * carry, *layers], (*loops, eqn.params["length"])
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
                reference = _trained(_label(var, within))
                if reference is not None:
                    raise ConfigError(reference.path, f"is returned by the body of a {eqn.primitive.name}", ELSEWHERE)
        return scopes

    def _site(self, eqn: Any, held: list[Reference | None], loops: tuple[int, ...]) -> Site:
        op, (values, inputs) = (
            eqn.params["op"],
            jax.tree.unflatten(eqn.params["tree"], [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.invars]),
        )
        count, trained = len(jax.tree.leaves(values)), [_trained(reference) for reference in held]
        for reference, var, named in zip(trained[:count], eqn.invars, eqn.params["named"], strict=False):
            if (reference.path if reference else None) != named or (reference and reference.cut is not None):
                changed = named or (reference.path if reference else "")
                raise ConfigError(changed, f"is changed on its way to op {op.name}", f"Give the op the parameter itself. {ELSEWHERE}")
            if reference is None and self._is(var, self.derived):
                reason = "has a leaf that is computed from parameters, and the gradient through this leaf would be lost"
                raise ConfigError(f"op {op.name}", reason, ELSEWHERE)
        for reference in trained[count:]:
            if reference is not None:
                raise ConfigError(reference.path, f"is an input of op {op.name}, not one of its parameters", ELSEWHERE)
        for leaf in jax.tree.leaves(inputs):
            if leaf.shape[:1] != (self.examples,):
                reason = f"has an input {leaf.shape} whose leading axis is not the {self.examples} examples"
                raise ConfigError(f"op {op.name}", reason, "Keep the example axis first")

        def one_round(values: Any, inputs: tuple) -> tuple[tuple, Any, Any]:
            outputs, residuals = op.forward(values, inputs)
            return *op.backward(values, residuals, jax.tree.map(jnp.zeros_like, outputs)), (outputs, residuals)

        cotangents, one, on_the_way = jax.eval_shape(one_round, values, inputs)
        for given, back in zip(inputs, cotangents, strict=True):
            if back is not None and any(x.shape != y.shape for x, y in zip(*map(jax.tree.leaves, (given, back)), strict=True)):
                reason = f"has a cotangent whose shape differs from the shape {given.shape} of its input"
                raise ConfigError(f"op {op.name}", reason, "Give both the same shape")
        leaves, needed = tuple(trained[:count]), _values(op, values, held[:count])
        if any(reference is not None for reference in leaves):
            _check_record(op, values, one, leaves, self.units)
        record = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*loops, *leaf.shape), leaf.dtype), one)
        rounds = any(is_narrow(leaf.dtype) for leaf in jax.tree.leaves((inputs, one, on_the_way)))
        self.sites.append(Site(op, values, leaves, loops, record, rounds, needed))
        return self.sites[-1]

    def _pass_on(self, eqn: Any, held: list[Reference | None], labels: Labels) -> None:
        """Follows one index of a stack and refuses any other reader, except a reader that stops the gradient."""
        known = [label for label in held if label is not None]
        reference = next(filter(_trained, known), known[0] if known else None)
        if reference is None or eqn.primitive is primitives.stop_gradient_p:
            return
        # One layer of a stack by a constant index: a slice of length one, then a squeeze.
        part, shape = None, eqn.invars[0].aval.shape
        if eqn.primitive is primitives.slice_p and reference.cut is None and shape:
            starts, limits, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
            whole = starts[1:] == (0,) * (len(shape) - 1) and limits[1:] == shape[1:] and not (strides and set(strides) != {1})
            part = dataclasses.replace(reference, cut=starts[0]) if whole and limits[0] - starts[0] == 1 else None
        elif eqn.primitive is primitives.squeeze_p and reference.cut is not None and eqn.params["dimensions"] == (0,):
            part = dataclasses.replace(reference, selected=(*reference.selected, reference.cut), cut=None)
        if part is not None:
            labels[eqn.outvars[0]] = part
        elif not reference.is_frozen:
            reason = f"is used outside any op, by {eqn.primitive.name}, so its gradient there is unknown"
            raise ConfigError(reference.path, reason, ELSEWHERE)

    def _is(self, var: Any, kind: set[core.Var]) -> bool:
        return isinstance(var, core.Var) and var in kind


def walk(jaxpr: core.Jaxpr, paths: Sequence[str], frozen: Sequence[str], examples: int, units: int) -> tuple[Scope, list[Site]]:
    """Returns the places of the ops of a loss, and the parameters that each op reads.

    The inputs of the program are the parameters `paths`, the parameters `frozen`, and data.

    Raises `ConfigError`, naming the parameter and what reads it.
    """
    references = [*map(Reference, paths), *(Reference(path, is_frozen=True) for path in frozen)]
    walked = _Walk(examples, units, data=set(jaxpr.invars[len(references) :]))
    labels = dict(zip(jaxpr.invars, references, strict=False))
    scope = walked.over(jaxpr, labels, ())
    for out in jaxpr.outvars:
        reference = _trained(_label(out, labels))
        if reference is not None:
            raise ConfigError(reference.path, "is returned by the loss unchanged", "Return values that are computed from examples")
    return scope, walked.sites


def bodies_of(eqn: Any) -> list[core.Jaxpr] | None:
    """Returns the bodies of a call, loop, branch or remat that may contain ops and whose inputs are the equation's last ones; else None."""
    if eqn.primitive is primitives.cond_p and "branches_platforms" not in eqn.params:
        return [branch.jaxpr for branch in eqn.params["branches"]]
    if eqn.primitive in (primitives.jit_p, primitives.scan_p, primitives.remat_p, primitives.closed_call_p, primitives.call_p):
        return [body_of(eqn).jaxpr]
    return None


def body_of(eqn: Any) -> core.ClosedJaxpr:
    """Returns the one body of a call, loop or remat."""
    # A remaining `custom_vmap` is a call that was not mapped: if its rule ran, the trace holds the rule's result instead.
    body = next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "call") if name in eqn.params)
    return body if isinstance(body, core.ClosedJaxpr) else core.ClosedJaxpr(body, ())


def scan_parts(eqn: Any) -> tuple[int, int]:
    """Returns how many inputs of a scan are constants, and how many are carried; the others are sliced along its rounds."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # From jax 0.11 on, three trees (constants, carried, sliced) replace the numbers.
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def _spread_carry(eqn: Any, body: core.Jaxpr, kind: set[core.Var], is_from_ops: bool) -> None:
    """Adds to `kind` the carried values of a loop that come from it, in this round or the next."""
    consts, carry = scan_parts(eqn)
    carried = list(zip(body.invars[consts : consts + carry], body.outvars[:carry], strict=True))
    while True:
        reached = set(kind)
        for inner in body.eqns:
            if any(isinstance(var, core.Var) and var in reached for var in inner.invars) or (is_from_ops and _holds_op(inner)):
                reached.update(inner.outvars)
        added = {start for start, end in carried if isinstance(end, core.Var) and end in reached} - kind
        if not added:
            return
        kind.update(added)


def _holds_op(eqn: Any) -> bool:
    return eqn.primitive is op_p or any(any(map(_holds_op, body.eqns)) for body in bodies_of(eqn) or [])


def _label(var: Any, labels: Labels) -> Reference | None:
    return labels.get(var) if isinstance(var, core.Var) else None


def _trained(reference: Reference | None) -> Reference | None:
    return None if reference is None or reference.is_frozen else reference


def _values(op: Op, values: Any, held: list[Reference | None]) -> tuple[Reference | None, ...]:
    """Returns, for each leaf, the parameter whose value an op's norms and sums need, or None if they do not need it."""
    references, needed = [], op.values_needed()
    for name, reference in zip(leaf_names(values), held, strict=True):
        is_known = reference is not None and reference.cut is None
        if name in needed and not is_known:
            reason = f"needs the value of {name} again, but this value is neither a parameter nor in frozen"
            raise ConfigError(f"op {op.name}", reason, "Pass it unchanged in frozen")
        references.append(reference if is_known and (_trained(reference) or name in needed) else None)
    return tuple(references)


def has_narrow(jaxpr: core.Jaxpr) -> bool:
    """Returns whether any equation gives floats of less than 32 bits."""
    return any(
        any(is_narrow(getattr(out.aval, "dtype", int)) for out in eqn.outvars) or any(map(has_narrow, bodies_of(eqn) or []))
        for eqn in jaxpr.eqns
    )


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

    try:
        jaxpr = jax.make_jaxpr(lambda *given: with_counts(losses_fn(merged(*given[:2]), given[2]))[0])(params, frozen, batch).jaxpr
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
            bodies = bodies_of(eqn)
            if bodies is None:
                # Of an equation whose bodies cannot be inspected every output may depend on every input.
                inputs = [True] * len(eqn.invars)
            elif eqn.primitive is primitives.scan_p:
                inputs = _settled(bodies[0], *scan_parts(eqn), outputs)
            else:
                before = [False] * (len(eqn.invars) - len(bodies[0].invars))
                inputs = before + _any([_reached(body, outputs) for body in bodies])
            live.update(var for var, is_reached in zip(eqn.invars, inputs, strict=True) if is_reached and _is_floating(var))
    return [var in live for var in jaxpr.invars]


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
