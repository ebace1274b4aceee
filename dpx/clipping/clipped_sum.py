"""The clipped sum of per-example gradients of one microbatch: one interface, several methods, one result.

Free of collectives and of Python state: it may stand inside `shard_map`, `fori_loop` and `jit`.

B: examples (rows), U: units of R rows each (of one, unless said), L: stacked layers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dpx.clipping import groups, norms, reach
from dpx.clipping.frozen import bound
from dpx.clipping.program import check_losses, traced, with_counts, zero_sums
from dpx.clipping.units import Units
from dpx.clipping.weights import Weights
from dpx.declaration import require
from dpx.parameter_path import path_name

LossesFn = Callable[[Any, Any], tuple[Array, dict[str, Array]]]

# What one microbatch may leave in memory between its passes, where there is a choice: per-example weight gradients instead of Gram
# products, once a fused stack of layers has what it needs anyway.
KEPT_BYTES = 72 * 2**20


class ClippedSum(NamedTuple):
    """`total`: sum_b c_b grad_b (float32, like the parameters). Per example: norms before clipping, losses, counts and whether the
    example counted; they are zero where it did not (padding, or a non-finite gradient). `norms_B` is None for a plain sum.
    Where examples are units of several rows, all of these have one entry a unit, sums over its rows."""

    total: Any
    norms_B: Float[Array, " U"] | None
    losses_B: Float[Array, " U"]
    counts: dict[str, Array]
    is_counted_B: Bool[Array, " U"]


def clipped_sum(
    losses_fn: LossesFn,
    params: Any,
    batch: Any,
    *,
    weights: Weights,
    frozen: Any = None,
    is_padding_B: Bool[Array, " B"] | None = None,
    method: str = "book_keeping",
    kept_bytes: int = KEPT_BYTES,
    fused: bool = True,
    rows_per_unit: int = 1,
    checked: bool = True,
) -> ClippedSum:
    """sum_b c_b grad_b, where `losses_fn(params, batch) -> (losses_B, counts)` and c_B = weights(norms_B); float32 even
    where parameters come in bfloat16.

    Every array of `batch` has a leading example axis, and losses_B[b] must depend on row b alone. `vmap` takes any loss;
    `traced` does too, row by row (`dpx.clipped_grad`);
    `ghost` and `book_keeping` take one whose parameters all go through ops (`dpx.clipping.ops`). `kept_bytes` bounds the
    per-example weight gradients kept, and what a fused stack of layers leaves between its passes comes off it; `fused=False` keeps
    models from using their hand-scheduled blocks.
    With `rows_per_unit` R > 1, each R rows in a row are one unit: its loss is the sum of its rows' losses (padding rows stand in
    none), and the norm clipped is that of the sum of their gradients. A unit with a non-finite gradient contributes zero as a whole.
    With `frozen`, a nested dict like `params`, the loss takes both as one tree: what is in `params` is trained, what is `frozen`
    rests. Nothing is recorded, kept or summed for what rests, and nothing below the lowest trained parameter is differentiated.
    Raises `Refused` for an unknown method, naming the parameter that no op, or more than one, claims, and naming an op that
    has no rule for units of several rows; with `frozen` (which may be empty) also for a parameter that is in both trees, or that
    no path from the loss reaches.
    """
    _check_untracked(params, frozen, batch)
    examples = batch_size(batch)
    is_padding_B = jnp.zeros((examples,), bool) if is_padding_B is None else is_padding_B
    is_flat, reason = is_padding_B.shape == (examples,), f"is not one flag for each of {examples} rows"
    require(is_flat, f"is_padding_B{is_padding_B.shape}", reason, "Give it the shape [B]")
    units = Units(rows_per_unit, is_padding_B)
    batch = units.filled(batch)
    if method == "vmap":
        reach.check(losses_fn, params, frozen, batch)
        return _vmap(bound(losses_fn, frozen), params, batch, weights, units)
    if method == "traced":
        return _traced(losses_fn, params, batch, weights, frozen, is_padding_B, kept_bytes, rows_per_unit)
    require(method in ("ghost", "book_keeping"), f"clipping={method}", "no such method", "Use book_keeping, ghost, vmap or traced")
    options = {"kept_bytes": kept_bytes, "fused": fused, "rows_per_unit": rows_per_unit}
    program = traced(losses_fn, params, batch, options, examples, frozen)
    if frozen is not None:
        reach.check_program(program)
    return _by_records(losses_fn, program, weights, units, method, checked)


def _by_records(losses_fn: LossesFn, program: Any, weights: Weights, units: Units, method: str, checked: bool) -> ClippedSum:
    """From what the ops of a traced loss leave behind."""
    from dpx.clipping import book_keeping, ghost, joint
    from dpx.clipping.separate import check_separate

    norms_of_uses = joint.norms_of(program, getattr(weights, "per_layer", False))
    if checked:
        check_separate(losses_fn, program, norms_of_uses)
    return (ghost if method == "ghost" else book_keeping).clipped_sum(program, norms_of_uses, weights, units)


def plain_sum(
    losses_fn: LossesFn,
    params: Any,
    batch: Any,
    is_padding_B: Bool[Array, " B"] | None = None,
    *,
    frozen: Any = None,
    fused: bool = True,
    rows_per_unit: int = 1,
) -> ClippedSum:
    """sum_b grad_b over the rows that are not padding, without clipping: the non-private step's sum.

    `fused` models run the blocks of book-keeping, clipping aside, so that the plain step is as fast as we can make it. `frozen` is as
    for `clipped_sum`.
    """
    _check_untracked(params, frozen, batch)
    examples = batch_size(batch)
    is_real_B = jnp.ones((examples,), bool) if is_padding_B is None else ~is_padding_B
    units = Units(rows_per_unit, ~is_real_B)
    program = traced(losses_fn, params, batch, {"kept_bytes": KEPT_BYTES}, examples, frozen) if fused else None
    if program is None:
        reach.check(losses_fn, params, frozen, batch)
    elif frozen is not None:
        reach.check_program(program)

    def total_loss(leaves):
        run = bound(losses_fn, frozen)(leaves, batch) if program is None else program(lambda _: "plain", {}, leaves)
        losses_B, counts = with_counts(run)
        return jnp.sum(jnp.where(is_real_B, losses_B, 0)), (losses_B, counts)

    leaves = jax.tree.map(norms.at_least_float32, params) if program is None else zero_sums(params)
    total, (losses_B, counts) = jax.grad(total_loss, has_aux=True)(leaves)
    losses_U, counts = units.summed((losses_B, counts))
    return ClippedSum(total, None, losses_U, counts, ~units.is_padding_U)


def _check_untracked(*trees: Any) -> None:
    """Where `shard_map` tracks what varies, the gradient of a parameter that does not is a sum over devices, taken before any clip."""
    axes = sorted({str(axis) for leaf in jax.tree.leaves(trees) for axis in _varying(leaf)})
    reason = "tracks what varies, and would add gradients up over devices before they are clipped"
    require(not axes, f"shard_map over {', '.join(axes)}", reason, "Use jax.shard_map(..., check_vma=False)")


def _varying(leaf: Any) -> Any:
    return getattr(getattr(jax.typeof(leaf), "manual_axis_type", None), "varying", ())


def batch_size(batch: Any) -> int:
    """Raises `Refused` for arrays that do not share their leading axis."""
    sizes = sorted({leaf.shape[0] if leaf.ndim else 0 for leaf in map(jnp.asarray, jax.tree.leaves(batch))})
    reason = "has arrays whose first axis is not the example"
    require(len(sizes) == 1 and sizes[0] > 0, f"batch of leading axes {sizes}", reason, "Give arrays [B, ...]")
    return sizes[0]


def zero_unless(keep_B: Array, tree: Any) -> Any:
    """Every leaf [B, ...] with exact zeros in the rows that are not kept; a where, so that NaN does not survive."""
    return jax.tree.map(lambda leaf: jnp.where(keep_B.reshape((-1,) + (1,) * (leaf.ndim - 1)), leaf, 0), tree)


def _vmap(losses_fn: LossesFn, params: Any, batch: Any, weights: Weights, units: Units) -> ClippedSum:
    """The reference: every example's gradient in memory, then one contraction with the clip vector."""

    def loss_of_one(params, rows, is_padding_R):
        returned = with_counts(losses_fn(params, rows))
        check_losses(returned[0], units.rows)
        losses_1, counts = Units(units.rows, is_padding_R).summed(returned)
        return losses_1[0], (losses_1[0], jax.tree.map(lambda leaf: leaf[0], counts))

    by_unit = jax.tree.map(lambda leaf: leaf.reshape(-1, units.rows, *leaf.shape[1:]), (batch, units.is_padding_B))
    wide = jax.tree.map(norms.at_least_float32, params)
    grads, (losses_B, counts) = jax.vmap(jax.grad(loss_of_one, has_aux=True), in_axes=(None, 0, 0))(wide, *by_unit)
    leaves = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(grads)]
    clipped = groups.clip(weights, [_leaf_squares(path, leaf) for path, leaf in leaves], losses_B, units.is_padding_U)
    # A contraction with the clip vector: scaling and then summing over the batch is 16 times slower on XLA's CPU backend.
    summed = [_contract(_weights(clipped, path, leaf), zero_unless(clipped.is_counted_B, leaf)) for path, leaf in leaves]
    losses_B, counts = zero_unless(clipped.is_counted_B, (losses_B, counts))
    total = jax.tree.unflatten(jax.tree.structure(grads), summed)
    return ClippedSum(total, clipped.norms_B, losses_B, counts, clipped.is_counted_B)


