"""Computes squared norms, of parameters with one use by their op and of those that several uses share, and counts what each way costs.

A part of an op is *apart* if nothing else reads its parameters and no loop uses them more than once: the op alone gives its norm. All
other parameters are *shared*: the norm of each is the norm of the sum of the gradients of its uses (forms.py).

The cost of an exact way to a parameter's norm and clipped sum is counted for one unit, from shapes alone: what comes on top of the loss and
of the cotangents of its activations. It is the FLOPs of products, the bytes that are held until the norm of the whole unit is known, and as
one number the FLOPs and the bytes that they move (`norms.cost`).

U: units, T: tokens of all uses, p, d: a matrix's rows and columns.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpx.clipping import bounds, forms, groups, norms
from dpx.clipping.bounds import Bounded
from dpx.clipping.forms import Form, Outer, Rows, Use
from dpx.clipping.groups import Squares, no_factor
from dpx.clipping.op import ELSEWHERE, leaf_names
from dpx.clipping.program import Program
from dpx.clipping.readers import Layer, Reference, Site
from dpx.declaration import ConfigError, require


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Part `number` of a site's op; `places` are the positions of its leaves among all leaves of the op, without leaves declared frozen."""

    site: Site
    number: int
    places: tuple[int, ...]

    @property
    def references(self) -> list[Reference | None]:
        """Returns the parameter of each leaf, None if it is not trained."""
        return [self.site.leaves[place] for place in self.places]

    @property
    def first(self) -> Reference:
        """Returns the parameter whose group the part is clipped with."""
        return next(reference for reference in self.references if reference is not None)

    @property
    def is_trained(self) -> bool:
        """Returns whether any of its leaves is trained."""
        return any(reference is not None for reference in self.references)

    @property
    def layer(self) -> groups.Layer:
        """Returns the layer of a stack to which the part belongs."""
        return "each" if self.site.op.stacked else layer_of(self.first)


# A parameter or a part of it, by path, indices, and the box that an op counts as a separate parameter.
Key = tuple[str, tuple[int, ...], tuple[tuple[int, int, int], ...] | None]


class Reading(NamedTuple):
    """One use of a parameter: `reference` names the parameter that is the leaf at `place` of the op of `part`."""

    part: Part
    place: int
    reference: Reference

    @property
    def key(self) -> Key:
        """Returns what is used."""
        return key_of(self.part.site, self.place)

    @property
    def name(self) -> str:
        """Returns the leaf's place among the leaves of the op, such as "norm/scale"."""
        return leaf_names(self.part.site.shapes)[self.place]


Uses = dict[Key, list[Reading]]


@dataclasses.dataclass(frozen=True)
class Norms:
    """The sources of the squared norms of a program: separate parts, and the uses of shared parameters.

    The gradients of the parameters in `kept`, which are shared, are formed once, for the norm and for the sum.
    """

    apart: list[Part]
    shared: Uses
    kept: frozenset[Key]
    # Bytes of all gradients that are better formed once, whether memory allows it or not.
    wanted_bytes: int


def key_of(site: Site, place: int) -> Key:
    """Returns the key of the trained parameter that is the leaf at `place` of a site's op."""
    reference = site.leaves[place]
    assert reference is not None
    return reference.path, reference.indices, site.op.box(leaf_names(site.shapes)[place])


def layer_of(reference: Reference) -> groups.Layer:
    """Returns the layer of a stack to which the parameter belongs: its number, "each" for a loop over layers, or None."""
    if not reference.selected:
        return None
    return "each" if isinstance(reference.selected[0], Layer) else reference.selected[0]


def parts_of(site: Site) -> list[Part]:
    """Returns the parts of a site's op, with their trained leaves."""
    by_part: list[list[int]] = [[] for _ in range(site.op.parts)]
    for place, name in enumerate(leaf_names(site.shapes)):
        if site.op.trains(name):
            by_part[site.op.part(name)].append(place)
    return [Part(site, number, tuple(places)) for number, places in enumerate(by_part)]


