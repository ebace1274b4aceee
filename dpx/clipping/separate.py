"""Checks that a loss of a batch keeps examples apart: on its traced program, and then by a test when it is traced.

An example's loss, counts and records must depend on its own row alone, and an op must record only that example's data in an example's row.

In the program, the axis of the examples is followed from the batch through every equation of the forward and the backward pass, up to the
losses and the records of the ops. An equation that reduces, sorts, shifts or indexes that axis, or branches by the data of several
examples, makes its results mixed (row_rules.py). So does every primitive that is not known. A mixed record or loss is refused; the error
names the first equation that mixed examples.

The test uses random parameters and rows, and the user's rows if their values are known: the loss of one unit must leave nothing in any
other unit's records, and the norms and the sum of two units must equal those of each unit alone, by autodiff. That also tests the ops' own
sums.

B: examples (rows; units, where the axis is followed and these have several rows), U: units of R rows each (of one, unless said).
"""

import dataclasses
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.extend.core import primitives

from dpx.clipping import joint
from dpx.clipping.groups import check_losses, with_counts
from dpx.clipping.joint import Norms
from dpx.clipping.methods import recorded, unclipped
from dpx.clipping.op import Op
from dpx.clipping.program import Program, check_collectives
from dpx.clipping.readers import Site, body_of, merged, scan_parts
from dpx.clipping.row_rules import OWN, RULES, SHARED, Bounds, Crosses, Layout, Mixed, Rows, bounds_after, bounds_of, joined
from dpx.declaration import ConfigError
from dpx.randomness import path_name

CALLS = ("jit", "closed_call", "core_call", "call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call")


@dataclasses.dataclass(frozen=True)
class Flow:
    """Follows the examples' axis through a traced program for a given number of examples."""

    examples: int

    def through(
        self, jaxpr: core.Jaxpr, consts: Any, held: list[Layout], known: list[Bounds | None] | None = None
    ) -> tuple[list[Layout], list[Bounds | None]]:
        """Computes the layouts of the outputs of a program, and bounds on their numbers, from those of its inputs."""
        layouts: dict[Any, Layout] = dict(zip(jaxpr.invars, held, strict=True)) | dict.fromkeys(jaxpr.constvars, SHARED)
        bounds: dict[Any, Bounds | None] = dict(zip(jaxpr.invars, known or [None] * len(held), strict=True))
        bounds |= {var: bounds_of(value) for var, value in zip(jaxpr.constvars, consts, strict=True)}

        def read(var: Any) -> tuple[Layout, Bounds | None]:
            if isinstance(var, core.Literal):
                return SHARED, bounds_of(var.val)
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
        limit = bounds_after(eqn, limits)
        nothing: list[Bounds | None] = [limit] * count
        if name in CALLS:
            body = body_of(eqn)
            outputs, found = self.through(body.jaxpr, body.consts, held, limits)
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
            index, *given = held
            if isinstance(index, Mixed):
                return [Mixed(f"a branch is chosen by the data of several examples: {index.by}")] * count, nothing
            runs = [self.through(branch.jaxpr, branch.consts, given, limits[1:])[0] for branch in eqn.params["branches"]]
            results = [reduce(joined, column, SHARED) for column in zip(*runs, strict=True)]
            return [joined(OWN, result) for result in results] if index == OWN else results, nothing
        if name == "optimization_barrier":
            return list(held), nothing
        result: Layout | None = next((layout for layout in held if isinstance(layout, Mixed)), None)
        if result is None and all(var.aval.size == 0 for var in eqn.outvars):
            # An empty array holds no data of any example.
            result = SHARED
        elif result is None and name not in RULES:
            result = Mixed(f"{name} has no rule that says whether it keeps examples apart")
        elif result is None:
            try:
                result = OWN if OWN in held else RULES[name](eqn, held, self.examples, limits)
            except Crosses as crossed:
                result = Mixed(f"{name} {crossed}")
        return [result] * count, nothing

    def _scan(self, eqn: Any, held: list[Layout]) -> list[Layout]:
        consts, count = scan_parts(eqn)
        carry = consts + count
        body, along = eqn.params["jaxpr"], [_of_round(layout) for layout in held[carry:]]
        is_over_examples = OWN in along and OWN not in held
        run = partial(self.through, body.jaxpr, body.consts)
        carried, results = self._settled(lambda carried: run([*held[:consts], *carried, *along])[0], held[consts:carry], is_over_examples)
        stacked = [
            layout.at(layout.axis + 1) if isinstance(layout, Rows) else Rows(0) if layout == OWN and is_over_examples else layout
            for layout in results[len(carried) :]
        ]
        return [*carried, *stacked]

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
        run = partial(self.through, body.jaxpr, body.consts)
        carried, _ = self._settled(lambda carried: run([*held[first:second], *carried])[0], held[second:], False)
        going = self.through(test.jaxpr, test.consts, [*held[:first], *carried])[0][0]
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


