"""Checks that a traced loss keeps examples apart: each example's loss, counts and records depend on that example alone.

B: examples (rows), U: units of R rows each (of one, unless said).
"""

from typing import Any

import jax
import jax.numpy as jnp

from dpx.clipping import crossings, index_bounds, joint
from dpx.clipping.book_keeping import recorded
from dpx.clipping.layout import SHARED, Layout, Mixed, Rows
from dpx.clipping.op import Op
from dpx.clipping.program import Program
from dpx.clipping.row_flow import Flow
from dpx.clipping.sites import Site
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
    crossings.check_collectives(closed.jaxpr)
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
