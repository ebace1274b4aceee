"""Holds a traced loss, and evaluates it with every op's backward pass replaced by one that gives what clipping needs.

The loss is traced once. Everything after that evaluates this one program, so the program that was checked is the one that runs.

A record (for example an op's input and its output cotangent) is returned as the cotangent of a dummy input, the tap; a parameter's summed
gradient as the cotangent of a second dummy input, zeros in its shape. So one `vjp` through a loss made of ops yields all of it, and no
Python state outlives a trace.

The backward pass of a loop over layers or time returns, for each op, the activations that it was given. Stacked again, they would be held
twice: `without_copies` leaves out of a loop's stacked outputs what it only passes on.

The program of one example is kept apart from others by `jax.vmap` itself. What is refused there are collectives over an axis that is bound
outside the loss, batching rules from outside jax (`custom_vmap`, a user-defined primitive), host functions that are given all rows at once,
and side effects.

B: examples, U: units.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives
from jax.interpreters import batching
from jaxtyping import Array

from dpx.clipping import norms, readers
from dpx.clipping.groups import check_losses, with_counts
from dpx.clipping.op import ELSEWHERE, Op, Probed, ProbeSession, evaluated, leaf_names, shapes_of, value_of
from dpx.clipping.readers import Scope, Site, scan_parts
from dpx.declaration import ConfigError, require
from dpx.randomness import path_name

COLLECTIVES = frozenset(
    "psum psum_invariant pmax pmin pmean ppermute pbroadcast pgather psend precv all_gather all_gather_invariant all_gather_reduced".split()
    + "all_to_all ragged_all_to_all reduce_scatter psum_scatter unreduced_psum unreduced_reduce_scatter".split()
)
# Effects of a printed value, and of reading an axis: nothing comes back into the loss.
HARMLESS = ("DebugEffect", "OrderedDebugEffect", "NamedAxisEffect")
HOST = ("pure_callback", "ffi_call")

# record: the tap's cotangent is the record. norm: it is the squared norms. weighted: the tap holds weights, and the sums' cotangent is
# the gradient weighted by them, rows of weight zero masked. plain: the sums' alone. through: nothing, for an op that trains nothing.
Pass = Literal["record", "norm", "weighted", "plain", "through"]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_pass(op: Op, kind: Pass, values: Any, inputs: tuple, tap: Any, sums: tuple) -> Any:
    """Returns the op's outputs.

    `sums` has one array for each leaf, or None for a leaf that is not trained or whose sum is not needed.
    """
    return op.outputs(values, inputs)


def _forward(op: Op, kind: Pass, values: Any, inputs: tuple, tap: Any, sums: tuple) -> Any:
    outputs, residuals = op.forward(values, inputs)
    return outputs, (values, residuals, tap if kind == "weighted" else None, tuple(total is not None for total in sums))


def _backward(op: Op, kind: Pass, saved: Any, cotangent: Any) -> Any:
    values, residuals, weights, wanted = saved
    tap = gradient = None
    if kind == "plain":
        inputs, gradient = op.gradient(values, residuals, cotangent)
    else:
        inputs, record = op.backward(values, residuals, cotangent)
        if kind == "record":
            tap = record
        elif kind == "norm":
            tap = squares = op.squared_norm(values, record)
            # No record outlives the pass, so this is the last time to look for what is not finite in it.
            if not op.norm_sees_all:
                is_finite_U = op.is_finite(record, jax.tree.leaves(squares)[0].shape[-1])
                tap = jax.tree.map(lambda square: jnp.where(is_finite_U, square, jnp.nan), squares)
        elif kind == "weighted":
            # Not above zero: a weight may be negative.
            keep_U = jnp.stack([jnp.any(part.reshape(-1, part.shape[-1]) != 0, axis=0) for part in weights]).any(0)
            keep_U = keep_U if op.norm_sees_all else keep_U & op.is_finite(record, keep_U.shape[0])
            gradient = op.masked_sum(values, record, weights, keep_U)
            tap = jax.tree.map(jnp.zeros_like, weights)
    if gradient is None:
        return None, inputs, tap, (None,) * len(wanted)
    sums = zip(by_leaf(op, values, gradient), wanted, strict=True)
    return None, inputs, tap, tuple(leaf if is_wanted else None for leaf, is_wanted in sums)


in_pass.defvjp(_forward, _backward)


def by_leaf(op: Op, leaves: Any, summed: Any) -> list[Any]:
    """Returns an op's sums with one entry for each of its leaves: None for frozen leaves."""
    sums = iter(jax.tree.leaves(summed))
    return [next(sums) if op.trains(name) else None for name in leaf_names(leaves)]


