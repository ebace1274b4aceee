"""Computes the clipped sum of a loss that takes the whole microbatch: by `vmap`, or from the records of the ops in its traced program.

Book-keeping (Bu et al. 2023, arXiv 2210.00038) takes one backward pass: it stores a record for each op, norms are computed from the
records, and one contraction with the clip weights gives the sum.

Ghost clipping (Li et al. 2022) takes two: one gives the norms, a second one the sum. Every op returns its squared norm as the cotangent
of a probe, so nothing but norms outlives the first pass; an op that shares a parameter with another use returns its record, since the norm
is of both. The second pass has the same cotangent as the first, one for each loss, and each op weighs its own gradient. Li et al. make the
clip weights the cotangent instead. That is the same only where the whole backward pass is linear: one that takes a sign or a maximum
(`jax.custom_vjp`) would give a sum that is not clipped, and one in a narrow type would round the weighted cotangents again.

B: examples (rows), U: units of R rows each (of one, unless said), L: stacked layers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpx.clipping import bounds, forms, groups, joint
from dpx.clipping.groups import (
    KEPT_BYTES,
    ClippedSum,
    LossesFn,
    Units,
    Weights,
    batch_size,
    check_losses,
    check_rows,
    factor_of,
    flags,
    of_no_rows,
    with_counts,
    zero_unless,
)
from dpx.clipping.joint import Key, Norms
from dpx.clipping.norms import as_stored, at_least_float32, contracted_units, is_tiny
from dpx.clipping.op import leaf_names, trained_shapes
from dpx.clipping.program import Pass, Program, by_leaf, check_collectives, check_program, traced, without_copies, zero_sums
from dpx.clipping.readers import Reference, Site, bound, check_reached, check_trained_reached
from dpx.declaration import require
from dpx.randomness import path_name


def sum_by(
    method: Any,
    losses_fn: LossesFn,
    params: Any,
    batch: Any,
    *,
    weights: Any,
    frozen: Any = None,
    is_padding_B: Any = None,
    kept_bytes: int = KEPT_BYTES,
    fused: bool = True,
    rows_per_unit: Any = 1,
    check: Callable[[LossesFn, Program, Norms], None] | None = None,
) -> ClippedSum:
    """Computes `dpx.clipped_sum` by `vmap`, `ghost` or `book_keeping`, with the same arguments and errors.

    `check` sees the traced program, which `vmap` does not have, before anything is computed.
    """
    is_known = method in ("book_keeping", "ghost", "vmap")
    require(is_known, f"method={method!r}", "no such method", "Use book_keeping, ghost or vmap, and in dpx.clipped_sum also traced")
    examples = batch_size(batch)
    check_untracked(params, frozen, batch)
    check_rows(rows_per_unit)
    is_padding_B = flags(is_padding_B, examples, "is_padding_B")
    units = Units(rows_per_unit, is_padding_B)
    trained_shapes(params)
    require(
        callable(weights),
        f"weights={weights!r}",
        "is not a function of norms",
        "Give a function such as lambda norms_B: 1 / jnp.maximum(norms_B, 1)",
    )
    if examples == 0:
        options: dict[str, Any] = {"kept_bytes": kept_bytes, "fused": fused, "rows_per_unit": rows_per_unit, "check": check}
        run = partial(sum_by, method, losses_fn, params, weights=weights, frozen=frozen, **options)
        return of_no_rows(lambda batch, is_padding_B: run(batch, is_padding_B=is_padding_B), batch, rows_per_unit)
    batch = units.filled(batch)
    if method == "vmap":
        # Autodiff would round each example's gradient to the parameter's type, or make it infinite.
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            reason = f"is of type {leaf.dtype}, to which method=vmap would round each gradient"
            require(not is_tiny(leaf.dtype), path_name(path), reason, "Give it in float32, or use method='book_keeping'")
        check_trained_reached(losses_fn, params, frozen, batch)
        return _vmap(bound(losses_fn, frozen), params, batch, weights, units)
    options = {"kept_bytes": kept_bytes, "fused": fused, "rows_per_unit": rows_per_unit}
    program = traced(losses_fn, params, batch, options, examples, frozen)
    if frozen is not None:
        check_reached(program.closed.jaxpr, program.paths)
    check_collectives(program.closed.jaxpr)
    # Ghost clipping keeps no gradients.
    left = program.session.kept_bytes if method == "book_keeping" else 0
    norms_of_uses = joint.norms_of(program, getattr(weights, "per_layer", False), factor_of(weights), left)
    if check is not None:
        check(losses_fn, program, norms_of_uses)
    return (ghost_sum if method == "ghost" else book_keeping_sum)(program, norms_of_uses, weights, units)


def check_untracked(*trees: Any) -> None:
    """Raises `ConfigError` inside a `shard_map` that tracks varying values.

    There the gradient of a replicated parameter is summed over devices before anything is clipped.
    """
    kinds = [getattr(jax.typeof(leaf), "manual_axis_type", None) for leaf in jax.tree.leaves(trees) if hasattr(leaf, "dtype")]
    axes = sorted({str(axis) for kind in kinds for axis in getattr(kind, "varying", ())})
    reason = "with check_vma=True adds up gradients over devices before they are clipped"
    require(not axes, f"shard_map over {', '.join(axes)}", reason, "Use jax.shard_map(..., check_vma=False)")


def _vmap(losses_fn: LossesFn, params: Any, batch: Any, weights: Weights, units: Units) -> ClippedSum:
    """Computes the sum by the reference method: every example's gradient in memory, then one contraction with the clip weights."""

    def loss_of_one(params_f32, rows, is_padding_R):
        # In the parameters' own types, since a loop may carry one; the gradient is float32 or wider.
        params = jax.tree.map(lambda wide, own: wide.astype(own.dtype), params_f32, own_types)
        returned = with_counts(losses_fn(params, rows))
        check_losses(returned[0], units.rows)
        losses_1, counts = Units(units.rows, is_padding_R).summed(returned)
        return losses_1[0], (losses_1[0], jax.tree.map(lambda leaf: leaf[0], counts))

    by_unit = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] // units.rows, units.rows, *leaf.shape[1:]), (batch, units.is_padding_B))
    own_types, params_f32 = params, jax.tree.map(at_least_float32, params)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), by_unit)
    # Of the gradient too, because a user-defined backward pass may contain operations that the loss does not show.
    for function in (loss_of_one, jax.grad(loss_of_one, has_aux=True)):
        check_program(jax.make_jaxpr(function)(params_f32, *shapes))
    grads, (losses_B, counts) = jax.vmap(jax.grad(loss_of_one, has_aux=True), in_axes=(None, 0, 0))(params_f32, *by_unit)
    named = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(grads)]
    leaves = [(path, leaf, groups.is_stacked(path) and leaf.ndim > 1) for path, leaf in named]
    squares = [
        groups.Squares(path, jnp.square(leaf).sum(tuple(range(2 if is_stacked else 1, leaf.ndim))).T, "each" if is_stacked else None)
        for path, leaf, is_stacked in leaves
    ]
    clipped = groups.clip(weights, squares, losses_B, units.is_padding_U)

    def contracted(path: str, leaf_B: Array, is_stacked: bool) -> Array:
        """Returns sum_b w_b leaf_b, or sum_b w_lb leaf_bl if layers are stacked.

        Scaling and then summing over the batch is 16 times slower on XLA's CPU backend.
        """
        own = clipped.weights_of(path, "each", leaf_B.shape[1]) if is_stacked else clipped.weights_of(path, None)
        equation = "b,b...->..." if own.ndim == 1 else "lb,bl...->l..."
        return jnp.einsum(equation, own, zero_unless(clipped.is_counted_B, leaf_B), precision="highest")

    summed = [contracted(*leaf) for leaf in leaves]
    losses_B, counts = zero_unless(clipped.is_counted_B, (losses_B, counts))
    total = jax.tree.unflatten(jax.tree.structure(grads), summed)
    return ClippedSum(total, clipped.norms_B, losses_B, counts, clipped.is_counted_B)


