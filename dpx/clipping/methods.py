"""The clipped sum of a loss that takes the whole microbatch: by `vmap`, or from the records that the ops of its traced program keep.

B: examples (rows), U: units of R rows each (of one, unless said), L: stacked layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from dpx.clipping import book_keeping, crossings, ghost, groups, joint, norms, reach
from dpx.clipping.frozen import bound
from dpx.clipping.program import check_losses, traced, with_counts
from dpx.clipping.result import KEPT_BYTES, ClippedSum, LossesFn, batch_size, zero_unless
from dpx.clipping.separate import check_separate
from dpx.clipping.units import Units
from dpx.clipping.weights import Weights
from dpx.declaration import require
from dpx.parameter_path import path_name


def sum_by(
    method: str,
    losses_fn: LossesFn,
    params: Any,
    batch: Any,
    *,
    weights: Weights,
    frozen: Any = None,
    is_padding_B: Bool[Array, " B"] | None = None,
    kept_bytes: int = KEPT_BYTES,
    fused: bool = True,
    rows_per_unit: int = 1,
    checked: bool = True,
) -> ClippedSum:
    """`dpx.clipped_sum` by `vmap`, `ghost` or `book_keeping`, with its arguments and errors."""
    check_untracked(params, frozen, batch)
    examples = batch_size(batch)
    is_padding_B = jnp.zeros((examples,), bool) if is_padding_B is None else is_padding_B
    is_flat, reason = is_padding_B.shape == (examples,), f"is not one flag for each of {examples} rows"
    require(is_flat, f"is_padding_B{is_padding_B.shape}", reason, "Give it the shape [B]")
    units = Units(rows_per_unit, is_padding_B)
    batch = units.filled(batch)
    if method == "vmap":
        reach.check(losses_fn, params, frozen, batch)
        return _vmap(bound(losses_fn, frozen), params, batch, weights, units)
    require(method in ("ghost", "book_keeping"), f"clipping={method}", "no such method", "Use book_keeping, ghost, vmap or traced")
    options = {"kept_bytes": kept_bytes, "fused": fused, "rows_per_unit": rows_per_unit}
    program = traced(losses_fn, params, batch, options, examples, frozen)
    if frozen is not None:
        reach.check_program(program)
    crossings.check_collectives(program.closed.jaxpr)
    norms_of_uses = joint.norms_of(program, getattr(weights, "per_layer", False))
    if checked:
        check_separate(losses_fn, program, norms_of_uses)
    return (ghost if method == "ghost" else book_keeping).clipped_sum(program, norms_of_uses, weights, units)


def check_untracked(*trees: Any) -> None:
    """Raises `ConfigError` inside a `shard_map` that tracks varying values: there the gradient of a replicated parameter is summed over
    devices before anything is clipped."""
    axes = sorted({str(axis) for leaf in jax.tree.leaves(trees) for axis in _varying(leaf)})
    reason = "tracks what varies, and would add gradients up over devices before they are clipped"
    require(not axes, f"shard_map over {', '.join(axes)}", reason, "Use jax.shard_map(..., check_vma=False)")


def _varying(leaf: Any) -> Any:
    return getattr(getattr(jax.typeof(leaf), "manual_axis_type", None), "varying", ())


def _vmap(losses_fn: LossesFn, params: Any, batch: Any, weights: Weights, units: Units) -> ClippedSum:
    """The reference: every example's gradient in memory, then one contraction with the clip vector."""

    def loss_of_one(params, rows, is_padding_R):
        returned = with_counts(losses_fn(params, rows))
        check_losses(returned[0], units.rows)
        losses_1, counts = Units(units.rows, is_padding_R).summed(returned)
        return losses_1[0], (losses_1[0], jax.tree.map(lambda leaf: leaf[0], counts))

    by_unit = jax.tree.map(lambda leaf: leaf.reshape(-1, units.rows, *leaf.shape[1:]), (batch, units.is_padding_B))
    params_f32 = jax.tree.map(norms.at_least_float32, params)
    crossings.check(loss_of_one, params_f32, *jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), by_unit))
    grads, (losses_B, counts) = jax.vmap(jax.grad(loss_of_one, has_aux=True), in_axes=(None, 0, 0))(params_f32, *by_unit)
    leaves = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(grads)]
    clipped = groups.clip(weights, [_leaf_squares(path, leaf) for path, leaf in leaves], losses_B, units.is_padding_U)
    # A contraction with the clip vector: scaling and then summing over the batch is 16 times slower on XLA's CPU backend.
    summed = [_contract(_weights(clipped, path, leaf), zero_unless(clipped.is_counted_B, leaf)) for path, leaf in leaves]
    losses_B, counts = zero_unless(clipped.is_counted_B, (losses_B, counts))
    total = jax.tree.unflatten(jax.tree.structure(grads), summed)
    return ClippedSum(total, clipped.norms_B, losses_B, counts, clipped.is_counted_B)


def _leaf_squares(path: str, leaf_B: Array) -> groups.Squares:
    is_stacked = groups.is_stacked(path)
    values = jnp.square(leaf_B).sum(tuple(range(2 if is_stacked else 1, leaf_B.ndim)))
    return groups.Squares(path, values.T, "each" if is_stacked else None)


def _weights(clipped: groups.Clipped, path: str, leaf_B: Array) -> Array:
    return clipped.weights_of(path, "each", leaf_B.shape[1]) if groups.is_stacked(path) else clipped.weights_of(path, None)


def _contract(weights: Array, leaf_B: Array) -> Array:
    """sum_b w_b leaf_b, or sum_b w_lb leaf_bl where layers are stacked."""
    equation = "b,b...->..." if weights.ndim == 1 else "lb,bl...->l..."
    return jnp.einsum(equation, weights, leaf_B, precision="highest")