# Operations that only write the same numbers in another shape or order.
_SHAPES = frozenset({"reshape", "transpose", "squeeze", "expand_dims"})


def without_copies(run: Callable[[], Any]) -> Any:
    """Returns the result of `run`, whose loops stack each value once; values that it closes over may be traced."""
    closed, shapes = jax.make_jaxpr(run, return_shape=True)()
    values: dict[core.Var, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    for eqn in closed.jaxpr.eqns:
        with eqn.ctx.manager:
            results = (_stacked_once if eqn.primitive is primitives.scan_p else evaluated)(
                eqn, [value_of(var, values) for var in eqn.invars]
            )
        values.update(zip(eqn.outvars, results, strict=True))
    return jax.tree.unflatten(jax.tree.structure(shapes), [value_of(var, values) for var in closed.jaxpr.outvars])


def _stacked_once(eqn: Any, given: list[Any]) -> list[Any]:
    consts, count = scan_parts(eqn)
    carry, body = consts + count, eqn.params["jaxpr"]
    # By identity: a literal has no hash.
    stacked_inputs = dict(zip(map(id, body.jaxpr.invars[carry:]), given[carry:], strict=True))
    made_by = {var: inner for inner in body.jaxpr.eqns for var in inner.outvars}
    # Each stacked output by the variable whose value it holds, and the operations that give it its shape, in order.
    outputs = []
    for var in body.jaxpr.outvars[count:]:
        shaped_by: list[Any] = []
        while not isinstance(var, core.Literal) and var in made_by and made_by[var].primitive.name in _SHAPES:
            shaped_by.insert(0, made_by[var])
            var = made_by[var].invars[0]
        outputs.append((var, shaped_by))
    stacked = {id(source): source for source, _ in outputs if id(source) not in stacked_inputs}
    run = core.jaxpr_as_fun(core.ClosedJaxpr(body.jaxpr.replace(outvars=[*body.jaxpr.outvars[:count], *stacked.values()]), body.consts))

    def round_of(carried: Any, sliced: Any) -> Any:
        results = run(*given[:consts], *carried, *sliced)
        return results[:count], results[count:]

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carried, values = jax.lax.scan(round_of, given[consts:carry], given[carry:], **options)
    known = stacked_inputs | dict(zip(stacked, values, strict=True))
    results = [*carried]
    for source, shaped_by in outputs:
        result = known[id(source)]
        for inner in shaped_by:
            result = jax.vmap(lambda value, inner=inner: inner.primitive.bind(value, **inner.params))(result)
        results.append(result)
    return results


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The traced program of `losses_fn(params and frozen, batch)`; all its trained parameters go through ops, at its `sites`."""

    closed: core.ClosedJaxpr
    outputs: Any
    params: Any
    frozen: Any
    batch: Any
    scope: Scope
    all_sites: list[Site]
    session: ProbeSession
    examples: int

    @cached_property
    def sites(self) -> list[Site]:
        """Returns the sites with trained parameters."""
        return [site for site in self.all_sites if site.is_trained]

    @cached_property
    def is_narrow(self) -> bool:
        """Returns whether any op or equation computes in a floating-point type narrower than float32, such as bfloat16."""
        return any(site.is_narrow for site in self.all_sites) or readers.has_narrow(self.closed.jaxpr)

    @cached_property
    def paths(self) -> list[str]:
        """Returns the paths of the trained parameters."""
        return list(self.session.shapes)

    def by_path(self, given: Any = None) -> dict[str, Any]:
        """Returns the values of all parameters, trained or not, by path."""
        params, frozen = given[:2] if given else (self.params, self.frozen)
        named = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(frozen)}
        return named | dict(zip(self.paths, jax.tree.leaves(params), strict=True))

    def __call__(self, kind: Callable[[Site], Pass], taps: Mapping[Site, Any], sums: Any = None, given: Any = None) -> Any:
        """Evaluates the program and returns (losses_B, counts).

        `taps` has one entry for each site. `sums` holds zeros in the shape of the parameters; gradients come back as their cotangents.
        `given` is (params, frozen, batch, consts), if they differ from the traced ones.
        """
        params, frozen, batch, consts = given or (self.params, self.frozen, self.batch, self.closed.consts)
        arguments = jax.tree.leaves((params, frozen, batch))
        jaxpr = self.closed.jaxpr
        shadows = {} if sums is None else dict(zip(jaxpr.invars, jax.tree.leaves(sums), strict=False))
        results = _evaluate(jaxpr, consts, arguments, shadows, self.scope, dict(taps), kind)
        return jax.tree.unflatten(self.outputs, results)


def traced(losses_fn: Any, params: Any, batch: Any, session_options: dict[str, Any], examples: int, frozen: Any = None) -> Program:
    """Traces a loss.

    Raises `ConfigError` if a loss is not one number for each example, or if a parameter does not go through ops alone (readers.py).
    """
    session = ProbeSession(shapes_of(params), **session_options)
    frozen = {} if frozen is None else jax.tree.map(jnp.asarray, frozen)
    shapes_of(readers.merged(params, frozen))

    def run(params, frozen, batch):
        wrapped = jax.tree_util.tree_map_with_path(lambda path, leaf: Probed(leaf, path_name(path), session), params)
        return with_counts(losses_fn(readers.merged(wrapped, frozen), batch))

    try:
        closed, out = jax.make_jaxpr(run, return_shape=True)(params, frozen, batch)
    except ConfigError:
        raise
    except Exception as error:
        # The error that the loss raises with bare parameters, if it fails there too.
        try:
            jax.eval_shape(losses_fn, readers.merged(params, frozen), batch)
        except Exception as own:
            if not frozen:
                raise
            raise readers.missing(own) from own
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError("the loss", f"uses parameters outside ops ({first})", ELSEWHERE) from error
    check_losses(out[0], examples)
    units = examples // session.rows_per_unit
    frozen_paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(frozen)]
    scope, sites = readers.walk(closed.jaxpr, list(session.shapes), frozen_paths, examples, units)
    return Program(closed, jax.tree.structure(out), params, frozen, batch, scope, sites, session, examples)


def zero_sums(params: Any) -> Any:
    """Returns zeros whose cotangents are the gradients, float32 or wider.

    Cotangents of bfloat16 parameters would be rounded to bfloat16 after they were weighted, beyond the clipping norm.
    """
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, norms.float32_or_wider(leaf.dtype)), params)


def _evaluate(
    jaxpr: core.Jaxpr, consts: Any, arguments: Any, shadows: dict[core.Var, Array], scope: Scope, taps: dict[Site, Any], kind: Any
) -> list[Any]:
    """Evaluates a program; `shadows` holds the sum of each parameter under the variable that holds the parameter's value."""
    values: dict[core.Var, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

    for place, eqn in enumerate(jaxpr.eqns):
        given, here = [value_of(var, values) for var in eqn.invars], scope.get(place)
        shadow = [shadows.get(var) if isinstance(var, core.Var) else None for var in eqn.invars]
        with eqn.ctx.manager:
            results, sums = _equation(eqn, given, shadow, here, taps, kind)
        values.update(zip(eqn.outvars, results, strict=True))
        shadows.update((var, total) for var, total in zip(eqn.outvars, sums, strict=True) if total is not None)
    return [value_of(var, values) for var in jaxpr.outvars]


def _equation(eqn: Any, given: list[Any], shadow: list[Any], here: Any, taps: dict[Site, Any], kind: Any) -> tuple[list, list]:
    """Returns the outputs of an equation, and the sums of the parameters among them."""
    nothing = [None] * len(eqn.outvars)
    if isinstance(here, Site):
        values, inputs = jax.tree.unflatten(eqn.params["tree"], given)
        sums = tuple(total if leaf is not None else None for total, leaf in zip(shadow, here.leaves, strict=False))
        asked = kind(here) if here.is_trained else "through"
        return jax.tree.leaves(in_pass(here.op, asked, values, inputs, taps.get(here), sums)), nothing
    if here is None:
        # A parameter goes through such an equation if one layer of a stack is taken: so does its sum.
        has_sums = eqn.invars and all(total is not None for total in shadow)
        return evaluated(eqn, given), evaluated(eqn, shadow) if has_sums else nothing
    if eqn.primitive is primitives.scan_p:
        return _loop(eqn, given, shadow, here[0], taps, kind), nothing
    if eqn.primitive is primitives.cond_p:
        branches = [_body(body, shadow[1:], scope, taps, kind) for body, scope in zip(eqn.params["branches"], here, strict=True)]
        return list(jax.lax.switch(given[0], branches, *given[1:])), nothing
    run = _body(readers.body_of(eqn), shadow, here[0], taps, kind)
    if eqn.primitive is primitives.remat_p:
        run = jax.checkpoint(run, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])  # pyright: ignore
    return list(run(*given)), nothing


def _body(body: core.ClosedJaxpr, shadow: list[Any], scope: Scope, taps: dict[Site, Any], kind: Any) -> Callable[..., list[Any]]:
    known = {var: total for var, total in zip(body.jaxpr.invars, shadow, strict=True) if total is not None}
    return lambda *given: _evaluate(body.jaxpr, body.consts, given, dict(known), scope, taps, kind)


def _loop(eqn: Any, given: list[Any], shadow: list[Any], scope: Scope, taps: dict[Site, Any], kind: Any) -> list[Any]:
    consts, count = readers.scan_parts(eqn)
    carry = consts + count
    body, inside = eqn.params["jaxpr"], _sites(scope)

    def round_of(carried: Any, sliced: Any) -> Any:
        xs, sums, own = sliced
        run = _body(body, [*shadow[:consts], *([None] * len(carried)), *sums], scope, {**taps, **dict(zip(inside, own, strict=True))}, kind)
        results = run(*given[:consts], *carried, *xs)
        return results[: len(carried)], results[len(carried) :]

    along = (given[carry:], shadow[carry:], [taps.get(site) for site in inside])
    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carried, stacked = jax.lax.scan(round_of, given[consts:carry], along, **options)
    return [*carried, *stacked]


def _sites(scope: Scope) -> list[Site]:
    sites: list[Site] = []
    for here in scope.values():
        sites += [here] if isinstance(here, Site) else [site for inner in here for site in _sites(inner)]
    return sites


def check_program(closed: core.ClosedJaxpr) -> None:
    """Raises `ConfigError` for operations of a traced program that could mix examples."""
    for effect in sorted(type(effect).__name__ for effect in closed.effects):
        reason = f"has a side effect ({effect}), through which one example could reach another"
        require(effect in HARMLESS, "the loss", reason, "Remove it")
    for eqn, bound in _equations(closed.jaxpr, frozenset()):
        _check_collective(eqn, bound)
        name, fix = eqn.primitive.name, "Call a function that jax.vmap maps by itself"
        if name in HOST and not str(eqn.params.get("vmap_method")).startswith("sequential"):
            reason = f"sends all examples to the host at once (vmap_method={eqn.params.get('vmap_method')})"
            raise ConfigError(f"{name} in the loss", reason, "Use vmap_method='sequential'")
        require(name != "custom_vmap_call", "custom_vmap in the loss", "has its own rule, which reads all examples at once", fix)
        rule = batching.fancy_primitive_batchers.get(eqn.primitive)
        reason = "has a batching rule from outside jax, which reads all examples at once"
        require(rule is None or _is_jaxs(rule), f"{name} in the loss", reason, fix)


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


@functools.lru_cache(maxsize=1024)
def _is_jaxs(rule: Any) -> bool:
    """Returns whether a batching rule and, if it is a partial or a closure, the functions of which it is made are of jax or dpx."""
    waiting, seen = [rule], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or not callable(one) or isinstance(one, core.Primitive):
            continue
        seen.add(id(one))
        if isinstance(one, functools.partial):
            waiting += [one.func, *one.args]
            continue
        if (getattr(one, "__module__", None) or "jax").split(".")[0] not in ("jax", "jaxlib", "dpx"):
            return False
        waiting += inspect.getclosurevars(one).nonlocals.values() if inspect.isfunction(one) else ()
    return True


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