def norms_of(program: Program, per_layer: bool, factor: Callable[[str], float] = no_factor, kept_bytes: int = 0) -> Norms:
    """Finds which ops give the norms of `program`; `factor` multiplies each parameter's gradient.

    Up to `kept_bytes` of gradients of shared parameters are formed once, for the norm and for the sum.

    Raises `ConfigError` for a parameter that no op reads, for a parameter with several uses if an op has no rule for the products
    between them, and for parameters of one op that are clipped apart or multiplied by different factors.
    """
    parts = [part for site in program.sites for part in parts_of(site) if part.is_trained]
    uses: Uses = {}
    for part in parts:
        for place, reference in zip(part.places, part.references, strict=True):
            if reference is not None:
                use = Reading(part, place, reference)
                uses.setdefault(use.key, []).append(use)
    kinds: dict[str, set[tuple[bool, ...]]] = {path: set() for path in program.session.shapes}
    for (path, *_), its_uses in uses.items():
        kinds[path].update(tuple(isinstance(entry, Layer) for entry in use.reference.selected) for use in its_uses)
    for path, its_kinds in kinds.items():
        require(bool(its_kinds), path, "no op claims this parameter, so it would not be clipped", ELSEWHERE)
        require(len(its_kinds) == 1, path, "is used as a whole in one place and layer by layer in another", ELSEWHERE)

    is_apart = {part: all(_is_alone(part.site, place, uses) for place in part.places) for part in parts}
    apart = [part for part in parts if is_apart[part]]
    shared = {key: its_uses for key, its_uses in uses.items() if not all(is_apart[use.part] for use in its_uses)}
    _check(parts, shared, per_layer, factor)

    units = program.examples // program.session.rows_per_unit
    wanted = {
        key: 4 * units * math.prod((*layers_along(its_uses[0]), *_shape_of(its_uses[0])))
        for key, its_uses in shared.items()
        if forms.is_formed_once([form_shapes(use) for use in its_uses], _shape_of(its_uses[0]))
    }
    # The first parameters whose bytes fit.
    kept, left = set[Key](), kept_bytes
    for key, size in wanted.items():
        if size <= left:
            kept.add(key)
            left -= size
    return Norms(apart, shared, frozenset(kept), sum(wanted.values()))


def layers_along(use: Reading) -> tuple[int, ...]:
    """Returns the lengths of the loops that run along the parameter: each of its layers has a separate norm."""
    return tuple(use.part.site.loops[depth] for depth in use.reference.depths)


def _is_alone(site: Site, place: int, uses: Uses) -> bool:
    reference = site.leaves[place]
    if reference is None:
        return False
    key = key_of(site, place)
    return key[2] is None and len(uses[key]) == 1 and len(reference.depths) == len(site.loops)


def _check(parts: list[Part], shared: Uses, per_layer: bool, factor: Callable[[str], float]) -> None:
    """Checks that uses can be joined, and that every parameter is weighted with the group, and multiplied by the factor, of its norm."""
    for (path, *_), uses in shared.items():
        for use in uses:
            site = use.part.site
            if use.name not in jax.eval_shape(site.over_loops(partial(site.op.gradients, site.shapes)), site.record):
                names = sorted({other.part.site.op.name for other in uses})
                how = f"used by {' and '.join(names)} {len(uses)} times" if len(uses) > 1 else f"used by {names[0]} repeatedly, or in part"
                raise ConfigError(path, f"{how}, and {site.op.name} has no rule for the products between uses", ELSEWHERE)
    for part in parts if per_layer else ():
        if groups.is_stacked(part.first.path) and part.layer is None:
            reason = "is under `layers`, but the loss does not use it layer by layer as clip=per_layer requires"
            raise ConfigError(part.first.path, reason, "Rename it, or use clip=flat")
    for (path, *_), uses in shared.items() if per_layer else ():
        for part, _, own in uses:
            whole = part.first
            is_one = groups.group(own.path, layer_of(own)) == groups.group(whole.path, layer_of(whole))
            require(is_one, path, f"is clipped together with {whole.path} by op {part.site.op.name}", "Use clip=flat")
    # The norm of a part is taken once.
    for part in parts:
        own = {factor(reference.path): reference.path for reference in part.references if reference is not None}
        if len(own) > 1:
            paths = " and ".join(sorted(own.values()))
            reason = f"are of one op, {part.site.op.name}, and have different factors before clipping"
            raise ConfigError(paths, reason, "Give them one factor")


