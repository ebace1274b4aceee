"""Counts what each exact way to a parameter's norm and clipped sum would cost for one unit, from shapes alone.

Counted is what comes on top of the loss and of the cotangents of its activations: FLOPs of products, and bytes that are held until the
norm of the whole unit is known.

U: units, T: tokens of all uses, p, d: a matrix's rows and columns.
"""

import math
from typing import Literal, NamedTuple

import jax

from dpx.clipping import norms
from dpx.clipping.forms import Form, Outer, Rows
from dpx.clipping.joint import Key, Norms, Part, form_shapes
from dpx.clipping.program import Program

Way = Literal["kept", "gram", "recomputed", "pairs", "by_id", "formed", "vmap"]


class RouteCost(NamedTuple):
    """What one way costs for one unit.

    `kept` forms the gradient once, for the norm and the sum; `gram` takes the norm from products between positions and forms the sum;
    `recomputed` forms both. A lookup's cotangents are compared in `pairs`, or added up `by_id`. `formed` is a gradient that autodiff forms.
    `vmap`, never taken, is what `method="vmap"` adds for this parameter: it forms the gradient and holds all of it.
    """

    way: Way
    flops: int
    bytes: int
    is_taken: bool


def of_parameter(path: str, program: Program, sources: Norms) -> tuple[RouteCost, ...]:
    """Returns the ways to the norm and sum of the parameter at `path`; the ways of different uses, or layers, are added up.

    The last one is `vmap`.
    """
    found: list[RouteCost] = []
    for key, uses in sources.shared.items():
        if key[0] == path:
            found += _of_shared(key, [form_shapes(use) for use in uses], sources)
    for part in sources.apart:
        if any(reference is not None and reference.path == path for reference in part.references):
            found += _of_apart(part, program)
    added: dict[tuple[Way, bool], RouteCost] = {}
    for cost in found:
        known = added.get((cost.way, cost.is_taken), cost._replace(flops=0, bytes=0))
        added[cost.way, cost.is_taken] = known._replace(flops=known.flops + cost.flops, bytes=known.bytes + cost.bytes)
    # A lookup's gradient is formed by additions alone.
    products = sum(cost.flops for cost in added.values() if cost.way == "kept")
    return (*added.values(), RouteCost("vmap", products, 4 * math.prod(program.session.shapes[path]), False))


def of_matrix(T: int, p: int, d: int, taken: Way, times: int = 1) -> list[RouteCost]:
    """Returns the ways of `times` matrices [p, d] that T tokens meet."""
    product, records, gradient = 2 * T * p * d, 4 * T * (p + d), 4 * p * d
    ways: dict[Way, tuple[float, int]] = {
        "kept": (product, gradient),
        "gram": (product + norms.gram_flops(T, p, d), records),
        "recomputed": (2 * product, records),
    }
    return [RouteCost(way, times * int(flops), times * size, way == taken) for way, (flops, size) in ways.items()]


def of_lookup(T: int, d: int, rows_of_table: int) -> list[RouteCost]:
    """Returns the ways of T lookups of rows [d]."""
    is_by_id, blocks = norms.is_added_by_id(T, rows_of_table), norms.blocks(T)
    pairs = RouteCost("pairs", T * T * d * (blocks + 1) // blocks, 4 * T * d, not is_by_id)
    return [pairs, RouteCost("by_id", 0, 4 * T * d, is_by_id)]


def _of_shared(key: Key, uses: list[Form], sources: Norms) -> list[RouteCost]:
    outer = [form for form in uses if isinstance(form, Outer)]
    rows = [form for form in uses if isinstance(form, Rows)]
    found: list[RouteCost] = []
    if outer:
        T, p, d = sum(form.a.shape[1] for form in outer), outer[0].a.shape[-1], outer[0].g.shape[-1]
        found += of_matrix(T, p, d, "kept" if key in sources.kept else norms.choose(T, p, d, False))
    if rows and key not in sources.kept:
        found += of_lookup(sum(form.id.shape[1] for form in rows), rows[0].g.shape[-1], sources.shape_of(key)[0])
    return found or [RouteCost("formed", 0, 4 * math.prod(sources.shape_of(key)), True)]


def _of_apart(part: Part, program: Program) -> list[RouteCost]:
    site = part.site
    path, times = part.first.path, math.prod(site.loops)
    if path in program.session.matrices:
        T, groups, p, d, form = program.session.matrices[path]
        return of_matrix(T, p, d, form, times * groups)
    record = site.record
    if isinstance(record, dict) and set(record) == {"id", "g"}:
        (T, d), rows = record["g"].shape[-2:], site.shapes["table"].shape[0]
        return [cost._replace(flops=times * cost.flops, bytes=times * cost.bytes) for cost in of_lookup(T, d, rows)]
    units = program.examples // program.session.rows_per_unit
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(record))
    return [RouteCost("formed", 0, size // units, True)]