FIX = "Let an example's loss depend on its own row alone; dpx.clipped_grad and method=traced ensure this for any loss"


def check(program: Program) -> None:
    """Raises `ConfigError` for a program whose forward and backward pass may mix examples; the error names the equation."""
    rows, units = program.session.rows_per_unit, program.examples // program.session.rows_per_unit
    by_site: list[Site] = list(program.sites)

    def both_passes(given: Any, cotangent_B: Any) -> Any:
        losses_B, records, counts = recorded(program, cotangent_B, given)
        by_path = program.by_path(given)
        squares = [joint.own_squares(site, joint.leaves_of(site, by_path), records[site]) for site in by_site]
        return losses_B, [(records[site], own) for site, own in zip(by_site, squares, strict=True)], counts

    cotangent_B = jax.ShapeDtypeStruct((program.examples,), jnp.result_type(float))
    consts = list(program.closed.consts)
    given = (program.params, program.frozen, program.batch, consts)
    closed, shapes = jax.make_jaxpr(both_passes, return_shape=True)(given, cotangent_B)
    check_collectives(closed.jaxpr)
    if units == 1:
        return

    first: Layout = Rows(0, 1, rows)
    shared, owned = len(jax.tree.leaves(given[:2])), len(jax.tree.leaves(program.batch))
    held: list[Layout] = [*[SHARED] * shared, *[first] * owned, *[SHARED] * len(jax.tree.leaves(consts)), first]
    known = [None] * (shared + owned) + [bounds_of(value) for value in jax.tree.leaves(consts)] + [None]
    results = Flow(units).through(closed.jaxpr, closed.consts, held, known)[0]
    losses_B, by_op, counts = jax.tree.unflatten(jax.tree.structure(shapes), results)

    for site, (record, squares), (_, shapes_of) in zip(by_site, by_op, shapes[1], strict=True):
        axis = len(site.loops)
        # An op that defines itself which numbers belong to a unit may have them elsewhere.
        is_leading = type(site.op).by_unit is Op.by_unit
        for layout in jax.tree.leaves(record):
            is_own = isinstance(layout, Rows) and (not is_leading or (layout.axis == axis and layout.before == 1))
            if not is_own and layout != SHARED:
                where = f"mixes data of one example into the row of another ({site.first}): {_why(layout)}"
                raise ConfigError(f"op {site.op.name}", where, FIX)
        for layout, shape in zip(jax.tree.leaves(squares), jax.tree.leaves(shapes_of), strict=True):
            if layout not in (SHARED, Rows(len(shape.shape) - 1)):
                reason = f"gives squared norms that depend on other examples ({site.first}): {_why(layout)}"
                raise ConfigError(f"op {site.op.name}", reason, "Give each example the norm of its gradient")
    if losses_B not in (SHARED, first):
        raise ConfigError("the loss", f"gives losses that depend on other examples: {_why(losses_B)}", FIX)
    for path, layout in jax.tree_util.tree_leaves_with_path(counts):
        if layout not in (SHARED, first):
            raise ConfigError(f"the count {path_name(path)}", f"depends on other examples: {_why(layout)}", "Count each example by itself")


def _why(layout: Layout) -> str:
    return layout.by if isinstance(layout, Mixed) else "the examples are along another axis"


# Relative error that rounding may cause in a norm, with narrow types (True) or without; the error of a wrong op is larger on random rows.
TOLERANCE = {False: 2e-3, True: 0.1}


@dataclasses.dataclass(frozen=True)
class Draw:
    """The distribution of the rows of one trial.

    Integers go from `low` to `below` - 1, and may be all 0 in the first unit. Floats have both signs or one, and deviation `spread`. With
    `is_given` the rows are the user's own, and only the parameters are drawn.
    """

    seed: int
    low: int
    below: int
    is_first_zero: bool
    is_positive: bool
    spread: float = 1.0
    is_given: bool = False
    # A new random generator for each trial, which starts from the beginning.
    random: Any = None


