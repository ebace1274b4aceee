"""Ghost clipping: norms from one backward pass through dummy probes, the clipped sum from a second with the weights as cotangent.

Every op returns its squared norm as the cotangent of a probe, so nothing but norms outlives the first pass (Li et al. 2022).
"""

import jax
import jax.numpy as jnp

from dpx.clipping import groups
from dpx.clipping.book_keeping import leaves_of
from dpx.clipping.claims import discover
from dpx.clipping.clipped_sum import ClippedSum, zero_unless
from dpx.clipping.probes import Session, empty_sums, shapes_of, wrap
from dpx.clipping.units import Units


def clipped_sum(losses_fn, params, batch, weights, units: Units, kept_bytes: int, fused: bool) -> ClippedSum:
    """See `dpx.clipped_sum`. Clipping per layer, narrow types, or a non-finite example make the second pass weigh op by op instead."""
    session = Session("norm", shapes_of(params), kept_bytes, fused, units.rows)
    record = Session("record", session.shapes, kept_bytes, fused, units.rows)
    claims = discover(losses_fn, params, batch, record)
    session.kept.update(record.kept)
    leaves = leaves_of(params, claims)

    def norm_shapes(key):
        claim = claims[key]
        norm = jax.vmap(claim.op.squared_norm) if claim.layers else claim.op.squared_norm
        return jax.eval_shape(norm, leaves[key], claim.record)

    probes = {key: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), norm_shapes(key)) for key in claims}

    def losses(sums, probes):
        return losses_fn(wrap(params, session, probes, sums), batch)

    losses_B, backward, counts = jax.vjp(losses, empty_sums(params), probes, has_aux=True)
    _, squared = backward(units.of_rows(jnp.ones_like(units.is_padding_U, losses_B.dtype)))
    losses_B, counts = units.summed((losses_B, counts))
    squares = [
        groups.Squares(path, values) for key, claim in claims.items() for path, values in zip(claim.part_paths(), squared[key], strict=True)
    ]
    clipped = groups.clip(weights, squares, losses_B, units.is_padding_U)

    def op_by_op(_):
        weighing = Session("weighted", session.shapes, kept_bytes, fused, units.rows, kept=session.kept)
        rest = iter(clipped.weights)
        parts = {key: tuple(next(rest) for _ in range(claim.op.parts)) for key, claim in claims.items()}
        return jax.grad(lambda sums: units.summed(losses_fn(wrap(params, weighing, parts, sums), batch)[0]).sum())(empty_sums(params))

    # A second pass in bfloat16 would round the weighted cotangents anew: up to 0.3 % beyond the clipping norm.
    if any(claim.is_narrow for claim in claims.values()) or getattr(weights, "per_layer", False):
        total = op_by_op(None)
    else:
        is_sound = jnp.all(clipped.is_counted_B | units.is_padding_U)
        c_U = clipped.weights[0].reshape(-1, losses_B.shape[0])[0]
        total = jax.lax.cond(is_sound, lambda c_U: backward(units.of_rows(c_U))[0], op_by_op, c_U)
    losses_B, counts = zero_unless(clipped.is_counted_B, (losses_B, counts))
    return ClippedSum(total, clipped.norms_B, losses_B, counts, clipped.is_counted_B)
