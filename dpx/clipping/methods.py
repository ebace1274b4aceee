"""Computes the clipped sum of a loss that takes the whole microbatch: by `vmap`, or from the records of the ops in its traced program.

B: examples (rows), U: units of R rows each (of one, unless said), L: stacked layers.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpx.clipping import book_keeping, groups, joint, norms, row_flow
from dpx.clipping.groups import Weights, factor_of
from dpx.clipping.probes import trained_shapes
from dpx.clipping.program import traced
from dpx.clipping.result import (
    KEPT_BYTES,
    ClippedSum,
    LossesFn,
    Units,
    batch_size,
    check_losses,
    check_rows,
    flags,
    of_no_rows,
    with_counts,
    zero_unless,
)
from dpx.clipping.separate import check_separate
from dpx.clipping.trained_and_frozen import bound, check_reached, check_trained_reached
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
    checked: bool = True,
) -> ClippedSum:
    """Computes `dpx.clipped_sum` by `vmap`, `ghost` or `book_keeping`, with the same arguments and errors."""
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
        options: dict[str, Any] = {"kept_bytes": kept_bytes, "fused": fused, "rows_per_unit": rows_per_unit, "checked": checked}
        run = partial(sum_by, method, losses_fn, params, weights=weights, frozen=frozen, **options)
        return of_no_rows(lambda batch, is_padding_B: run(batch, is_padding_B=is_padding_B), batch, rows_per_unit)
    batch = units.filled(batch)
    if method == "vmap":
        # Autodiff would round each example's gradient to the parameter's type, or make it infinite.
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            reason = f"is of type {leaf.dtype}, to which method=vmap would round each gradient"
            require(not norms.is_tiny(leaf.dtype), path_name(path), reason, "Give it in float32, or use method='book_keeping'")
        check_trained_reached(losses_fn, params, frozen, batch)
        return _vmap(bound(losses_fn, frozen), params, batch, weights, units)
    options = {"kept_bytes": kept_bytes, "fused": fused, "rows_per_unit": rows_per_unit}
    program = traced(losses_fn, params, batch, options, examples, frozen)
    if frozen is not None:
        check_reached(program.closed.jaxpr, program.paths)
    row_flow.check_collectives(program.closed.jaxpr)
    # Ghost clipping keeps no gradients.
    left = program.session.kept_bytes if method == "book_keeping" else 0
    norms_of_uses = joint.norms_of(program, getattr(weights, "per_layer", False), factor_of(weights), left)
    if checked:
        check_separate(losses_fn, program, norms_of_uses)
    return (book_keeping.ghost_sum if method == "ghost" else book_keeping.clipped_sum)(program, norms_of_uses, weights, units)


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
    own_types, params_f32 = params, jax.tree.map(norms.at_least_float32, params)
    row_flow.check(loss_of_one, params_f32, *jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), by_unit))
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