# 0 and 1 are valid ids, classes and positions anywhere. Zeros in the first unit reveal a largest id computed over the batch. Where
# integers start at 1 they can be divided by and no row is all masked, and positive numbers have roots and logarithms.
DRAWS = (
    Draw(0, 0, 2, False, False),
    Draw(1, 0, 2, True, True),
    Draw(2, 0, 5, True, False),
    Draw(3, 1, 2, False, True),
    Draw(4, 1, 4, False, False),
    # For effects of large numbers alone: a clip of activations, ids beyond a capacity.
    Draw(5, 0, 64, False, False, 30.0),
)
GIVEN = Draw(6, 0, 2, False, False, is_given=True)
# A user's rows may cancel in ways that random rows do not, and rounding is then larger relative to the remainder.
GIVEN_FACTOR = 10.0

# The losses of the last programs, kept alive so that no other loss can get the same id.
_found_separate: dict[tuple, Any] = {}
_REMEMBERED = 64


class _Together(NamedTuple):
    """The result of one backward pass: every unit's squared norms by site, its whole norm, the losses, and the sum of gradients."""

    own: list[Any]
    norms_U: Any
    losses_U: Any
    total: Any


# For two units (or for the only unit): the result of each with both in the program, and its loss and gradient alone. Numpy arrays.
_Trial = list[tuple[_Together, tuple[Any, Any]]]


def check_separate(losses_fn: Any, program: Program, norms: Norms) -> None:
    """Raises `ConfigError`, naming the op, if examples are not kept apart."""
    # Programs that print alike may differ in the derivative rules of their functions, so the loss is part of the key; and in whole numbers
    # that the loss closes over, such as an index, so these are too; and norms of kept gradients are computed otherwise.
    bounds = [bounds_of(value) for value in program.closed.consts]
    key = (id(losses_fn), str(program.closed.jaxpr), norms.kept, *(bound.low.tobytes() for bound in bounds if bound is not None))
    if key in _found_separate:
        return
    check(program)
    trial, is_conclusive = _built(losses_fn, program, norms), False
    is_known = not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(program.batch))
    for draw in (*DRAWS, GIVEN) if is_known else DRAWS:
        outcome = trial(dataclasses.replace(draw, random=np.random.default_rng(draw.seed)))
        if all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(outcome)):
            _check_trial(program, outcome, GIVEN_FACTOR if draw.is_given else 1.0)
            is_conclusive = True
    if is_conclusive:
        _found_separate[key] = losses_fn
        if len(_found_separate) > _REMEMBERED:
            del _found_separate[next(iter(_found_separate))]
        return
    reason = "is not finite on random rows, so dpx cannot test whether examples are separate"
    raise ConfigError("the loss", reason, "Pass checked=False once you have compared it with clipping_method=vmap")


