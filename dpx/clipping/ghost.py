"""Computes a clipped sum by ghost clipping: one backward pass gives the norms, a second one gives the sum (Li et al. 2022).

Every op returns its squared norm as the cotangent of a probe, so nothing but norms outlives the first pass (Li et al. 2022); an op
that shares a parameter with another use returns its record, since the norm is of both.

The second pass has the same cotangent as the first, one for each loss, and each op weighs its own gradient. Li et al. make the clip
weights the cotangent instead. That is the same only where the whole backward pass is linear: one that takes a sign or a maximum
(`jax.custom_vjp`) would give a sum that is not clipped, and one in a narrow type would round the weighted cotangents again.

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
from dpx.clipping.result import ClippedSum, Units, zero_unless
from dpx.clipping.sites import Site


def clipped_sum(program: Program, norms: Norms, weights: Any, units: Units) -> ClippedSum:
    """Computes the clipped sum of a traced program; `dpx.clipped_sum` describes the result."""
    by_path = program.by_path()

    def kind(site: Site) -> Pass:
        return "record" if site in norms.joint_sites else "norm"

    def losses(probes: list[Any]) -> Any:
        return program(kind, dict(zip(program.sites, probes, strict=True)))

    probes = [_zeros(site.record if kind(site) == "record" else _norm_shapes(site, by_path)) for site in program.sites]
    losses_B, backward, counts = jax.vjp(losses, probes, has_aux=True)
    (records,) = backward(units.of_rows(jnp.ones_like(units.is_padding_U, losses_B.dtype)))
    records = dict(zip(program.sites, records, strict=True))
    losses_B, counts = units.summed((losses_B, counts))

    def own(site: Site) -> Any:
        return joint.own_squares(site, joint.leaves_of(site, by_path), records[site]) if kind(site) == "record" else records[site]

    joint_records = {site: records[site] for site in norms.joint_sites}
    finite_B = jnp.where(is_finite(joint_records, units.is_padding_U.shape[0]), losses_B, jnp.nan)
    clipped = groups.clip(weights, joint.squares(norms, records, own)[0], finite_B, units.is_padding_U)
    parts = {site: joint.part_weights(clipped, site) for site in program.sites}

    def weighted(sums: Any) -> Any:
        return units.summed(program(lambda _: "weighted", parts, sums)[0]).sum()

    total = jax.grad(weighted)(zero_sums(program.params))
    losses_B, counts = zero_unless(clipped.is_counted_B, (losses_B, counts))
    return ClippedSum(total, clipped.norms_B, losses_B, counts, clipped.is_counted_B)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _norm_shapes(site: Site, by_path: dict[str, Any]) -> Any:
    return jax.eval_shape(lambda record: joint.own_squares(site, joint.leaves_of(site, by_path), record), site.record)