# Gradients that were formed for the norm, [U, ...], and their weights [U]; the axes of loops along the parameter come first.
Kept = dict[Key, tuple[Array, Array]]


def book_keeping_sum(program: Program, norms: Norms, weights: Any, units: Units) -> ClippedSum:
    """Computes the clipped sum of a traced program; `dpx.clipped_sum` describes the result."""
    losses_B, records, counts = recorded(program, units.of_rows(jnp.ones_like(units.is_padding_U, jnp.float32)))
    losses_B, counts = units.summed((losses_B, counts))

    by_path = program.by_path()
    leaves = {site: joint.leaves_of(site, by_path) for site in program.sites}
    own = {site: joint.own_squares(site, leaves[site], records[site]) for site in program.sites}
    losses_B = jnp.where(is_finite(records, units.is_padding_U.shape[0]), losses_B, jnp.nan)
    squares, formed = joint.squares(norms, records, own.__getitem__)
    clipped = groups.clip(weights, squares, losses_B, units.is_padding_U)
    parts = {site: joint.part_weights(clipped, site) for site in program.sites}
    kept = {key: (gradient, joint.use_weights(clipped, norms.shared[key][0])) for key, gradient in formed.items()}

    def summed(keep_U: Array | None) -> Any:
        return _totals(program.params, program, leaves, records, parts, kept, keep_U)

    # Padding may hold anything. The masks cost a pass over every record: `cond` picks the unmasked path when nothing is masked.
    is_sound = jnp.all(clipped.is_finite_B)
    total = jax.lax.cond(is_sound, lambda: summed(None), lambda: summed(clipped.is_counted_B))
    losses_B, counts = zero_unless(clipped.is_counted_B, (losses_B, counts))
    return ClippedSum(total, clipped.norms_B, losses_B, counts, clipped.is_counted_B)


