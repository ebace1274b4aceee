"""Ghost clipping: norms from one backward pass through dummy probes, the clipped sum from a second with the weights as cotangent.

Every op returns its squared norm as the cotangent of a probe, so nothing but norms outlives the first pass (Li et al. 2022); an op
that shares a parameter with another use returns its record, since the norm is of both.

U: units.
"""

from typing import Any

import jax
import jax.numpy as jnp

from dpx.clipping import groups, joint
from dpx.clipping.book_keeping import is_finite
from dpx.clipping.joint import Norms
from dpx.clipping.passes import Pass
from dpx.clipping.program import Program, zero_sums
from dpx.clipping.result import ClippedSum, zero_unless
from dpx.clipping.sites import Site
from dpx.clipping.units import Units


def clipped_sum(program: Program, norms: Norms, weights: Any, units: Units) -> ClippedSum:
    """See `dpx.clipped_sum`. Clipping per layer, narrow types, or a non-finite example make the second pass weigh op by op instead."""
    per_layer = getattr(weights, "per_layer", False)
    by_path = program.by_path()

    def kind(site: Site) -> Pass:
        return "joint" if site in norms.joint_sites else "norm"

    def losses(sums: Any, probes: list[Any]) -> Any:
        return program(kind, dict(zip(program.sites, probes, strict=True)), sums)

    probes = [_zeros(site.record if kind(site) == "joint" else _norm_shapes(site, by_path)) for site in program.sites]
    losses_B, backward, counts = jax.vjp(losses, zero_sums(program.params), probes, has_aux=True)
    _, records = backward(units.of_rows(jnp.ones_like(units.is_padding_U, losses_B.dtype)))
    records = dict(zip(program.sites, records, strict=True))
    losses_B, counts = units.summed((losses_B, counts))

    def own(site: Site) -> Any:
        return joint.own_squares(site, joint.leaves_of(site, by_path), records[site]) if kind(site) == "joint" else records[site]

    joint_records = {site: records[site] for site in norms.joint_sites}
    finite_B = jnp.where(is_finite(joint_records, units.is_padding_U.shape[0]), losses_B, jnp.nan)
    clipped = groups.clip(weights, joint.squares(norms, records, own), finite_B, units.is_padding_U)

    def op_by_op() -> Any:
        parts = {site: joint.part_weights(clipped, site) for site in program.sites}

        def total(sums: Any) -> Any:
            return units.summed(program(lambda _: "weighted", parts, sums)[0]).sum()

        return jax.grad(total)(zero_sums(program.params))

    # A second pass in bfloat16 would round the weighted cotangents anew: up to 0.3 % beyond the clipping norm.
    if program.is_narrow or per_layer:
        total = op_by_op()
    else:
        # Padding may hold anything, and zero times NaN is NaN.
        is_sound = jnp.all(clipped.is_finite_B)
        c_B = units.of_rows(clipped.weights[""]).astype(losses_B.dtype)
        total = jax.lax.cond(is_sound, lambda: backward(c_B)[0], op_by_op)
    losses_B, counts = zero_unless(clipped.is_counted_B, (losses_B, counts))
    return ClippedSum(total, clipped.norms_B, losses_B, counts, clipped.is_counted_B)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _norm_shapes(site: Site, by_path: dict[str, Any]) -> Any:
    return jax.eval_shape(lambda record: joint.own_squares(site, joint.leaves_of(site, by_path), record), site.record)
