"""Decides from a loss's program whether it keeps examples apart.

The axis of the examples is followed from the batch through every equation of the forward and the backward pass, up to the losses and the
records of the ops. An equation that reduces, sorts, shifts or indexes that axis, or branches by the data of several examples, makes its
results mixed (row_rules.py). So does every primitive that is not known here. A mixed record or loss is refused; the error names the first
equation that mixed examples.

A loss of one example is kept apart by `jax.vmap` itself. What is refused there are collectives over an axis that is bound outside the loss,
batching rules from outside jax (`custom_vmap`, a user-defined primitive), host functions that are given all rows at once, and side effects.

B: examples (units, where these have several rows).
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives
from jax.interpreters import batching

from dpx.clipping import index_bounds
from dpx.clipping.index_bounds import OWN, SHARED, Bounds, Crosses, Layout, Mixed, Rows, joined
from dpx.clipping.readers import scan_parts
from dpx.clipping.row_rules import RULES
from dpx.declaration import ConfigError, require

CALLS = ("jit", "closed_call", "core_call", "call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call")


@dataclasses.dataclass(frozen=True)
class Flow:
    """Follows the examples' axis through a traced program for a given number of examples."""

    examples: int

    def through(self, jaxpr: core.Jaxpr, consts: Any, held: list[Layout], known: list[Bounds | None] | None = None) -> list[Layout]:
        """Computes the layouts of the outputs of a program from the layouts of its inputs."""
        return self._run(jaxpr, consts, held, known or [None] * len(held))[0]

    def _run(
        self, jaxpr: core.Jaxpr, consts: Any, held: list[Layout], known: list[Bounds | None]
    ) -> tuple[list[Layout], list[Bounds | None]]:
        layouts: dict[Any, Layout] = dict(zip(jaxpr.invars, held, strict=True)) | dict.fromkeys(jaxpr.constvars, SHARED)
        bounds: dict[Any, Bounds | None] = dict(zip(jaxpr.invars, known, strict=True))
        bounds |= {var: index_bounds.of_value(value) for var, value in zip(jaxpr.constvars, consts, strict=True)}

        def read(var: Any) -> tuple[Layout, Bounds | None]:
            if isinstance(var, core.Literal):
                return SHARED, index_bounds.of_value(var.val)
            return layouts[var], bounds.get(var)

        for eqn in jaxpr.eqns:
            pairs = [read(var) for var in eqn.invars]
            given, limits = [layout for layout, _ in pairs], [limit for _, limit in pairs]
            outputs, found = self._equation(eqn, given, limits)
            layouts.update(zip(eqn.outvars, outputs, strict=True))
            bounds.update(zip(eqn.outvars, found, strict=True))
        results = [read(var) for var in jaxpr.outvars]
        return [layout for layout, _ in results], [limit for _, limit in results]

    def _equation(self, eqn: Any, held: list[Layout], limits: list[Bounds | None]) -> tuple[list[Layout], list[Bounds | None]]:
        count, name = len(eqn.outvars), eqn.primitive.name
        limit = index_bounds.after(eqn, limits)
        nothing: list[Bounds | None] = [limit] * count
        if name in CALLS:
            body = _body(eqn)
            outputs, found = self._run(body.jaxpr, body.consts, held, limits)
            return outputs, found if limit is None else nothing
        if all(layout == SHARED for layout in held):
            return [SHARED] * count, nothing
        if OWN in held and any(isinstance(layout, Rows) for layout in held):
            mixed = Mixed(f"{name} reads all examples inside a loop over examples")
            return [mixed] * count, nothing
        if eqn.primitive is primitives.scan_p:
            return self._scan(eqn, held), nothing
        if eqn.primitive is primitives.while_p:
            return self._while(eqn, held), nothing
        if eqn.primitive is primitives.cond_p:
            return self._cond(eqn, held, limits), nothing
        if name == "optimization_barrier":
            return list(held), nothing
        return self._by_rule(eqn, held, limits), nothing

    def _by_rule(self, eqn: Any, held: list[Layout], limits: list[Bounds | None]) -> list[Layout]:
        mixed: list[Layout] = [layout for layout in held if isinstance(layout, Mixed)]
        if mixed:
            return mixed[:1] * len(eqn.outvars)
        # An empty array holds no data of any example.
        if all(var.aval.size == 0 for var in eqn.outvars):
            return [SHARED] * len(eqn.outvars)
        name = eqn.primitive.name
        if name not in RULES:
            return [Mixed(f"{name} has no rule that says whether it keeps examples apart")] * len(eqn.outvars)
        try:
            return [OWN if OWN in held else RULES[name](eqn, held, self.examples, limits)] * len(eqn.outvars)
        except Crosses as crossed:
            return [Mixed(f"{name} {crossed}")] * len(eqn.outvars)

    def _cond(self, eqn: Any, held: list[Layout], limits: list[Bounds | None]) -> list[Layout]:
        index, *given = held
        if isinstance(index, Mixed):
            return [Mixed(f"a branch is chosen by the data of several examples: {index.by}")] * len(eqn.outvars)
        runs = [self._run(branch.jaxpr, branch.consts, list(given), limits[1:])[0] for branch in eqn.params["branches"]]
        results = [self._any(column) for column in zip(*runs, strict=True)]
        return [joined(OWN, result) for result in results] if index == OWN else results

    def _any(self, column: Any) -> Layout:
        result: Layout = SHARED
        for layout in column:
            result = joined(result, layout)
        return result

    def _scan(self, eqn: Any, held: list[Layout]) -> list[Layout]:
        consts, count = scan_parts(eqn)
        carry = consts + count
        body, along = eqn.params["jaxpr"], [_of_round(layout) for layout in held[carry:]]
        is_over_examples = OWN in along and OWN not in held

        def run(carried: list[Layout]) -> list[Layout]:
            return self._run(body.jaxpr, body.consts, [*held[:consts], *carried, *along], [None] * len(held))[0]

        carried, results = self._settled(run, held[consts:carry], is_over_examples)
        return [*carried, *(_stacked(layout, is_over_examples) for layout in results[len(carried) :])]

    def _settled(self, run: Any, start: list[Layout], is_over_examples: bool) -> tuple[list[Layout], list[Layout]]:
        """Returns the layouts of a loop's carry and of all outputs of a round, once another round changes nothing."""
        carried = list(start)
        passed_on = Mixed("a loop over the examples carries a value from one example to the next")
        while True:
            results = run(carried)
            ends = [passed_on if end == OWN and is_over_examples else end for end in results]
            after = [joined(old, end) for old, end in zip(carried, ends, strict=False)]
            if after == carried:
                return carried, results
            carried = after

    def _while(self, eqn: Any, held: list[Layout]) -> list[Layout]:
        first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]

        def run(carried: list[Layout]) -> list[Layout]:
            return self._run(body.jaxpr, body.consts, [*held[first:second], *carried], [None] * len(body.jaxpr.invars))[0]

        carried, _ = self._settled(run, held[second:], False)
        going = self._run(test.jaxpr, test.consts, [*held[:first], *carried], [None] * len(test.jaxpr.invars))[0][0]
        if isinstance(going, Mixed):
            return [Mixed(f"the data of several examples decide whether a loop continues: {going.by}")] * len(carried)
        return [joined(going, layout) for layout in carried]