def squares(
    sources: Norms, records: Mapping[Site, Any], own: Callable[[Site], tuple[Array | Bounded, ...]]
) -> tuple[list[Squares], dict[Key, Array]]:
    """Returns all squared norms in the form in which they are clipped, and the gradients of the parameters in `sources.kept`.

    These are [U, ...], with the axes of loops along the parameter in front.

    `own(site)` gives an op's own squared norms, one for each part; `records` holds the records of the sites with shared parameters.
    """
    squared = [Squares(part.first.path, bounds.upper(own(part.site)[part.number]), part.layer) for part in sources.apart]
    cache: dict[Site, dict[str, Form]] = {}
    formed: dict[Key, Array] = {}
    for key, uses in sources.shared.items():
        if key in sources.kept:
            together, square = partial(forms.kept, shape=_shape_of(uses[0])), norms.squares
            for _ in uses[0].reference.depths:
                together, square = jax.vmap(together), jax.vmap(square)
            formed[key] = together([_added_up(use, records[use.part.site], cache) for use in uses])
            square_U = square(formed[key])
        else:
            square_U = _shared_square(uses, records, own, cache)
        squared.append(Squares(key[0], square_U, layer_of(uses[0].reference)))
    return squared, formed


def form_shapes(use: Reading) -> Form:
    """Returns the shapes of the gradient of a use, of which loops along the parameter take one layer."""

    def of_layer(record: Any) -> Form:
        form, along = _form(use, record), len(use.reference.depths)
        form = jax.tree.map(lambda x: x[(0,) * along], form)
        rounds = len(use.part.site.loops) - along
        return forms.merged(form, rounds) if rounds else form

    return jax.eval_shape(of_layer, use.part.site.record)


def _shape_of(use: Reading) -> tuple[int, ...]:
    *_, box = use.key
    return jax.tree.leaves(use.part.site.shapes)[use.place].shape if box is None else tuple(size for _, size, _ in box)


def _form(use: Reading, record: Any, cache: dict[Site, dict[str, Form]] | None = None) -> Form:
    """Returns the gradient of a use in each round of the loops around it; loops along the parameter are in front."""
    site, cache = use.part.site, {} if cache is None else cache
    if site not in cache:
        cache[site] = site.over_loops(partial(site.op.gradients, site.shapes))(record)
    depths = use.reference.depths
    return jax.tree.map(lambda x: jnp.moveaxis(x, depths, range(len(depths))), cache[site][use.name])


def _added_up(use: Reading, record: Any, cache: dict[Site, dict[str, Form]] | None = None) -> Form:
    """Returns the gradient of a use added up over the rounds of loops that do not run along the parameter."""
    rounds = len(use.part.site.loops) - len(use.reference.depths)
    add = partial(forms.merged, rounds=rounds) if rounds else lambda form: form
    for _ in use.reference.depths:
        add = jax.vmap(add)
    return add(_form(use, record, cache))


def _shared_square(uses: list[Reading], records: Mapping[Site, Any], own: Any, cache: dict[Site, dict[str, Form]]) -> Array:
    """Returns the squared norm of the sum over all uses, [..., U], with the axes of the loops along the parameter in front."""
    ready, alone = [], []
    for use in uses:
        part, site = use.part, use.part.site
        rounds = len(site.loops) - len(use.reference.depths)
        is_own = len(part.places) == 1 and not rounds
        ready.append((_form(use, records[site], cache), own(site)[part.number] if is_own else None))
        alone.append(rounds)

    def joined(given: list[Any]) -> Array:
        merged = [forms.merged(form, rounds) if rounds else form for (form, _), rounds in zip(given, alone, strict=True)]
        return forms.squares([Use(form, own_U) for form, (_, own_U) in zip(merged, given, strict=True)], _shape_of(uses[0]))

    for _ in uses[0].reference.depths:
        joined = jax.vmap(joined)
    return joined(ready)


def leaves_of(site: Site, by_path: Mapping[str, Array]) -> Any:
    """Returns the op's parameters, with the axes of the loops along them in front; a leaf whose value no norm or sum needs is zeros."""
    shapes, tree = jax.tree.flatten(site.shapes)
    values = [
        jnp.zeros(shape.shape, shape.dtype) if reference is None else reference.select(by_path[reference.path])
        for reference, shape in zip(site.values, shapes, strict=True)
    ]
    return jax.tree.unflatten(tree, values)


