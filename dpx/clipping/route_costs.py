"""Counts what each exact way to a parameter's norm and clipped sum would cost for one unit, from shapes alone.

Counted is what comes on top of the loss and of the cotangents of its activations: FLOPs of products, bytes that are held until the
norm of the whole unit is known, and as one number the cost, FLOPs and the bytes that they move (`norms.cost`).

U: units, T: tokens of all uses, p, d: a matrix's rows and columns.
"""

import math
from typing import Any, Literal, NamedTuple

import jax

from dpx.clipping import joint, norms
from dpx.clipping.forms import Form, Outer, Part, Rows
from dpx.clipping.joint import Key, Norms, form_shapes, layers_along
from dpx.clipping.program import Program

Way = Literal["kept", "gram", "recomputed", "pairs", "by_id", "formed", "second_pass", "vmap"]
MOVED = norms.FLOPS_PER_BYTE


class RouteCost(NamedTuple):
    """What one way costs for one unit.

    `kept` forms the gradient once, for the norm and the sum; `gram` takes the norm from products between positions and forms the sum;
    `recomputed` forms both. A lookup's cotangents are compared in `pairs`, or added up `by_id`. `formed` is a gradient that autodiff forms.
    `second_pass` is what `method="ghost"` computes once more. `vmap` is what `method="vmap"` adds for this parameter: it forms the gradient
    and holds all of it.
    """

    way: Way
    flops: int
    bytes: int
    cost: int
    is_taken: bool

    def times(self, count: int) -> "RouteCost":
        """Returns the cost of so many alike."""
        return self._replace(flops=count * self.flops, bytes=count * self.bytes, cost=count * self.cost)


def of_parameter(path: str, program: Program, sources: Norms) -> tuple[RouteCost, ...]:
    """Returns the ways to the norm and sum of the parameter at `path`; the ways of different uses, or layers, are added up.

    The last one is `vmap`.
    """
    found: list[RouteCost] = []
    for key, uses in sources.shared.items():
        if key[0] == path:
            alike = _of_shared(key, [form_shapes(use) for use in uses], sources)
            found += [cost.times(math.prod(layers_along(uses[0]))) for cost in alike]
    for part in sources.apart:
        if any(reference is not None and reference.path == path for reference in part.references):
            found += _of_apart(part, program)
    # Of the gradient itself `vmap` holds every number, also of what no use reads.
    found.append(RouteCost("vmap", 0, size := 4 * math.prod(program.session.shapes[path]), MOVED * 3 * size, False))
    added: dict[tuple[Way, bool], RouteCost] = {}
    for cost in found:
        known = added.get((cost.way, cost.is_taken), cost.times(0))
        sums = {name: getattr(known, name) + getattr(cost, name) for name in ("flops", "bytes", "cost")}
        added[cost.way, cost.is_taken] = known._replace(**sums)
    by_vmap = added.pop(("vmap", False))
    return (*added.values(), by_vmap)


def beside_vmap(costs: tuple[RouteCost, ...]) -> float:
    """Returns the cost of the ways that are taken, divided by that of `vmap`, the last one."""
    return sum(cost.cost for cost in costs if cost.is_taken) / max(1, costs[-1].cost)


def by_vmap(costs: tuple[RouteCost, ...]) -> tuple[RouteCost, ...]:
    """Returns the ways to a parameter's norm and sum if `vmap` is taken."""
    return tuple(cost._replace(is_taken=cost.way == "vmap") for cost in costs)


def by_ghost(costs: tuple[RouteCost, ...]) -> tuple[RouteCost, ...]:
    """Returns the ways that are taken where no gradient is kept, and what the second pass adds to them.

    It multiplies by the parameter as the first one does, forward and backward, and forms what the first one has formed and not held.
    """
    *ways, vmap = costs
    again = [cost for cost in ways if cost.is_taken and cost.way in ("kept", "formed")]
    flops = 2 * vmap.flops
    second = RouteCost("second_pass", flops + sum(cost.flops for cost in again), 0, flops + sum(cost.cost for cost in again), True)
    return (*ways, second, vmap)