def _units(program: Program) -> list[int]:
    return sorted({0, program.examples // program.session.rows_per_unit - 1})


def _check_trial(program: Program, trial: _Trial, factor: float) -> None:
    for unit, (together, _) in zip(_units(program), trial, strict=True):
        for site, own in zip(program.sites, together.own, strict=True):
            if np.delete(own, unit, axis=-1).any():
                where = f"mixes data of one example into the row of another ({site.first})"
                reason = f"{where}: a statistic over the batch, or another axis first"
                raise ConfigError(
                    f"op {site.op.name}", reason, "Keep examples separate and the example axis first; batch normalisation cannot be private"
                )
    tolerance = factor * TOLERANCE[program.is_narrow]
    norms, alone, losses, losses_alone, errors = [], [], [], [], []
    for unit, (together, (loss, gradient)) in zip(_units(program), trial, strict=True):
        norms.append(float(together.norms_U[unit]))
        alone.append(_norm(gradient))
        losses.append(float(together.losses_U[unit]))
        losses_alone.append(float(loss))
        errors.append(_norm(jax.tree.map(np.subtract, together.total, gradient)))
    scale = tolerance * max(alone)
    is_right = np.allclose(norms, alone, 0, scale) and np.allclose(losses, losses_alone, tolerance, tolerance) and max(errors) <= scale
    if not is_right:
        ops = ", ".join(sorted({site.op.name for site in program.sites}))
        both = " and ".join(f"({', '.join(f'{norm:.4g}' for norm in each)})" for each in (norms, alone))
        reason = f"gives an example other losses, gradients or norms ({both}) in a batch than alone, through {ops}"
        raise ConfigError("the loss", reason, "Let an example's loss depend on its own row alone, or use clipping_method=vmap")


def _norm(tree: Any) -> float:
    return float(np.sqrt(sum(np.square(np.asarray(leaf, np.float64)).sum() for leaf in jax.tree.leaves(tree))))


def _built(losses_fn: Any, program: Program, norms: Norms) -> Callable[[Draw], _Trial]:
    rows = program.session.rows_per_unit
    row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), program.batch)

    def losses_alone(params: Any, frozen: Any, batch: Any) -> Any:
        losses_B = with_counts(losses_fn(merged(params, frozen), batch))[0]
        check_losses(losses_B, rows)
        return losses_B

    try:
        # The loss of one unit, with bare parameters.
        closed = jax.make_jaxpr(losses_alone)(program.params, program.frozen, row)
    except (TypeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            "the loss", f"cannot be computed for one example alone ({first})", "Put all arrays that belong to examples into the batch"
        ) from error

    def together(params: Any, frozen: Any, batch: Any, consts: Any, cotangent_B: Any) -> _Together:
        losses_B, own, squares, total = unclipped(program, norms, cotangent_B, (params, frozen, batch, consts))
        own = [jnp.stack([square.sum(tuple(range(square.ndim - 1))) for square in of_site]) for of_site in own]
        norms_U = jnp.sqrt(jnp.maximum(sum(entry.total_B for entry in squares), 0))
        return _Together(own, norms_U, losses_B.reshape(-1, rows).sum(1), total)

    def alone(params: Any, frozen: Any, row: Any, consts: Any) -> Any:
        run = core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, consts))
        loss = lambda params: run(*jax.tree.leaves((params, frozen, row)))[0].sum()  # noqa: E731
        return jax.value_and_grad(loss)(params)

    compiled: list[Any] = []

    def trial(drawn: Draw) -> _Trial:
        # A trial is computed at once, even if the loss is being traced inside a `jit` of the caller.
        with jax.ensure_compile_time_eval():
            known: dict[int, Any] = {}
            params, frozen = jax.tree.map(lambda leaf: _parameter(leaf, drawn), (program.params, program.frozen))
            batch = program.batch if drawn.is_given else jax.tree.map(lambda leaf: _stand_in(leaf, drawn, rows), program.batch)
            # A constant that the loss closes over is itself if it is concrete, else one random value for both programs.
            consts, consts_alone = (
                [known.setdefault(id(leaf), _stand_in(leaf, drawn, 0)) if isinstance(leaf, Tracer) else leaf for leaf in consts]
                for consts in (program.closed.consts, closed.consts)
            )
            given = []
            for unit in _units(program):
                place = slice(unit * rows, (unit + 1) * rows)
                cotangent_B = np.zeros(program.examples, jnp.result_type(float))
                cotangent_B[place] = 1
                row = jax.tree.map(lambda leaf, place=place: leaf[place], batch)
                given.append(((params, frozen, batch, consts, cotangent_B), (params, frozen, row, consts_alone)))
        # Not so the programs, which jax would trace with a program compiled for each of their constants.
        if not compiled:
            quick: Any = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
            compiled.extend(jax.jit(run).lower(*own).compile(quick) for run, own in zip((together, alone), given[0], strict=True))
        with jax.ensure_compile_time_eval():
            return jax.tree.map(np.asarray, [tuple(run(*own) for run, own in zip(compiled, both, strict=True)) for both in given])

    return trial


def _parameter(leaf: Any, drawn: Draw) -> Any:
    """Returns random values, small enough that deep programs stay finite; a frozen leaf that is not floating keeps its values."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return _stand_in(leaf, drawn, 0) if isinstance(leaf, Tracer) else leaf
    spread = max(0.05, leaf.shape[-2] ** -0.5) if leaf.ndim > 1 else 0.5
    return np.asarray(drawn.random.normal(0, spread, leaf.shape), leaf.dtype)


def _stand_in(leaf: Any, drawn: Draw, first: int) -> Any:
    """Returns random values made by numpy, because jax would compile a program for each shape.

    Integers of the `first` rows are 0.
    """
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        seed = int(drawn.random.integers(2**31))
        return jax.random.split(jax.random.key(seed, impl=jax.random.key_impl(leaf)), leaf.shape)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        values = drawn.random.normal(0, drawn.spread, leaf.shape)
        return np.asarray(np.abs(values) if drawn.is_positive else values, leaf.dtype)
    values = np.asarray(drawn.random.integers(drawn.low, drawn.below, leaf.shape))
    if first and drawn.is_first_zero:
        values[:first] = 0
    return np.asarray(values, leaf.dtype)