def own_squares(site: Site, leaves: Any, record: Any) -> tuple[Array | Bounded, ...]:
    """Returns the op's own squared norms, [*loops, U] for each part."""
    run, tree = site.op.squared_norm, jax.tree.structure(site.shapes)
    for depth in reversed(range(len(site.loops))):
        along = [0 if reference is not None and depth in reference.depths else None for reference in site.values]
        run = jax.vmap(run, in_axes=(jax.tree.unflatten(tree, along), 0))
    return run(leaves, record)


def part_weights(clipped: groups.Clipped, site: Site) -> tuple[Array, ...]:
    """Returns the clip weights of each part: [*loops, U], or [*loops, L, U] for an op that is stacked."""
    weights, units = [], clipped.is_counted_B.shape[0]
    for part in parts_of(site):
        shape = (*site.loops, units)
        if not part.is_trained:
            own = jnp.zeros((units,))
        elif site.op.stacked:
            layers = jax.tree.leaves(site.shapes)[0].shape[0]
            own, shape = clipped.weights_of(part.first.path, "each", layers), (*site.loops, layers, units)
        elif part.layer == "each":
            depth = part.first.depths[0]
            own = clipped.weights_of(part.first.path, "each", site.loops[depth])
            own = own.reshape(-1, *(1,) * (len(site.loops) - depth - 1), units)
        else:
            own = clipped.weights_of(part.first.path, part.layer)
        weights.append(jnp.broadcast_to(own, shape))
    return tuple(weights)


def use_weights(clipped: groups.Clipped, use: Reading) -> Array:
    """Returns the clip weights of a shared parameter, [*layers, U] with the layers that loops run along."""
    layers, units = layers_along(use), clipped.is_counted_B.shape[0]
    layer = layer_of(use.reference)
    own = clipped.weights_of(use.reference.path, layer, layers[0] if layer == "each" else 0)
    return jnp.broadcast_to(own.reshape(*own.shape[:-1], *(1,) * (len(layers) + 1 - own.ndim), units), (*layers, units))


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
            own, times = part.first.path, math.prod(part.site.loops)
            if own in program.session.matrices:
                T, alike, p, d, form = program.session.matrices[own]
                found += of_matrix(T, p, d, form, times * alike)
            elif own in program.session.lookups:
                found += [cost.times(times) for cost in of_lookup(*program.session.lookups[own])]
            else:
                units, leaves = program.examples // program.session.rows_per_unit, jax.tree.leaves(part.site.record)
                size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) // units
                found.append(RouteCost("formed", 0, size, MOVED * 3 * size, True))
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
    shape, is_kept, found = _shape_of(sources.shared[key][0]), key in sources.kept, list[RouteCost]()
    size = 4 * math.prod(shape)
    if parts := [form for form in uses if isinstance(form, forms.Part)]:
        # The gradient is formed from products with parts of the parameter.
        flops = records = 0
        for form in (*parts, *outer):
            positions, p, d = math.prod(form.a.shape[1:-1]), form.a.shape[-1], form.g.shape[-1]
            flops, records = flops + 2 * positions * p * d, records + 4 * positions * (p + d)
        found += [
            RouteCost("kept", flops, size, flops + MOVED * (records + 3 * size), is_kept),
            RouteCost("recomputed", 2 * flops, records, 2 * flops + MOVED * (2 * records + 2 * size), not is_kept),
            RouteCost("vmap", flops, 0, flops + MOVED * records, False),
        ]
    elif outer:
        T, p, d = sum(form.a.shape[1] for form in outer), outer[0].a.shape[-1], outer[0].g.shape[-1]
        found += of_matrix(T, p, d, "kept" if is_kept else norms.choose(T, p, d, False))
    if rows:
        T, d = sum(form.id.shape[1] for form in rows), rows[0].g.shape[-1]
        lookups = of_lookup(T, d, shape[0], is_kept)
        # Rows are added to a gradient that products have formed.
        shared = RouteCost("kept", 0, 0, MOVED * 4 * T * d, is_kept)
        found += [shared if (outer or parts) and cost.way == "kept" else cost for cost in lookups]
    return found or [RouteCost("formed", 0, size, MOVED * 3 * size, True)]
