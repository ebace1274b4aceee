"""Computes a head over the vocabulary as one block: the decoder, tied to the word table or not, and the cross-entropy of its labels.

The cotangent of the logits does not depend on other examples, so it is formed once, in the forward pass, and logits are not kept.
It is kept in two factors, scale_BM * e_BMV: the scale is folded into h, which is hundreds of times smaller than e.

B: examples, H: width, M: positions decoded, N: those of a block, m: those of all examples, n: blocks, V: vocabulary.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpx.clipping import bounds, forms, norms
from dpx.clipping.norms import rows
from dpx.clipping.op import Op, ProbeSession, apply
from dpx.clipping.ops import Tie, is_in

F32 = jnp.float32
# The logits that a frozen head holds at once: those of so many bytes, or of so many rows if that is more. An accelerator reads the table
# once for each block, which products of fewer rows do not hide.
BLOCK_BYTES, BLOCK_ROWS = 2**26, 256


@dataclasses.dataclass(frozen=True)
class TokenLoss(Op):
    """The decoder and its cross-entropy as one op.

    `leaves` are `table` and perhaps `bias`; the inputs are h_BMH, label_BM and has_label_BM, the outputs losses_B and correct_B.

    Two parts: the table (a tied table is clipped with the embeddings) and the bias, if there is one.
    """

    norm_sees_all = True
    parts: int
    # Takes logits x to c tanh(x / c).
    cap: float | None = None
    name: str = "token_loss"
    rows_per_unit: int = 1
    frozen: tuple[str, ...] = ()

    def part(self, path: str) -> int:
        return 0 if path == "table" else 1

    def forward(self, leaves, inputs):
        h_BMH, label_BM, has_label_BM = inputs
        has_label_BM = has_label_BM & is_in(label_BM, leaves["table"].shape[0])
        weight_BM = has_label_BM.astype(jnp.promote_types(h_BMH.dtype, F32))
        # The share of each position whose label has a logit in its example's mean.
        weight_BM = weight_BM / jnp.maximum(weight_BM.sum(1, keepdims=True), 1)
        if any(map(self.trains, leaves)):
            losses_B, correct_B, e_BMV, scale_BM = self._decoded(leaves, h_BMH, label_BM, has_label_BM, weight_BM)
            return (losses_B, correct_B), (h_BMH, bounds.as_narrow_as(h_BMH, e_BMV), scale_BM)

        # Of a frozen head nothing but the cotangent of h depends on e: it is formed for a block of positions, without the logits of all
        # positions at once, and the residual is that cotangent.
        (B, M, H), V = h_BMH.shape, leaves["table"].shape[0]
        rows = max(BLOCK_ROWS, BLOCK_BYTES // (weight_BM.dtype.itemsize * V))
        blocks = max(1, math.ceil(M / max(1, rows // max(1, B))))
        wide = math.ceil(M / blocks)

        def one(of_block):
            losses_B, correct_B, e_BNV, scale_BN = self._decoded(leaves, *of_block)
            return losses_B, correct_B, self._cotangent(leaves, h_BMH.dtype, e_BNV, scale_BN)

        def cut(x_BM):
            padded = jnp.pad(x_BM, ((0, 0), (0, blocks * wide - M), *((0, 0),) * (x_BM.ndim - 2)))
            return jnp.moveaxis(padded.reshape(B, blocks, wide, *x_BM.shape[2:]), 1, 0)

        losses_nB, correct_nB, g_nBNH = jax.lax.map(one, tuple(map(cut, (h_BMH, label_BM, has_label_BM, weight_BM))))
        g_BMH = jnp.moveaxis(g_nBNH, 0, 1).reshape(B, blocks * wide, H)[:, :M]
        return (losses_nB.sum(0), correct_nB.sum(0)), (g_BMH,)

    def _decoded(self, leaves, h_BMH, label_BM, has_label_BM, weight_BM):
        """Returns the result of `cross_entropy` for the logits of h."""
        dtype, at_least_f32 = h_BMH.dtype, weight_BM.dtype
        h_mH = h_BMH.reshape(-1, h_BMH.shape[-1])
        logits_mV = jnp.einsum("mh,vh->mv", h_mH, leaves["table"].astype(dtype), preferred_element_type=at_least_f32)
        if self.cap is None:
            return cross_entropy(logits_mV, leaves.get("bias"), label_BM, has_label_BM, weight_BM)
        tanh_mV = jnp.tanh(logits_mV / self.cap)
        *results, e_BMV, scale_BM = cross_entropy(self.cap * tanh_mV, leaves.get("bias"), label_BM, has_label_BM, weight_BM)
        return *results, e_BMV * (1 - jnp.square(tanh_mV)).reshape(e_BMV.shape), scale_BM

    def _cotangent(self, leaves, dtype, e_BMV, scale_BM):
        g_BMH = jnp.einsum("bmv,vh->bmh", e_BMV.astype(dtype), leaves["table"].astype(dtype), preferred_element_type=scale_BM.dtype)
        return (g_BMH * scale_BM[:, :, None]).astype(dtype)

    def input_cotangent(self, leaves, residuals, cotangent):
        if not any(map(self.trains, leaves)):
            (g_BMH,) = residuals
            return ((g_BMH * cotangent[0][:, None, None]).astype(g_BMH.dtype), None, None), {}
        h_BMH, e_BMV, scale_BM = residuals
        scale_BM = scale_BM * cotangent[0][:, None]
        record = {}
        if self.trains("table"):
            record = {"h": self.tokens(norms.at_least_float32(h_BMH) * scale_BM[:, :, None]), "e": self.tokens(e_BMV)}
            record["scale"] = scale_BM.reshape(record["e"].shape[:2])
        elif "bias" in leaves and self.trains("bias"):
            # For the bias alone: its gradient itself, whose size is an M-th of e.
            record = {"bias": self.over_rows(norms.product("bm,bmv->bv", scale_BM, e_BMV))}
        return (self._cotangent(leaves, h_BMH.dtype, e_BMV, scale_BM), None, None), record

    def squared_norm(self, leaves, record):
        if not self.trains("table"):
            bias_B = norms.squares(record["bias"])
            return jnp.zeros_like(bias_B), bias_B
        others = (record["h"], record["scale"][:, :, None])[: self.parts]
        # An example without a gradient has a scale of zero, and so h of zeros.
        return norms.symmetric(record["e"], *others, tells_zeros=False)

    def masked(self, record, keep_B):
        """Returns the record with zeros for examples that are not kept.

        Only the scale is masked: e is finite by construction, and too large to copy.
        """
        if "e" not in record:
            return super().masked(record, keep_B)
        return super().masked(record | {"e": keep_B}, keep_B) | {"e": record["e"]}

    def weighted_sum(self, leaves, record, weights):
        if not self.trains("table"):
            return {"bias": jnp.tensordot(weights[1], record["bias"], 1, precision="highest")}
        e_mV, h_mH = record["e"].reshape(-1, record["e"].shape[-1]), rows(weights[0], record["h"]).reshape(-1, record["h"].shape[-1])
        # Transposed products read e in the order it lies in memory; the other order copies it whole.
        summed = {"table": norms.weighted_product("mh,mv->hv", h_mH, e_mV).T}
        if self.parts == 1 or not self.trains("bias"):
            return summed
        return summed | {"bias": norms.product("m,mv->v", rows(weights[1], record["scale"]).reshape(-1), e_mV)}

    def gradients(self, shapes, record):
        if not self.trains("table"):
            return {"bias": forms.Whole(record["bias"])}
        by_leaf: dict[str, forms.Form] = {"table": forms.Outer(record["e"], record["h"])}
        bias = {"bias": forms.Whole(norms.product("bm,bmv->bv", record["scale"], record["e"]))} if self.parts == 2 else {}
        return self.trained(by_leaf | bias)


def token_loss(
    label_BM: Array,
    has_label_BM: Array,
    h_BMH: Array,
    table: Any,
    bias: Any = None,
    tie: Tie | None = None,
    session: ProbeSession | None = None,
    cap: float | None = None,
):
    """Returns (losses_B, correct_B) of the decoded positions.

    The loss is the mean cross-entropy over an example's masked positions, 0 if it has none; `correct_B` is the number of right answers. A
    label without a logit is not counted. A `tie` may be passed and has no effect. `session` is the loss's session, needed for a frozen
    head.
    """
    leaves = {"table": table} | ({} if bias is None else {"bias": bias})
    return apply(TokenLoss(len(leaves), cap), leaves, (h_BMH, label_BM, has_label_BM), session)


def cross_entropy(
    logits_mV: Array, bias_V: Array | None, label_BM: Array, has_label_BM: Array, weight_BM: Array
) -> tuple[Array, Array, Array, Array]:
    """Returns the loss of each example and its cotangent in two factors.

    The result is (the sum of the weighted losses of an example's positions [B], the number of right answers [B], e_BMV, scale_BM); the
    product of e and scale is the cotangent of the logits.

    e is exp(logits - top), less its own sum at the label; both factors are finite whatever the logits are (the loss is not).
    """
    bias_V = jnp.zeros((), logits_mV.dtype) if bias_V is None else bias_V
    label_m, row_m = jnp.clip(label_BM.reshape(-1), 0, logits_mV.shape[-1] - 1), jnp.arange(label_BM.size)
    top_m = (logits_mV + bias_V).max(-1)
    label_logit_m = logits_mV[row_m, label_m] + (bias_V[label_m] if bias_V.ndim else 0)
    # One large array at a time, with exp() last: the compiler writes anything cheaper once for every product that reads it.
    e_mV = jnp.exp(jnp.where(jnp.isfinite(top_m)[:, None], logits_mV + bias_V - top_m[:, None], -jnp.inf))
    total_m = e_mV.sum(-1)
    e_mV = e_mV.at[row_m, label_m].add(-total_m, unique_indices=True, indices_are_sorted=True)
    loss_BM = (jnp.log(total_m) + top_m - label_logit_m).reshape(label_BM.shape)
    correct_BM = (label_logit_m >= top_m).reshape(label_BM.shape) & has_label_BM
    scale_BM = weight_BM / jnp.maximum(total_m, 1).reshape(label_BM.shape)
    return (loss_BM * weight_BM).sum(1), correct_BM.sum(1).astype(logits_mV.dtype), e_mV.reshape(*label_BM.shape, -1), scale_BM
