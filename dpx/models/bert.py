"""BERT (Devlin et al. 2019) as flax modules, composed of ops; its parameters are exactly `Bert.parameter_shapes`.

With bare parameters its gradient is plain autodiff; with wrapped ones the ops leave what clipping needs (`dpx.clipping.probes`).

Parameters are float32 and are cast where they are used: to bfloat16 if the model computes in it, otherwise not at all, so
parameters given in float64 yield a float64 model (the oracle of the tests). LayerNorm, softmax and logits are float32 or wider.

B: examples, T: tokens, H: width, N: heads, D: head size, F: feed-forward, M: masked slots, V: vocabulary.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from dpx.clipping import ops
from dpx.models import dropout as drop
from dpx.models.attention import attend
from dpx.models.shape import Bert


def at_least_float32(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def in_compute_dtype(x: Array, model: Bert) -> Array:
    return x.astype(jnp.bfloat16) if model.dtype == "bfloat16" else x


def embed(model: Bert, word: Any, position: Any, segment: Any, token_BT: Array, segment_BT: Array, decoded: int) -> tuple[Array, ops.Tie]:
    """Word + position + segment rows, summed in at least float32, in the compute dtype; and the tie for `decoded` positions."""
    wide = jnp.promote_types(getattr(word, "value", word).dtype, jnp.float32)
    x_BTH, tie = ops.tied_lookup(word, token_BT, decoded, wide)
    x_BTH = ops.add_rows(x_BTH, position) + ops.small_lookup(segment, segment_BT, wide)
    return in_compute_dtype(x_BTH, model), tie


class Dense(nn.Module):
    """x @ kernel + bias."""

    model: Bert
    features: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = self.param("kernel", nn.initializers.truncated_normal(self.model.initialiser_range), (x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return ops.dense(x, kernel, bias)


class LayerNorm(nn.Module):
    model: Bert

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        return ops.layer_norm(x, scale, bias, self.model.layer_norm_eps)


class Embeddings(nn.Module):
    """Word + position + segment, then LayerNorm. Returns the word table and its tie as well: the decoder is tied to it."""

    model: Bert
    vocabulary_size: int

    @nn.compact
    def __call__(self, token_BT: Array, segment_BT: Array, decoded: int, keys_B: Array | None) -> tuple[Array, Any, ops.Tie]:
        model = self.model
        init = nn.initializers.truncated_normal(model.initialiser_range)
        word_VH = self.param("word", init, (self.vocabulary_size, model.width))
        position_PH = self.param("position", init, (model.positions, model.width))
        segment_SH = self.param("segment", init, (model.segments, model.width))
        x_BTH, tie = embed(model, word_VH, position_PH, segment_SH, token_BT, segment_BT, decoded)
        x_BTH = LayerNorm(model, name="norm")(x_BTH)
        return drop.dropout(x_BTH, keys_B, -1, drop.EMBEDDING, model.dropout), word_VH, tie


class Layer(nn.Module):
    """One post-LayerNorm encoder layer, in the form `nn.scan` wants: (carry, scanned, broadcast...) -> (carry, None)."""

    model: Bert

    @nn.compact
    def __call__(self, x_BTH: Array, layer: Array, length_B: Array, keys_B: Array | None) -> tuple[Array, None]:
        model = self.model

        def dropped(x: Array, site: int) -> Array:
            return drop.dropout(x, keys_B, layer, site, model.dropout)

        qkv_BT3H = Dense(model, 3 * model.width, name="qkv")(x_BTH)
        context_BTH = attend(qkv_BT3H, length_B, model.heads, lambda probs: dropped(probs, drop.ATTENTION))
        attended_BTH = dropped(Dense(model, model.width, name="attention_out")(context_BTH), drop.ATTENTION_OUT)
        y_BTH = LayerNorm(model, name="attention_norm")(x_BTH + attended_BTH)
        up_BTF = jax.nn.gelu(Dense(model, model.feed_forward, name="up")(y_BTH), approximate=False)
        down_BTH = dropped(Dense(model, model.width, name="down")(up_BTF), drop.OUTPUT)
        return LayerNorm(model, name="output_norm")(y_BTH + down_BTH), None


class MaskedHead(nn.Module):
    """Transform, GELU, LayerNorm, then the decoder tied to the word table, at gathered positions. Logits float32 or wider."""

    model: Bert
    vocabulary_size: int

    @nn.compact
    def __call__(self, x_BMH: Array, word_VH: Any, tie: ops.Tie) -> Array:
        transformed_BMH = jax.nn.gelu(Dense(self.model, self.model.width, name="transform")(x_BMH), approximate=False)
        h_BMH = LayerNorm(self.model, name="norm")(transformed_BMH)
        bias_V = self.param("output_bias", nn.initializers.zeros, (self.vocabulary_size,))
        return ops.tied_decode(h_BMH, word_VH, bias_V, tie)


class BertForPreTraining(nn.Module):
    """Logits of the masked slots [B,M,V] and, with `next_sentence`, of the next-sentence classifier [B,2] (else None)."""

    model: Bert
    vocabulary_size: int
    next_sentence: bool

    @nn.compact
    def __call__(
        self,
        token_BT: Int[Array, "B T"],
        segment_BT: Int[Array, "B T"],
        length_B: Int[Array, " B"],
        slot_BM: Int[Array, "B M"],
        keys_B: UInt32[Array, "B 2"] | None = None,
    ) -> tuple[Float[Array, "B M V"], Float[Array, "B 2"] | None]:
        model = self.model
        x_BTH, word_VH, tie = Embeddings(model, self.vocabulary_size, name="embeddings")(token_BT, segment_BT, slot_BM.shape[1], keys_B)
        in_axes: Any = (0, nn.broadcast, nn.broadcast)
        stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=model.layers, in_axes=in_axes)
        x_BTH, _ = stack(model, name="layers")(x_BTH, jnp.arange(model.layers), length_B, keys_B)
        x_BMH = jnp.take_along_axis(x_BTH, slot_BM[:, :, None], axis=1)
        masked_BMV = MaskedHead(model, self.vocabulary_size, name="mlm")(x_BMH, word_VH, tie)
        if not self.next_sentence:
            return masked_BMV, None
        pooled_BH = jnp.tanh(Dense(model, model.width, name="pooler")(x_BTH[:, 0]))
        return masked_BMV, at_least_float32(Dense(model, 2, name="next_sentence")(pooled_BH))
