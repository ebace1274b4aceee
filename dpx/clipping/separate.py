"""Checks that a loss of a batch keeps examples apart: on its program (row_flow.py), and then by a test when it is traced.

An example's loss, counts and records must depend on its own row alone, and an op must record only that example's data in an example's row.
The test uses random parameters and rows, and the user's rows if their values are known: the loss of one unit must leave nothing in any
other unit's records, and the norms and the sum of two units must equal those of each unit alone, by autodiff. That also tests the ops' own
sums.

B: examples (rows), U: units of R rows each (of one, unless said).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from dpx.clipping import index_bounds, joint, row_flow
from dpx.clipping.book_keeping import recorded, unclipped
from dpx.clipping.index_bounds import SHARED, Layout, Mixed, Rows
from dpx.clipping.joint import Norms
from dpx.clipping.op import Op
from dpx.clipping.program import Program
from dpx.clipping.readers import Site
from dpx.clipping.result import check_losses, with_counts
from dpx.clipping.row_flow import Flow
from dpx.clipping.trained_and_frozen import merged
from dpx.declaration import ConfigError
from dpx.randomness import path_name

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
    row_flow.check_collectives(closed.jaxpr)
    if units == 1:
        return

    first: Layout = Rows(0, 1, rows)
    shared, owned = len(jax.tree.leaves(given[:2])), len(jax.tree.leaves(program.batch))
    held: list[Layout] = [*[SHARED] * shared, *[first] * owned, *[SHARED] * len(jax.tree.leaves(consts)), first]
    known = [None] * (shared + owned) + [index_bounds.of_value(value) for value in jax.tree.leaves(consts)] + [None]
    results = Flow(units).through(closed.jaxpr, closed.consts, held, known)
    losses_B, by_op, counts = jax.tree.unflatten(jax.tree.structure(shapes), results)

    for site, (record, squares), (_, shapes_of) in zip(by_site, by_op, shapes[1], strict=True):
        _check_site(site, record, list(zip(jax.tree.leaves(squares), jax.tree.leaves(shapes_of), strict=True)))
    if losses_B not in (SHARED, first):
        raise ConfigError("the loss", f"gives losses that depend on other examples: {_why(losses_B)}", FIX)
    for path, layout in jax.tree_util.tree_leaves_with_path(counts):
        if layout not in (SHARED, first):
            raise ConfigError(f"the count {path_name(path)}", f"depends on other examples: {_why(layout)}", "Count each example by itself")


def _check_site(site: Site, record: Any, squares: list[tuple[Layout, Any]]) -> None:
    """Checks the records and norms of one op.

    `squares` holds, for each part of the op, the layout and the shape of its squared norms, whose last axis is the example.
    """
    axis = len(site.loops)
    # An op that defines itself which numbers belong to a unit may have them elsewhere.
    is_leading = type(site.op).by_unit is Op.by_unit
    for layout in jax.tree.leaves(record):
        is_own = isinstance(layout, Rows) and (not is_leading or (layout.axis == axis and layout.before == 1))
        if not is_own and layout != SHARED:
            where = f"mixes data of one example into the row of another ({site.first}): {_why(layout)}"
            raise ConfigError(f"op {site.op.name}", where, FIX)
    for layout, shape in squares:
        if layout not in (SHARED, Rows(len(shape.shape) - 1)):
            reason = f"gives squared norms that depend on other examples ({site.first}): {_why(layout)}"
            raise ConfigError(f"op {site.op.name}", reason, "Give each example the norm of its gradient")


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
    bounds = [index_bounds.of_value(value) for value in program.closed.consts]
    key = (id(losses_fn), str(program.closed.jaxpr), norms.kept, *(bound.low.tobytes() for bound in bounds if bound is not None))
    if key in _found_separate:
        return
    check(program)
    trial, is_conclusive = _built(losses_fn, program, norms), False
    is_known = not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(program.batch))
    for draw in (*DRAWS, GIVEN) if is_known else DRAWS:
        outcome = trial(dataclasses.replace(draw, random=np.random.default_rng(draw.seed)))
        if all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(outcome)):
            _check_leaks(program, outcome)
            _check_alone(program, outcome, GIVEN_FACTOR if draw.is_given else 1.0)
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


def _check_leaks(program: Program, trial: _Trial) -> None:
    for unit, (together, _) in zip(_units(program), trial, strict=True):
        for site, own in zip(program.sites, together.own, strict=True):
            if np.delete(own, unit, axis=-1).any():
                where = f"mixes data of one example into the row of another ({site.first})"
                reason = f"{where}: a statistic over the batch, or another axis first"
                raise ConfigError(
                    f"op {site.op.name}", reason, "Keep examples separate and the example axis first; batch normalisation cannot be private"
                )


def _check_alone(program: Program, trial: _Trial, factor: float) -> None:
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
    jaxpr, alone_consts = _alone(losses_fn, program, rows)

    def together(params: Any, frozen: Any, batch: Any, consts: Any, cotangent_B: Any) -> _Together:
        losses_B, own, squares, total = unclipped(program, norms, cotangent_B, (params, frozen, batch, consts))
        own = [jnp.stack([square.sum(tuple(range(square.ndim - 1))) for square in of_site]) for of_site in own]
        norms_U = jnp.sqrt(jnp.maximum(sum(entry.total_B for entry in squares), 0))
        return _Together(own, norms_U, losses_B.reshape(-1, rows).sum(1), total)

    def alone(params: Any, frozen: Any, row: Any, consts: Any) -> Any:
        run = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, consts))
        loss = lambda params: run(*jax.tree.leaves((params, frozen, row)))[0].sum()  # noqa: E731
        return jax.value_and_grad(loss)(params)

    compiled: list[Any] = []

    def trial(drawn: Draw) -> _Trial:
        # A trial is computed at once, even if the loss is being traced inside a `jit` of the caller.
        with jax.ensure_compile_time_eval():
            known: dict[int, Any] = {}
            params, frozen = jax.tree.map(lambda leaf: _parameter(leaf, drawn), (program.params, program.frozen))
            batch = program.batch if drawn.is_given else jax.tree.map(lambda leaf: _stand_in(leaf, drawn, rows), program.batch)
            consts, consts_alone = ([_constant(leaf, drawn, known) for leaf in consts] for consts in (program.closed.consts, alone_consts))
            given = []
            for unit in _units(program):
                place = slice(unit * rows, (unit + 1) * rows)
                cotangent_B = np.zeros(program.examples, jnp.result_type(float))
                cotangent_B[place] = 1
                row = jax.tree.map(lambda leaf, place=place: leaf[place], batch)
                given.append(((params, frozen, batch, consts, cotangent_B), (params, frozen, row, consts_alone)))
        # Not so the programs, which jax would trace with a program compiled for each of their constants.
        if not compiled:
            compiled.extend(_compiled(function, arguments) for function, arguments in zip((together, alone), given[0], strict=True))
        with jax.ensure_compile_time_eval():
            return jax.tree.map(np.asarray, [tuple(run(*own) for run, own in zip(compiled, both, strict=True)) for both in given])

    return trial


def _compiled(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    quick: Any = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(function).lower(*arguments).compile(quick)


def _alone(losses_fn: Any, program: Program, rows: int) -> tuple[core.Jaxpr, list[Any]]:
    """Returns the traced loss of one unit, with bare parameters."""
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), program.batch)

    def run(params: Any, frozen: Any, batch: Any) -> Any:
        losses_B = with_counts(losses_fn(merged(params, frozen), batch))[0]
        check_losses(losses_B, rows)
        return losses_B

    try:
        closed = jax.make_jaxpr(run)(program.params, program.frozen, batch)
    except (TypeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            "the loss", f"cannot be computed for one example alone ({first})", "Put all arrays that belong to examples into the batch"
        ) from error
    return closed.jaxpr, closed.consts


def _parameter(leaf: Any, drawn: Draw) -> Any:
    """Returns random values, small enough that deep programs stay finite; a frozen leaf that is not floating keeps its values."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return _stand_in(leaf, drawn, 0) if isinstance(leaf, Tracer) else leaf
    spread = max(0.05, leaf.shape[-2] ** -0.5) if leaf.ndim > 1 else 0.5
    return np.asarray(drawn.random.normal(0, spread, leaf.shape), leaf.dtype)


def _constant(leaf: Any, drawn: Draw, known: dict[int, Any]) -> Any:
    """Returns a value for a constant that a loss closes over: itself if it is concrete, else one random value for both programs."""
    if not isinstance(leaf, Tracer):
        return leaf
    return known.setdefault(id(leaf), _stand_in(leaf, drawn, 0))


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
