"""The masked-LM head as one block: gather, transform, GELU, LayerNorm, the decoder tied to the word table, and the loss.

The cotangent of the logits does not depend on other examples, so it is formed once, in the forward pass, and logits do not live on.
It is kept in two factors, scale_BM * e_BMV: the scale is folded into h, which is hundreds of times smaller than e.

B: examples, T: tokens, H: width, M: masked slots, V: vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpx.clipping import norms
from dpx.clipping.ops import Tie, gathered, rows
from dpx.clipping.probes import Op
from dpx.models.fused_layers import linear, norm_backward, normalise, scaled
from dpx.models.shape import Bert

F32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class MaskedHead(Op):
    """`leaves`: the subtree `mlm` and `word`; inputs: x_BTH, slot_BM, label_BM, is_slot_BM, the tie. Outputs: losses_B, correct_B.

    Two parts: the word table (it belongs with the embeddings), and all else.
    """

    model: Bert
    name: str = "masked_head"
    parts: int = 2
    rows_per_unit: int = 1

    def part(self, path: str) -> int:
        return 0 if path == "word" else 1

    def forward(self, leaves, inputs):
        x_BTH, slot_BM, label_BM, is_slot_BM, tie = inputs
        x_BMH = jnp.take_along_axis(x_BTH, slot_BM[:, :, None], axis=1)
        transform = jax.tree.map(lambda leaf: leaf.astype(x_BTH.dtype), leaves["transform"])
        u_BMH = linear(x_BMH, transform)
        normalised, factor = normalise(jax.nn.gelu(u_BMH, approximate=False), self.model.layer_norm_eps)
        h_BMH = scaled(normalised, leaves["norm"])
        wide = jnp.promote_types(x_BTH.dtype, F32)
        h_mH = h_BMH.reshape(-1, h_BMH.shape[-1])
        logits_mV = jnp.einsum("mh,vh->mv", h_mH, leaves["word"].astype(x_BTH.dtype), preferred_element_type=wide)
        losses_B, correct_B, e_BMV, scale_BM = cross_entropy(logits_mV, leaves["output_bias"], label_BM, is_slot_BM)
        return (losses_B, correct_B), (x_BMH, slot_BM, u_BMH, normalised, factor, h_BMH, e_BMV, scale_BM, tie.id_BT)

    def _backward(self, leaves, residuals, loss_B):
        """(cotangent of x, that of the transform's output, sums of the LayerNorm, scale_BM with the loss' own cotangent)."""
        x_BMH, slot_BM, u_BMH, normalised, factor, _, e_BMV, scale_BM, id_BT = residuals
        dtype, T, scale_BM = x_BMH.dtype, id_BT.shape[1], scale_BM * loss_B[:, None]
        g_h = jnp.einsum("bmv,vh->bmh", e_BMV.astype(dtype), leaves["word"].astype(dtype), preferred_element_type=scale_BM.dtype)
        sums, g_a = norm_backward(g_h * scale_BM[:, :, None], normalised, factor, leaves["norm"])
        g_u = jax.vjp(lambda u: jax.nn.gelu(u, approximate=False), norms.wide(u_BMH))[1](g_a)[0].astype(dtype)
        g_x_BMH = g_u @ leaves["transform"]["kernel"].astype(dtype).T
        g_x = jax.vmap(lambda slot, g: jnp.zeros((T, g.shape[-1]), g.dtype).at[slot].add(g))(slot_BM, g_x_BMH)
        return g_x, g_u, sums, scale_BM

    def input_cotangent(self, leaves, residuals, cotangent):
        x_BMH, h_BMH, e_BMV, id_BT = residuals[0], residuals[5], residuals[6], residuals[8]
        g_x, g_u, sums, scale_BM = self._backward(leaves, residuals, cotangent[0])
        record = {"x": x_BMH, "u": g_u, "h": norms.wide(h_BMH) * scale_BM[:, :, None], "e": e_BMV}
        record = {name: self.tokens(leaf) for name, leaf in record.items()}
        record |= {"scale": scale_BM.reshape(record["e"].shape[:2]), "sums": jax.tree.map(self.over_rows, sums)}
        return (g_x, None, None, None, Tie(None, gathered(record["e"], id_BT), record["h"])), record

    def squared_norm(self, leaves, record):
        transform_B = norms.gram(record["x"], record["u"]) + norms.squares(norms.wide(record["u"]).sum(1))
        small_B = sum(norms.squares(leaf) for leaf in jax.tree.leaves(record["sums"]))
        outer_BMM = norms.outer(record["e"])
        inner_BMM = norms.product("bmh,bnh->bmn", record["h"], record["h"])
        scales_BMM = record["scale"][:, :, None] * record["scale"][:, None, :]
        word_B, bias_B = (outer_BMM * inner_BMM).sum((1, 2)), (outer_BMM * scales_BMM).sum((1, 2))
        return jnp.maximum(word_B, 0), transform_B + small_B + jnp.maximum(bias_B, 0)

    def masked(self, record, keep_B):
        """e is finite by construction, and too large to copy."""
        return super().masked(record | {"e": keep_B}, keep_B) | {"e": record["e"]}

    def weighted_sum(self, leaves, record, weights):
        word_B, w_B = weights
        g_u, H = rows(w_B, record["u"]), record["h"].shape[-1]
        e_mV, h_mH = record["e"].reshape(-1, record["e"].shape[-1]), rows(word_B, record["h"]).reshape(-1, H)
        return {
            # Transposed products read e in the order it lies in memory; the other order copies it whole.
            "word": norms.product("mh,mv->hv", h_mH, e_mV).T,
            "output_bias": norms.product("m,mv->v", (record["scale"] * w_B[:, None]).reshape(-1), e_mV),
            "transform": {"kernel": norms.product("bmp,bmd->pd", norms.wide(record["x"]), g_u), "bias": g_u.sum((0, 1))},
            "norm": jax.tree.map(lambda leaf: jnp.tensordot(w_B, leaf, 1, precision="highest"), record["sums"]),
        }


def cross_entropy(logits_mV: Array, bias_V: Array, label_BM: Array, is_slot_BM: Array) -> tuple[Array, Array, Array, Array]:
    """(mean loss over an example's slots [B], how many were right [B], e_BMV and scale_BM whose product is the logits' cotangent).

    e is exp(logits - top), less its own sum at the label; both factors are finite whatever the logits are (the loss is not).
    """
    weight_BM = is_slot_BM.astype(bias_V.dtype)
    weight_BM = weight_BM / jnp.maximum(weight_BM.sum(1, keepdims=True), 1)
    label_m, row_m = label_BM.reshape(-1), jnp.arange(label_BM.size)
    top_m = (logits_mV + bias_V).max(-1)
    label_logit_m = logits_mV[row_m, label_m] + bias_V[label_m]
    # One large array at a time, with exp() last: the compiler writes anything cheaper once for every product that reads it.
    e_mV = jnp.exp(jnp.where(jnp.isfinite(top_m)[:, None], logits_mV + bias_V - top_m[:, None], -jnp.inf))
    total_m = e_mV.sum(-1)
    e_mV = e_mV.at[row_m, label_m].add(-total_m, unique_indices=True, indices_are_sorted=True)
    loss_BM = (jnp.log(total_m) + top_m - label_logit_m).reshape(label_BM.shape)
    correct_BM = (label_logit_m >= top_m).reshape(label_BM.shape) & is_slot_BM
    scale_BM = weight_BM / jnp.maximum(total_m, 1).reshape(label_BM.shape)
    return (loss_BM * weight_BM).sum(1), correct_BM.sum(1).astype(bias_V.dtype), e_mV.reshape(*label_BM.shape, -1), scale_BM