def of_matrix(T: int, p: int, d: int, taken: Way, times: int = 1) -> list[RouteCost]:
    """Returns the ways of `times` matrices [p, d] that T tokens meet; `vmap` without the gradient that it holds."""
    product, records, gradient = 2 * T * p * d, 4 * T * (p + d), 4 * p * d
    ways: dict[norms.Form, tuple[float, int]] = {
        "kept": (product, gradient),
        "gram": (product + norms.gram_flops(T, p, d), records),
        "recomputed": (2 * product, records),
    }
    found = [RouteCost(way, int(flops), size, norms.cost(way, T, p, d), way == taken) for way, (flops, size) in ways.items()]
    return [cost.times(times) for cost in (*found, RouteCost("vmap", product, 0, product + MOVED * records, False))]


def of_lookup(T: int, d: int, rows_of_table: int, is_kept: bool = False) -> list[RouteCost]:
    """Returns the ways of T lookups of rows [d]; `vmap` without the gradient that it holds."""
    is_by_id, count, cotangents = norms.is_added_by_id(T, rows_of_table), norms.blocks(T), 4 * T * d
    ways: dict[Literal["kept", "pairs", "by_id"], tuple[int, int, bool]] = {
        "kept": (0, 4 * rows_of_table * d, is_kept),
        "pairs": (T * T * d * (count + 1) // count, cotangents, not is_kept and not is_by_id),
        "by_id": (0, cotangents, not is_kept and is_by_id),
    }
    found = [RouteCost(way, flops, size, norms.lookup_cost(way, T, d, rows_of_table), taken) for way, (flops, size, taken) in ways.items()]
    return [*found, RouteCost("vmap", 0, 0, MOVED * cotangents, False)]


def _of_shared(key: Key, uses: list[Form], sources: Norms) -> list[RouteCost]:
    outer = [form for form in uses if isinstance(form, Outer)]
    rows = [form for form in uses if isinstance(form, Rows)]
    is_kept, found = key in sources.kept, list[RouteCost]()
    if parts := [form for form in uses if isinstance(form, Part)]:
        found += _of_parts([*parts, *outer], math.prod(sources.shape_of(key)), is_kept)
    elif outer:
        T, p, d = sum(form.a.shape[1] for form in outer), outer[0].a.shape[-1], outer[0].g.shape[-1]
        found += of_matrix(T, p, d, "kept" if is_kept else norms.choose(T, p, d, False))
    if rows:
        T, d = sum(form.id.shape[1] for form in rows), rows[0].g.shape[-1]
        lookups = of_lookup(T, d, sources.shape_of(key)[0], is_kept)
        # Rows are added to a gradient that products have formed.
        shared = RouteCost("kept", 0, 0, MOVED * 4 * T * d, is_kept)
        found += [shared if (outer or parts) and cost.way == "kept" else cost for cost in lookups]
    size = 4 * math.prod(sources.shape_of(key))
    return found or [RouteCost("formed", 0, size, MOVED * 3 * size, True)]


def _of_parts(uses: list[Any], numbers: int, is_kept: bool) -> list[RouteCost]:
    """Returns the ways of a parameter, of so many numbers, whose gradient is formed from products with parts of it."""
    flops = records = 0
    for form in uses:
        rows, p, d = math.prod(form.a.shape[1:-1]), form.a.shape[-1], form.g.shape[-1]
        flops, records = flops + 2 * rows * p * d, records + 4 * rows * (p + d)
    gradient = 4 * numbers
    return [
        RouteCost("kept", flops, gradient, flops + MOVED * (records + 3 * gradient), is_kept),
        RouteCost("recomputed", 2 * flops, records, 2 * flops + MOVED * (2 * records + 2 * gradient), not is_kept),
        RouteCost("vmap", flops, 0, flops + MOVED * records, False),
    ]


def _of_apart(part: joint.Part, program: Program) -> list[RouteCost]:
    site = part.site
    path, times = part.first.path, math.prod(site.loops)
    if path in program.session.matrices:
        T, groups, p, d, form = program.session.matrices[path]
        return of_matrix(T, p, d, form, times * groups)
    if path in program.session.lookups:
        return [cost.times(times) for cost in of_lookup(*program.session.lookups[path])]
    units = program.examples // program.session.rows_per_unit
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(site.record)) // units
    return [RouteCost("formed", 0, size, MOVED * 3 * size, True)]