def _traced(
    losses_fn: LossesFn, params: Any, batch: Any, weights: Weights, frozen: Any, is_padding_B: Array, kept_bytes: int, rows_per_unit: int
) -> ClippedSum:
    """By the loss of one row, whatever it is made of."""
    from dpx.clipping.clipped_grad import clipped_grad

    def loss_of_one(params: Any, row: Any) -> Any:
        losses_1, counts = with_counts(losses_fn(params, jax.tree.map(lambda leaf: leaf[None], row)))
        check_losses(losses_1, 1)
        return losses_1[0], jax.tree.map(lambda leaf: leaf[0], counts)

    options: dict[str, Any] = {"kept_bytes": kept_bytes, "rows_per_unit": rows_per_unit}
    found = clipped_grad(loss_of_one, params, batch, weights=weights, frozen=frozen, is_padding_B=is_padding_B, **options)
    assert isinstance(found, ClippedSum)
    return found


def _leaf_squares(path: str, leaf_B: Array) -> groups.Squares:
    is_stacked = groups.is_stacked(path)
    values = jnp.square(leaf_B).sum(tuple(range(2 if is_stacked else 1, leaf_B.ndim)))
    return groups.Squares(path, values.T, "each" if is_stacked else None)


def _weights(clipped: groups.Clipped, path: str, leaf_B: Array) -> Array:
    is_each = groups.is_stacked(path) and "" not in clipped.weights
    return clipped.weights_of(path, "each" if is_each else None, leaf_B.shape[1] if is_each else 0)


def _contract(weights: Array, leaf_B: Array) -> Array:
    """sum_b w_b leaf_b, or sum_b w_lb leaf_bl where layers are stacked."""
    equation = "b,b...->..." if weights.ndim == 1 else "lb,bl...->l..."
    return jnp.einsum(equation, weights, leaf_B, precision="highest")
