"""Computes the clipped sum of per-example gradients of one microbatch, with one interface for several methods.

It uses no collectives and no Python state, so it may be called inside `shard_map`, `fori_loop` and `jit`.

B: examples (rows), U: units of R rows each (of one, unless said), L: stacked layers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpx.clipping import norms, result
from dpx.clipping.by_example import ByExample
from dpx.clipping.methods import check_untracked, sum_by
from dpx.clipping.probes import trained_shapes
from dpx.clipping.program import traced, zero_sums
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
)
from dpx.clipping.trained_and_frozen import bound, check_reached, check_trained_reached


def clipped_sum(
    losses_fn: LossesFn,
    params: Any,
    batch: Any,
    *,
    weights: Any,
    frozen: Any = None,
    is_padding_B: Any = None,
    method: Any = "book_keeping",
    kept_bytes: int | None = None,
    fused: bool = True,
    rows_per_unit: Any = 1,
    checked: bool = True,
) -> ClippedSum:
    """Computes the clipped sum of the gradients of a batch, sum_b c_b grad_b with c = weights(norms).

    This is the batched form, for losses made of ops (`dpx.clipping.ops`) and for models of dpx; `dpx.clipped_grad` takes the loss of one
    example in any JAX code.

    Args:
        losses_fn: `(params, batch) -> (losses_B, counts)`, with losses float [B] and counts a dict of arrays [B]. `losses_B[b]` must
            depend on row b alone.
        params: The trained parameters, a nested dict of arrays.
        batch: A tree of arrays [B, ...], whose first axis is the example.
        weights: A function of the norms, float32 [U], to factors of the same shape. It runs under jit.
        frozen: A nested dict of parameters that are not trained; the loss gets it merged with `params`. Nothing is recorded or summed for
            it, and nothing below the lowest trained parameter is differentiated.
        is_padding_B: bool [B]; true for rows that contribute exactly zero. `None` if no row is padding.
        method: "book_keeping" or "ghost", for a loss whose parameters all go through ops; "vmap" or "traced" (row by row), for any loss.
        kept_bytes: The most bytes of per-example weight gradients that are kept, less what a fused stack of layers keeps; 72 MiB if not
            given. "traced" then keeps all gradients where the other ways cost more than "vmap".
        fused: Whether models may use their hand-scheduled blocks.
        rows_per_unit: R. Every R consecutive rows are one unit: its loss is the sum of its rows' losses, and the norm of the sum of their
            gradients is clipped. A unit with a gradient that is not finite contributes zero as a whole.
        checked: Whether to test on random rows that no example depends on another (`dpx.clipping.separate`).

    Returns:
        The sum, float32 even if parameters are bfloat16, and the facts of each unit, as `ClippedSum`.

    Raises:
        ConfigError: For an unknown method, for a parameter that no op claims or whose uses have no joint rule, and for an op that has no
            rule for units of several rows. With `frozen` (which may be empty) also for a parameter that is in both trees, or that no path
            from the loss reaches.
    """
    options: dict[str, Any] = dict(weights=weights, rows_per_unit=rows_per_unit)

    def run(params: Any, batch: Any, frozen: Any, is_padding_B: Any) -> ClippedSum:
        if method != "traced":
            own = {"frozen": frozen, "is_padding_B": is_padding_B, "fused": fused, "checked": checked}
            own["kept_bytes"] = KEPT_BYTES if kept_bytes is None else kept_bytes
            return sum_by(method, losses_fn, params, batch, **own, **options)
        is_padding_B = flags(is_padding_B, batch_size(batch), "is_padding_B")
        check_rows(rows_per_unit)
        check_untracked(params, frozen, batch)
        own = {"is_padding_B": is_padding_B, "kept_bytes": kept_bytes, "is_by_unit": getattr(weights, "is_by_unit", False)}
        return ByExample.trace(_of_one(losses_fn), params, batch, frozen).summed("book_keeping", **own, **options)

    return result.on_explicit_mesh(run, ClippedSum, params, batch, rows_per_unit, params, batch, frozen, is_padding_B)


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
    """Computes the sum of the gradients of a batch without clipping, for a step without privacy.

    Args:
        losses_fn: As for `clipped_sum`, and so are all arguments that are not listed here.
        fused: Whether models run the same hand-scheduled blocks as under book-keeping, so that the plain step is a fair baseline.

    Returns:
        A `ClippedSum` over the rows that are not padding, with `norms_B` None.
    """

    def run(params: Any, batch: Any, frozen: Any, is_padding_B: Any) -> ClippedSum:
        return _plain_sum(losses_fn, params, batch, is_padding_B, frozen, fused, rows_per_unit)

    return result.on_explicit_mesh(run, ClippedSum, params, batch, rows_per_unit, params, batch, frozen, is_padding_B)


def _plain_sum(losses_fn: LossesFn, params: Any, batch: Any, is_padding_B: Any, frozen: Any, fused: bool, rows_per_unit: Any) -> ClippedSum:
    examples = batch_size(batch)
    check_untracked(params, frozen, batch)
    check_rows(rows_per_unit)
    trained_shapes(params)
    is_padding_B = flags(is_padding_B, examples, "is_padding_B")
    units, is_real_B = Units(rows_per_unit, is_padding_B), ~is_padding_B
    if examples == 0:
        options = (frozen, fused, rows_per_unit)
        return of_no_rows(lambda batch, padding_B: _plain_sum(losses_fn, params, batch, padding_B, *options), batch, rows_per_unit)
    program = traced(losses_fn, params, batch, {"kept_bytes": KEPT_BYTES}, examples, frozen) if fused else None
    if program is None:
        check_trained_reached(losses_fn, params, frozen, batch)
    elif frozen is not None:
        check_reached(program.closed.jaxpr, program.paths)

    def total_loss(leaves):
        run = bound(losses_fn, frozen)(leaves, batch) if program is None else program(lambda _: "plain", {}, leaves)
        losses_B, counts = with_counts(run)
        return jnp.sum(jnp.where(is_real_B, losses_B, 0)), (losses_B, counts)

    leaves = jax.tree.map(norms.at_least_float32, params) if program is None else zero_sums(params)
    total, (losses_B, counts) = jax.grad(total_loss, has_aux=True)(leaves)
    losses_U, counts = units.summed((losses_B, counts))
    return ClippedSum(total, None, losses_U, counts, ~units.is_padding_U)


def _of_one(losses_fn: LossesFn) -> Callable[[Any, Any], Any]:
    """Returns the loss of one row, computed as the loss of a batch of one row."""

    def loss_of_one(params: Any, row: Any) -> Any:
        losses_1, counts = with_counts(losses_fn(params, jax.tree.map(lambda leaf: leaf[None], row)))
        check_losses(losses_1, 1)
        return losses_1[0], jax.tree.map(lambda leaf: leaf[0], counts)

    return loss_of_one
