"""The clipped sum of per-example gradients of one microbatch: one interface, several methods, one result.

It uses no collectives and no Python state, so it may be called inside `shard_map`, `fori_loop` and `jit`.

B: examples (rows), U: units of R rows each (of one, unless said), L: stacked layers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpx.clipping import norms, reach
from dpx.clipping.by_example import ByExample
from dpx.clipping.frozen import bound
from dpx.clipping.methods import check_untracked, sum_by
from dpx.clipping.program import check_losses, traced, with_counts, zero_sums
from dpx.clipping.result import KEPT_BYTES, ClippedSum, LossesFn, batch_size, of_no_rows
from dpx.clipping.units import Units, check_rows, flags


def clipped_sum(
    losses_fn: LossesFn,
    params: Any,
    batch: Any,
    *,
    weights: Any,
    frozen: Any = None,
    is_padding_B: Any = None,
    method: Any = "book_keeping",
    kept_bytes: int = KEPT_BYTES,
    fused: bool = True,
    rows_per_unit: Any = 1,
    checked: bool = True,
) -> ClippedSum:
    """The clipped sum of gradients, sum_b c_b grad_b, where `losses_fn(params, batch) -> (losses_B, counts)` and c_B = weights(norms_B),
    one number for each norm; float32 even if parameters are bfloat16. This is the batched form, for losses made of ops and for models of
    dpx; `dpx.clipped_grad` takes the loss of one example.

    Every array of `batch` has a leading example axis, and losses_B[b] must depend on row b alone. The methods `vmap` and `traced`
    (row by row, `dpx.clipped_grad`) take any loss; `ghost` and `book_keeping` take a loss whose parameters all go through ops
    (`dpx.clipping.ops`), and test it on random rows first unless `checked` is false (`dpx.clipping.separate`). `kept_bytes` bounds the
    bytes of per-example weight gradients kept, less what a fused stack of layers keeps between its passes; with `fused=False` models
    do not use their hand-scheduled blocks.
    With `rows_per_unit` R > 1, every R consecutive rows are one unit: its loss is the sum of its rows' losses without padding rows,
    and the norm of the sum of their gradients is clipped. A unit with a non-finite gradient contributes zero as a whole.
    With `frozen`, a nested dict like `params`, the loss takes both merged into one tree, and only `params` is trained. Nothing is
    recorded, kept or summed for frozen parameters, and nothing below the lowest trained parameter is differentiated.
    Raises `ConfigError` for an unknown method, for a parameter that no op claims or whose uses have no joint rule, and for an op that
    has no rule for units of several rows; with `frozen` (which may be empty) also for a parameter that is in both trees, or that no
    path from the loss reaches.
    """
    options: dict[str, Any] = dict(weights=weights, is_padding_B=is_padding_B, kept_bytes=kept_bytes, rows_per_unit=rows_per_unit)
    if method != "traced":
        return sum_by(method, losses_fn, params, batch, frozen=frozen, fused=fused, checked=checked, **options)
    batch_size(batch)
    check_untracked(params, frozen, batch)
    return ByExample.trace(_of_one(losses_fn), params, batch, frozen).summed("book_keeping", **options)


def plain_sum(
    losses_fn: LossesFn,
    params: Any,
    batch: Any,
    is_padding_B: Any = None,
    *,
    frozen: Any = None,
    fused: bool = True,
    rows_per_unit: Any = 1,
) -> ClippedSum:
    """The unclipped sum of gradients, sum_b grad_b over the rows that are not padding: the sum of a non-private step.

    With `fused`, models run the same hand-scheduled blocks as under book-keeping, without the clipping, so that the plain step is a fair
    baseline. `frozen` and `rows_per_unit` are as for `clipped_sum`.
    """
    examples = batch_size(batch)
    check_untracked(params, frozen, batch)
    check_rows(rows_per_unit)
    is_padding_B = flags(is_padding_B, examples, "is_padding_B")
    units, is_real_B = Units(rows_per_unit, is_padding_B), ~is_padding_B
    if examples == 0:
        options = {"frozen": frozen, "fused": fused, "rows_per_unit": rows_per_unit}
        return of_no_rows(lambda batch, padding_B: plain_sum(losses_fn, params, batch, padding_B, **options), batch, rows_per_unit)
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


def _of_one(losses_fn: LossesFn) -> Callable[[Any, Any], Any]:
    """The loss of one row, computed as the loss of a batch of one row."""

    def loss_of_one(params: Any, row: Any) -> Any:
        losses_1, counts = with_counts(losses_fn(params, jax.tree.map(lambda leaf: leaf[None], row)))
        check_losses(losses_1, 1)
        return losses_1[0], jax.tree.map(lambda leaf: leaf[0], counts)

    return loss_of_one