def unclipped(program: Program, norms: Norms, cotangent_B: Array, given: Any) -> tuple[Array, list[Any], list[Any], Any]:
    """Returns (losses_B, each op's own squared norms, all squared norms, the sum of gradients) for this cotangent of the losses."""
    losses_B, records, _ = recorded(program, cotangent_B, given)
    by_path = program.by_path(given)
    leaves = {site: joint.leaves_of(site, by_path) for site in program.sites}
    own = {site: joint.own_squares(site, leaves[site], records[site]) for site in program.sites}
    uppers = {site: tuple(map(bounds.upper, own[site])) for site in program.sites}
    ones = {site: tuple(map(jnp.ones_like, uppers[site])) for site in program.sites}
    squares, formed = joint.squares(norms, records, own.__getitem__)
    along = {key: len(norms.shared[key][0].reference.depths) for key in formed}
    kept = {key: (gradient, jnp.ones(gradient.shape[: along[key] + 1])) for key, gradient in formed.items()}
    total = _totals(given[0], program, leaves, records, ones, kept, None)
    return losses_B, list(uppers.values()), squares, total


def recorded(program: Program, cotangent_B: Array, given: Any = None) -> tuple[Array, dict[Site, Any], Any]:
    """Returns (losses_B, the record of every site, counts) for this cotangent of the losses."""

    taps = [jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), site.record) for site in program.sites]
    losses = lambda taps: program(lambda _: "record", dict(zip(program.sites, taps, strict=True)), given=given)  # noqa: E731
    losses_B, backward, counts = jax.vjp(losses, taps, has_aux=True)
    run = partial(backward, cotangent_B.astype(losses_B.dtype))
    records = (without_copies(run) if any(site.loops for site in program.sites) else run())[0]
    return losses_B, dict(zip(program.sites, jax.tree.map(as_stored, records), strict=True)), counts


def is_finite(records: dict[Site, Any], units: int) -> Array:
    """Returns a mask of the units whose records are finite, bool [U].

    Only records of ops are read whose norm may be finite where their sum is not.
    """
    finite_U = jnp.ones((units,), bool)
    for site, record in records.items():
        if site.op.norm_sees_all:
            continue
        own = site.over_loops(partial(site.op.is_finite, units=units))(record)
        finite_U &= own.all(tuple(range(own.ndim - 1)))
    return finite_U


def _totals(params: Any, program: Program, leaves: Any, records: Any, parts: Any, kept: Kept, keep_U: Array | None) -> Any:
    by_path = dict(zip(program.paths, jax.tree.leaves(params), strict=True))
    totals: dict[str, Array] = {}

    def add(reference: Reference, leaf: Array, box: Any = None) -> None:
        index: tuple[Any, ...] = tuple(slice(None) if not isinstance(entry, int) else entry for entry in reference.selected)
        index = (*index, *_places(box or ()))
        before = totals.get(reference.path)
        if reference.indices or box:
            before = zero_sums(by_path[reference.path]) if before is None else before
            totals[reference.path] = before.at[index].add(leaf)
        else:
            totals[reference.path] = leaf if before is None else before + leaf

    is_added: set[Key] = set()
    trained = {
        site: {joint.key_of(site, place): reference for place, reference in enumerate(site.leaves) if reference} for site in program.sites
    }
    summed = _site_totals([site for site in program.sites if not trained[site].keys() <= kept.keys()], leaves, records, parts, keep_U)
    for site in program.sites:
        for key in [key for key in trained[site] if key in kept and key not in is_added]:
            contracted = partial(contracted_units, keep_U=keep_U)
            for _ in trained[site][key].depths:
                contracted = jax.vmap(contracted)
            add(trained[site][key], contracted(*kept[key]), key[2])
            is_added.add(key)
        if site not in summed:
            continue
        for place, (reference, leaf) in enumerate(zip(site.leaves, by_leaf(site.op, site.shapes, summed[site]), strict=True)):
            if reference is not None and joint.key_of(site, place) not in kept:
                assert leaf is not None
                add(reference, leaf)
    return jax.tree.unflatten(jax.tree.structure(params), [totals[path] for path in program.paths])


