"""The masked-LM head as one block: gather, transform, GELU, LayerNorm, the decoder tied to the word table, and the loss.

The cotangent of the logits does not depend on other examples, so it is formed once, in the forward pass, behind a barrier: without
it the compiler computes exp() again for each of the products that read it. Logits themselves do not live on.

B: examples, T: tokens, H: width, M: masked slots, V: vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from dpx.clipping import norms
from dpx.clipping.ops import Tie, gathered, rows
from dpx.clipping.probes import Op
from dpx.models.fused_layers import norm_backward, linear, normalise, scaled
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
        logits_BMV = jnp.einsum("bmh,vh->bmv", h_BMH, leaves["word"].astype(x_BTH.dtype), preferred_element_type=wide) + leaves["output_bias"]
        losses_B, correct_B, g_BMV = cross_entropy(logits_BMV, label_BM, is_slot_BM)
        return (losses_B, correct_B), (x_BMH, slot_BM, u_BMH, normalised, factor, h_BMH, g_BMV, tie.id_BT)

    def _backward(self, leaves, residuals, cotangent):
        """(cotangent of x, of the tie; transform's input and output cotangent; h, cotangent of the logits; sums of the norm)."""
        x_BMH, slot_BM, u_BMH, normalised, factor, h_BMH, g_BMV, id_BT = residuals
        dtype, T = x_BMH.dtype, id_BT.shape[1]
        loss_B11 = cotangent[0][:, None, None]
        g_h = loss_B11 * jnp.einsum("bmv,vh->bmh", g_BMV.astype(dtype), leaves["word"].astype(dtype), preferred_element_type=loss_B11.dtype)
        sums, g_a = norm_backward(g_h, normalised, factor, leaves["norm"])
        g_u = jax.vjp(lambda u: jax.nn.gelu(u, approximate=False), norms.wide(u_BMH))[1](g_a)[0].astype(dtype)
        g_x_BMH = g_u @ leaves["transform"]["kernel"].astype(dtype).T
        g_x = jax.vmap(lambda slot, g: jnp.zeros((T, g.shape[-1]), g.dtype).at[slot].add(g))(slot_BM, g_x_BMH)
        return g_x, g_u, h_BMH, g_BMV, loss_B11, sums

    def input_cotangent(self, leaves, residuals, cotangent):
        g_x, g_u, h_BMH, g_BMV, loss_B11, sums = self._backward(leaves, residuals, cotangent)
        x_BMH, id_BT = residuals[0], residuals[7]
        tie = Tie(None, gathered(g_BMV, id_BT), norms.wide(h_BMH) * loss_B11)
        # The loss' own cotangent scales h and not the far larger g: products of the two are all that is ever used.
        record = {"x": x_BMH, "u": g_u, "h": norms.wide(h_BMH) * loss_B11, "g": g_BMV, "factor": loss_B11[:, 0, 0], "sums": sums}
        return (g_x, None, None, None, tie), record

    def squared_norm(self, leaves, record):
        transform_B = norms.gram(record["x"], record["u"]) + norms.squares(norms.wide(record["u"]).sum(1))
        small_B = sum(norms.squares(leaf) for leaf in jax.tree.leaves(record["sums"]))
        word_B, bias_B = decoder_parts(record["h"], record["g"])
        return word_B, transform_B + small_B + bias_B * jnp.square(record["factor"])

    def weighted_sum(self, leaves, record, weights):
        word_B, w_B = weights
        g_u = rows(w_B, record["u"])
        ones_BM = jnp.broadcast_to((w_B * record["factor"])[:, None], record["g"].shape[:2])
        return {
            "word": norms.product("bmv,bmh->vh", record["g"], rows(word_B, record["h"])),
            "output_bias": norms.product("bmv,bm->v", record["g"], ones_BM),
            "transform": {"kernel": norms.product("bmp,bmd->pd", norms.wide(record["x"]), g_u), "bias": g_u.sum((0, 1))},
            "norm": jax.tree.map(lambda leaf: jnp.tensordot(w_B, leaf, 1, precision="highest"), record["sums"]),
        }


def cross_entropy(logits_BMV: Array, label_BM: Array, is_slot_BM: Array) -> tuple[Array, Array, Array]:
    """(mean loss over an example's slots [B], how many were right [B], the cotangent of the logits [B,M,V])."""
    weight_BM = is_slot_BM.astype(logits_BMV.dtype)
    weight_BM = weight_BM / jnp.maximum(weight_BM.sum(1, keepdims=True), 1)
    top_BM = logits_BMV.max(-1)
    exp_BMV = jnp.exp(logits_BMV - top_BM[:, :, None])
    total_BM = exp_BMV.sum(-1)
    label_logit_BM = jnp.take_along_axis(logits_BMV, label_BM[:, :, None], axis=2)[:, :, 0]
    losses_B = ((jnp.log(total_BM) + top_BM - label_logit_BM) * weight_BM).sum(1)
    # The first of equal logits wins, as in argmax.
    correct_B = ((jnp.argmax(logits_BMV, axis=-1) == label_BM) & is_slot_BM).sum(1).astype(logits_BMV.dtype)
    is_label_BMV = lax.broadcasted_iota(jnp.int32, logits_BMV.shape, 2) == label_BM[:, :, None]
    g_BMV = exp_BMV * (weight_BM / total_BM)[:, :, None] - jnp.where(is_label_BMV, weight_BM[:, :, None], 0)
    return losses_B, correct_B, lax.optimization_barrier(g_BMV)


def decoder_parts(h_BMH: Array, g_BMV: Array) -> tuple[Array, Array]:
    """Squared norms of the decoder's part of the word table, and of the output bias: sum (h_m.h_n) (g_m.g_n), sum (g_m.g_n)."""
    outer_BMM = norms.product("bmv,bnv->bmn", g_BMV, g_BMV)
    inner_BMM = norms.product("bmh,bnh->bmn", h_BMH, h_BMH)
    return jnp.maximum((outer_BMM * inner_BMM).sum((1, 2)), 0), jnp.maximum(outer_BMM.sum((1, 2)), 0)

