"""Holds a traced loss, and evaluates it with every op replaced by one of the passes of passes.py.

The loss is traced once. Everything after that evaluates this one program, so the program that was checked is the one that runs.

B: examples, U: units.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives
from jaxtyping import Array

from dpx.clipping import norms, passes, readers
from dpx.clipping import trained_and_frozen as frozen_part
from dpx.clipping.probes import ELSEWHERE, ProbeSession, evaluated, shapes_of, wrap
from dpx.clipping.readers import Scope
from dpx.clipping.sites import Site
from dpx.declaration import ConfigError, require
from dpx.randomness import path_name


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

    def __call__(self, kind: Callable[[Site], passes.Pass], taps: Mapping[Site, Any], sums: Any = None, given: Any = None) -> Any:
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
    shapes_of(frozen_part.merged(params, frozen))

    def run(params, frozen, batch):
        return with_counts(losses_fn(frozen_part.merged(wrap(params, session), frozen), batch))

    try:
        closed, out = jax.make_jaxpr(run, return_shape=True)(params, frozen, batch)
    except ConfigError:
        raise
    except Exception as error:
        _raise_own_error(losses_fn, params, frozen, batch)
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError("the loss", f"uses parameters outside ops ({first})", ELSEWHERE) from error
    check_losses(out[0], examples)
    units = examples // session.rows_per_unit
    frozen_paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(frozen)]
    scope, sites = readers.walk(closed.jaxpr, list(session.shapes), frozen_paths, examples, units)
    return Program(closed, jax.tree.structure(out), params, frozen, batch, scope, sites, session, examples)


def _raise_own_error(losses_fn: Any, params: Any, frozen: Any, batch: Any) -> None:
    """Raises the error that the loss raises with bare parameters, if it fails there too."""
    try:
        jax.eval_shape(losses_fn, frozen_part.merged(params, frozen), batch)
    except Exception as error:
        if not frozen:
            raise
        raise frozen_part.missing(error) from error


def with_counts(returned: Any) -> tuple[Any, Any]:
    """Returns (losses_B, counts) from the result of a loss, which may leave out the counts."""
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned[0], {} if returned[1] is None else returned[1]
    if isinstance(returned, (tuple, list, dict)):
        described = f"a {type(returned).__name__} from the loss"
        raise ConfigError(described, "must be the losses, or a pair of losses and counts", "Return losses_B, or (losses_B, counts)")
    return returned, {}


def check_losses(losses_B: Any, examples: int) -> None:
    """Raises `ConfigError` unless the losses are one floating-point number for each example."""
    shape = getattr(losses_B, "shape", ())
    reason = f"do not have one number for each of the {examples} examples"
    require(shape == (examples,), f"losses of shape {shape}", reason, "Return an array [B]")
    is_float = jnp.issubdtype(losses_B.dtype, jnp.floating)
    require(is_float, f"losses of type {losses_B.dtype}", "have no gradient", "Return floating-point numbers")


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

    def read(var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else values[var]

    for place, eqn in enumerate(jaxpr.eqns):
        given, here = [read(var) for var in eqn.invars], scope.get(place)
        shadow = [shadows.get(var) if isinstance(var, core.Var) else None for var in eqn.invars]
        with eqn.ctx.manager:
            results, sums = _equation(eqn, given, shadow, here, taps, kind)
        values.update(zip(eqn.outvars, results, strict=True))
        shadows.update((var, total) for var, total in zip(eqn.outvars, sums, strict=True) if total is not None)
    return [read(var) for var in jaxpr.outvars]


def _equation(eqn: Any, given: list[Any], shadow: list[Any], here: Any, taps: dict[Site, Any], kind: Any) -> tuple[list, list]:
    """Returns the outputs of an equation, and the sums of the parameters among them."""
    nothing = [None] * len(eqn.outvars)
    if isinstance(here, Site):
        values, inputs = jax.tree.unflatten(eqn.params["tree"], given)
        sums = tuple(total if leaf is not None else None for total, leaf in zip(shadow, here.leaves, strict=False))
        asked = kind(here) if here.is_trained else "through"
        return jax.tree.leaves(passes.run(here.op, asked, values, inputs, taps.get(here), sums)), nothing
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