def _of_round(layout: Layout) -> Layout:
    """Returns the layout that one round sees of an array that a loop runs along."""
    if not isinstance(layout, Rows):
        return layout
    if layout.axis > 0:
        return layout.at(layout.axis - 1)
    return OWN if layout.before == layout.after == 1 else Mixed("a loop cuts the examples' axis")


def _stacked(layout: Layout, is_over_examples: bool) -> Layout:
    if isinstance(layout, Rows):
        return layout.at(layout.axis + 1)
    return Rows(0) if layout == OWN and is_over_examples else layout


def _body(eqn: Any) -> core.ClosedJaxpr:
    # A remaining `custom_vmap` is a call that was not mapped: if its rule ran, the trace holds the rule's result instead.
    body = next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "call") if name in eqn.params)
    return body if isinstance(body, core.ClosedJaxpr) else core.ClosedJaxpr(body, ())


COLLECTIVES = frozenset(
    "psum psum_invariant pmax pmin pmean ppermute pbroadcast pgather psend precv all_gather all_gather_invariant all_gather_reduced".split()
    + "all_to_all ragged_all_to_all reduce_scatter psum_scatter unreduced_psum unreduced_reduce_scatter".split()
)
# Effects of a printed value, and of reading an axis: nothing comes back into the loss.
HARMLESS = ("DebugEffect", "OrderedDebugEffect", "NamedAxisEffect")
HOST = ("pure_callback", "ffi_call")


def check(loss: Callable[..., Any], *arguments: Any) -> None:
    """Raises `ConfigError` for operations through which `loss`, or its gradient with respect to the first argument, could mix examples.

    `loss` returns (number, counts) of one example. The gradient is checked too because a user-defined backward pass may contain operations
    that the loss does not show.
    """
    for function in (loss, jax.grad(loss, has_aux=True)):
        check_program(jax.make_jaxpr(function)(*arguments))


def check_program(closed: core.ClosedJaxpr) -> None:
    """Raises `ConfigError` for operations of a traced program that could mix examples."""
    for effect in sorted(type(effect).__name__ for effect in closed.effects):
        reason = f"has a side effect ({effect}), through which one example could reach another"
        require(effect in HARMLESS, "the loss", reason, "Remove it")
    for eqn, bound in _equations(closed.jaxpr, frozenset()):
        _check_collective(eqn, bound)
        _check_rule(eqn)


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


def _check_rule(eqn: Any) -> None:
    name, fix = eqn.primitive.name, "Call a function that jax.vmap maps by itself"
    if name in HOST and not str(eqn.params.get("vmap_method")).startswith("sequential"):
        reason = f"sends all examples to the host at once (vmap_method={eqn.params.get('vmap_method')})"
        raise ConfigError(f"{name} in the loss", reason, "Use vmap_method='sequential'")
    require(name != "custom_vmap_call", "custom_vmap in the loss", "has its own rule, which reads all examples at once", fix)
    rule = batching.fancy_primitive_batchers.get(eqn.primitive)
    reason = "has a batching rule from outside jax, which reads all examples at once"
    require(rule is None or _is_jaxs(rule), f"{name} in the loss", reason, fix)


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