def _site_totals(sites: list[Site], leaves: Any, records: Any, parts: Any, keep_U: Array | None) -> dict[Site, Any]:
    """Returns the weighted sum of each leaf: stacked along loops that run along the leaf, added up over other loops.

    Sites in loops of one length share one loop, so that a program has few of them.
    """
    totals: dict[Site, Any] = {}
    together: dict[int, list[Site]] = {}
    for site in sites:
        if _is_one_product(site):
            totals[site] = _of_all_rounds(site, records[site], parts[site], keep_U)
        elif site.loops:
            together.setdefault(site.loops[0], []).append(site)
        else:
            totals[site] = _of_round(site, keep_U)(leaves[site], records[site], parts[site])
    for alike in together.values():
        runs = []
        for site in alike:
            run = _of_round(site, keep_U)
            for depth in reversed(range(1, len(site.loops))):
                run = partial(_along_one, site, depth, run)
            runs.append(run)
        given = ([of[site] for site in alike] for of in (leaves, records, parts))
        totals |= dict(zip(alike, _along(alike, 0, runs, *given), strict=True))
    return totals


def _of_round(site: Site, keep_U: Array | None) -> Callable[[Any, Any, tuple[Array, ...]], Any]:
    """Returns the function that gives a site's weighted sums in one round of all loops, from leaves, record and weights."""

    def run(leaves: Any, record: Any, parts: tuple[Array, ...]) -> Any:
        if any(reference is None for reference in site.leaves) and not site.op.frozen:
            # An op with trained and frozen leaves.
            gradients = site.op.gradients(site.shapes, record if keep_U is None else site.op.masked(record, keep_U))
            one = lambda name, shape: forms.summed(gradients[name], parts[site.op.part(name)], shape.shape)  # noqa: E731
            return jax.tree_util.tree_map_with_path(lambda path, shape: one(path_name(path), shape), site.shapes)
        if keep_U is None:
            return site.op.weighted_sum(leaves, record, parts)
        return site.op.masked_sum(leaves, record, parts, keep_U)

    return run


def _is_one_product(site: Site) -> bool:
    """Returns whether a matrix that is read in every round of a loop has few enough rounds and positions for one product over all of them.

    Its weighted cotangents are then no larger than one unit's gradient for each unit.
    """
    reference, *others = site.leaves
    if not site.loops or 0 in site.loops or others or reference is None or reference.depths:
        return False
    found = list(jax.eval_shape(partial(_forms_of_all_rounds, site), site.record).values())
    return len(found) == 1 and isinstance(found[0], forms.Outer) and found[0].g.shape[1] <= found[0].a.shape[-1]


def _forms_of_all_rounds(site: Site, record: Any) -> dict[str, forms.Form]:
    by_leaf = site.over_loops(partial(site.op.gradients, site.shapes))(record)
    return {name: forms.merged(form, len(site.loops)) for name, form in by_leaf.items()}


def _of_all_rounds(site: Site, record: Any, parts: tuple[Array, ...], keep_U: Array | None) -> Any:
    if keep_U is not None:
        record = site.over_loops(lambda record: site.op.masked(record, keep_U))(record)
    (form,), (leaf,), (name,) = _forms_of_all_rounds(site, record).values(), jax.tree.leaves(site.shapes), leaf_names(site.shapes)
    # Rounds of one loop have one weight.
    weights_U, box = parts[0][(0,) * len(site.loops)], site.op.box(name)
    if box is None:
        total = forms.summed(form, weights_U, leaf.shape)
    else:
        part = forms.summed(form, weights_U, tuple(size for _, size, _ in box))
        total = jnp.zeros(leaf.shape, part.dtype).at[_places(box)].set(part)
    return jax.tree.unflatten(jax.tree.structure(site.shapes), [total])


