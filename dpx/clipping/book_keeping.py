"""Book-keeping: one backward pass that keeps each op's record, norms from the records, then one contraction with the clip weights.

B: examples, L: stacked layers. Records, norms and weights are of units where those have several rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpx.clipping import groups
from dpx.clipping.claims import Claims, discover
from dpx.clipping.clipped_sum import ClippedSum, zero_unless
from dpx.clipping.probes import Claim, Session, shapes_of, wrap
from dpx.clipping.units import Units


def clipped_sum(losses_fn, params, batch, weights, units: Units, kept_bytes: int, fused: bool) -> ClippedSum:
    """See `dpx.clipped_sum`."""
    session = Session("record", shapes_of(params), kept_bytes, fused, units.rows)
    claims = discover(losses_fn, params, batch, session)

    def losses(taps):
        losses_B, counts = losses_fn(wrap(params, session, taps), batch)
        return losses_B, counts

    taps = {key: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), claim.record) for key, claim in claims.items()}
    losses_B, backward, counts = jax.vjp(losses, taps, has_aux=True)
    (records,) = backward(units.of_rows(jnp.ones_like(units.is_padding_U, losses_B.dtype)))
    records = jax.tree.map(_as_stored, records)
    losses_B, counts = units.summed((losses_B, counts))

    leaves = leaves_of(params, claims)
    squares = [entry for key, claim in claims.items() for entry in _squares(claim, leaves[key], records[key])]
    clipped = groups.clip(weights, squares, losses_B, units.is_padding_U)
    is_sound = jnp.all(clipped.is_counted_B | units.is_padding_U)
    # The masks cost a pass over every record, and almost never anything is masked: both ways stand ready.
    total = jax.lax.cond(
        is_sound,
        lambda records: _totals(params, claims, leaves, records, clipped.weights, None),
        lambda records: _totals(params, claims, leaves, records, clipped.weights, clipped.is_counted_B),
        records,
    )
    losses_B, counts = zero_unless(clipped.is_counted_B, (losses_B, counts))
    return ClippedSum(total, clipped.norms_B, losses_B, counts, clipped.is_counted_B)


def _as_stored(leaf: Array) -> Array:
    """The compiler may take a norm before it rounds a record to a narrow type; the sum, behind a branch, is of the rounded one."""
    return jax.lax.optimization_barrier(leaf) if leaf.dtype.itemsize < 4 else leaf


def leaves_of(params: Any, claims: Claims) -> dict[tuple[str, str], Any]:
    """Each claim's parameters, in the structure its op wants."""
    by_path = {path: leaf for path, leaf in zip(shapes_of(params), jax.tree.leaves(params), strict=True)}
    return {key: jax.tree.unflatten(claim.treedef, [by_path[path] for path in claim.paths]) for key, claim in claims.items()}


def _squares(claim: Claim, leaves: Any, record: Any) -> list[groups.Squares]:
    norm = jax.vmap(claim.op.squared_norm) if claim.layers else claim.op.squared_norm
    return [groups.Squares(path, values) for path, values in zip(claim.part_paths(), norm(leaves, record), strict=True)]


def _totals(params: Any, claims: Claims, leaves: Any, records: Any, weights: list[Array], keep_B: Array | None) -> Any:
    totals: dict[str, Array] = {}
    remaining = list(weights)
    for key, claim in claims.items():
        parts, remaining = tuple(remaining[: claim.op.parts]), remaining[claim.op.parts :]
        summed = _claim_total(claim, leaves[key], records[key], parts, keep_B)
        for path, leaf in zip(claim.paths, jax.tree.leaves(summed), strict=True):
            totals[path] = totals[path] + leaf if path in totals else leaf
    return jax.tree.unflatten(jax.tree.structure(params), [totals[path] for path in shapes_of(params)])


def _claim_total(claim: Claim, leaves: Any, record: Any, parts: tuple[Array, ...], keep_B: Array | None) -> Any:
    def one(xs):
        leaves, record, parts = xs
        if keep_B is None:
            return claim.op.weighted_sum(leaves, record, parts)
        return claim.op.masked_sum(leaves, record, parts, keep_B)

    # Where layers are stacked, one at a time: the scaled cotangents of a layer are as large as its record.
    return jax.lax.map(one, (leaves, record, parts)) if claim.layers else one((leaves, record, parts))