def _places(box: Any) -> tuple[slice, ...]:
    return tuple(slice(start, start + size * step, step) for start, size, step in box)


def _along_one(site: Site, depth: int, run: Any, leaves: Any, record: Any, parts: Any) -> list[Array]:
    return _along([site], depth, [run], [leaves], [record], [parts])[0]


def _along(sites: list[Site], depth: int, runs: list[Any], leaves: list[Any], records: list[Any], parts: list[Any]) -> list[list[Array]]:
    """Maps the function of each site over the rounds of a loop around all of them.

    It takes one round at a time, because the scaled cotangents of a layer are as large as its record.
    """
    along = [[reference is not None and depth in reference.depths for reference in site.values] for site in sites]
    trained = [[site.op.trains(name) for name in leaf_names(site.shapes)] for site in sites]
    summed_along = [is_along for pair in zip(along, trained, strict=True) for is_along, is_summed in zip(*pair, strict=True) if is_summed]
    flat = [jax.tree.flatten(own) for own in leaves]

    def one(sliced: list[list], records: list[Any], parts: list[Any]) -> tuple[list, list]:
        results: list[Array] = []
        for place, ((whole, tree), run) in enumerate(zip(flat, runs, strict=True)):
            rest = iter(sliced[place])
            given = [next(rest) if is_along else leaf for leaf, is_along in zip(whole, along[place], strict=True)]
            results += jax.tree.leaves(run(jax.tree.unflatten(tree, given), records[place], parts[place]))
        split = lambda wanted: [leaf for leaf, is_along in zip(results, summed_along, strict=True) if is_along is wanted]  # noqa: E731
        return split(True), split(False)

    def body(total: list, xs: Any) -> tuple[list, list]:
        stacked, added = one(*xs)
        return [old + new for old, new in zip(total, added, strict=True)], stacked

    sliced = [[leaf for leaf, is_along in zip(whole, own, strict=True) if is_along] for (whole, _), own in zip(flat, along, strict=True)]
    xs = (sliced, records, parts)
    shapes = jax.eval_shape(one, *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs))[1]
    added, stacked = jax.lax.scan(body, [jnp.zeros(leaf.shape, leaf.dtype) for leaf in shapes], xs)
    stacked, added = iter(stacked), iter(added)
    results = iter([next(stacked) if is_along else next(added) for is_along in summed_along])
    return [[next(results) for is_summed in own if is_summed] for own in trained]


def ghost_sum(program: Program, norms: Norms, weights: Any, units: Units) -> ClippedSum:
    """Computes the clipped sum of a traced program; `dpx.clipped_sum` describes the result."""
    by_path, joint_sites = program.by_path(), {use.part.site for uses in norms.shared.values() for use in uses}

    def kind(site: Site) -> Pass:
        return "record" if site in joint_sites else "norm"

    def probe(site: Site) -> Any:
        squares = lambda record: joint.own_squares(site, joint.leaves_of(site, by_path), record)  # noqa: E731
        shapes = site.record if kind(site) == "record" else jax.eval_shape(squares, site.record)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    probes = [probe(site) for site in program.sites]
    losses = lambda probes: program(kind, dict(zip(program.sites, probes, strict=True)))  # noqa: E731
    losses_B, backward, counts = jax.vjp(losses, probes, has_aux=True)
    (records,) = backward(units.of_rows(jnp.ones_like(units.is_padding_U, losses_B.dtype)))
    records = dict(zip(program.sites, records, strict=True))
    losses_B, counts = units.summed((losses_B, counts))

    def own(site: Site) -> Any:
        return joint.own_squares(site, joint.leaves_of(site, by_path), records[site]) if kind(site) == "record" else records[site]

    # In the order of the program, so that every process lowers the same text.
    joint_records = {site: record for site, record in records.items() if site in joint_sites}
    finite_B = jnp.where(is_finite(joint_records, units.is_padding_U.shape[0]), losses_B, jnp.nan)
    clipped = groups.clip(weights, joint.squares(norms, records, own)[0], finite_B, units.is_padding_U)
    parts = {site: joint.part_weights(clipped, site) for site in program.sites}

    weighted = lambda sums: units.summed(program(lambda _: "weighted", parts, sums)[0]).sum()  # noqa: E731
    total = jax.grad(weighted)(zero_sums(program.params))
    losses_B, counts = zero_unless(clipped.is_counted_B, (losses_B, counts))
    return ClippedSum(total, clipped.norms_B, losses_B, counts, clipped.is_counted_B)
