"""Defines whole networks, layers with their heads: BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019), and causal decoders (GPT-2:
Radford et al. 2019; others have rotary positions). Their parameters are those of `parameter_shapes`.

B: examples, C: texts of an example, T: tokens, S: tokens of one text, H: width, M: masked positions, V: vocabulary.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from dpx.clipping import ops
from dpx.clipping.norms import at_least_float32
from dpx.models import dropout as drop
from dpx.models.modules import Dense, Embeddings, Layer, LayerNorm, decoded, in_compute_dtype, stack, table_of
from dpx.models.rotary_layers import RMSNorm, RotaryLayer, WordEmbeddings
from dpx.models.shape import Bert, Decoder, Model, RotaryDecoder

AnyDecoder = Decoder | RotaryDecoder


class MaskedHead(nn.Module):
    """The masked-token head: a dense map, GELU and LayerNorm, then `decode(h, table, bias)`.

    The table is the word table, or the head's own if it is not tied.
    """

    model: Bert
    vocabulary_size: int

    @nn.compact
    def __call__(self, x_BMH: Array, word_VH: Any, decode: Callable[..., Any]) -> Any:
        model = self.model
        transformed_BMH = jax.nn.gelu(Dense(model, model.width, name="transform")(x_BMH), approximate=False)
        h_BMH = LayerNorm(model, name="norm")(transformed_BMH)
        bias_V = self.param("output_bias", nn.initializers.zeros, (self.vocabulary_size,))
        if model.tied:
            return decode(h_BMH, word_VH, bias_V)
        init = nn.initializers.truncated_normal(model.initialiser_range)
        return decode(h_BMH, self.param("decoder", init, (self.vocabulary_size, model.width)), bias_V)


class BertForPreTraining(nn.Module):
    """BERT with the heads of pre-training.

    Returns the output of `decode` at the masked positions (logits [B,M,V]) and, with `next_sentence`, the logits of that classifier (else
    None).
    """

    model: Bert
    vocabulary_size: int
    next_sentence: bool

    @nn.compact
    def __call__(
        self,
        token_BT: Int[Array, "B T"],
        segment_BT: Int[Array, "B T"],
        length_B: Int[Array, " B"],
        masked_position_BM: Int[Array, "B M"],
        keys_B: UInt32[Array, "B 2"] | None = None,
        decode: Callable[..., Any] = ops.decode,
    ) -> tuple[Any, Float[Array, "B 2"] | None]:
        model = self.model
        x_BTH, word_VH = _hidden(self, token_BT, segment_BT, length_B, keys_B)
        x_BMH = jnp.take_along_axis(x_BTH, masked_position_BM[:, :, None], axis=1)
        masked = MaskedHead(model, self.vocabulary_size, name="mlm")(x_BMH, word_VH, decode)
        if not self.next_sentence:
            return masked, None
        pooled_BH = jnp.tanh(Dense(model, model.width, name="pooler")(x_BTH[:, 0]))
        return masked, at_least_float32(Dense(model, 2, name="next_sentence")(pooled_BH))


class DenseClassifier(nn.Module):
    """The classifier of RoBERTa (dropout, dense, tanh, dropout, output) or of DistilBERT (dense, ReLU, dropout, output)."""

    model: Bert
    outputs: int

    @nn.compact
    def __call__(self, x: Array, keys_B: Array | None, noised: Callable[[Array], Array] | None = None) -> Array:
        model = self.model
        dense = Dense(model, model.width, name="dense")
        is_relu = model.classifier == "relu"
        hidden = jax.nn.relu(dense(x)) if is_relu else jnp.tanh(dense(drop.of_head(x, keys_B, model, 0)))
        hidden = drop.of_head(hidden, keys_B, model, 1) if noised is None else noised(hidden)
        return Dense(model, self.outputs, name="out")(hidden)


class Features(nn.Module):
    """Computes the classifier's input for each text, from embeddings and layers: [B,H], or [B,C,H] for lengths [B,C]."""

    model: Model
    vocabulary_size: int

    @nn.compact
    def __call__(self, token_BT: Array, segment_BT: Array | None, length: Array) -> Array:
        return _features(self, token_BT, segment_BT, length, None)


class BertForClassification(nn.Module):
    """Computes logits of `outputs` values from each text's `pooled` vector: [B,outputs], or [B,C,outputs] for lengths [B,C].

    With `noised` the last map reads `noised(h)` in place of its input h, without dropout after it. If `features` are given (the output of
    `Features` for the same texts), the texts are not read and may be `None`.
    """

    model: Bert
    vocabulary_size: int
    outputs: int

    @nn.compact
    def __call__(
        self,
        token_BT: Array | None,
        segment_BT: Array | None,
        length: Array | None,
        keys_B: Array | None = None,
        features: Array | None = None,
        noised: Callable[[Array], Array] | None = None,
    ) -> Array:
        model = self.model
        h = _features(self, token_BT, segment_BT, length, keys_B) if features is None else in_compute_dtype(features, model)
        if model.classifier in ("dense", "relu"):
            return at_least_float32(DenseClassifier(model, self.outputs, name="classifier")(h, keys_B, noised))
        if model.classifier == "pooler":
            h = jnp.tanh(Dense(model, model.width, name="pooler")(h))
        if model.classifier in ("linear_tanh", "linear_relu"):
            h = jnp.tanh(h) if model.classifier == "linear_tanh" else jax.nn.relu(h)
        h = drop.of_head(h, keys_B, model, 0) if noised is None else noised(h)
        return at_least_float32(Dense(model, self.outputs, name="classifier")(h))


class DecoderForCausalLM(nn.Module):
    """Computes the output of `decode(h, table)` at every position: logits [B,T,V] of the token after it."""

    model: AnyDecoder
    vocabulary_size: int

    @nn.compact
    def __call__(self, token_BT: Array, length_B: Array, keys_B: Array | None = None, decode: Callable[..., Any] = decoded) -> Any:
        model = self.model
        h_BTH, word_VH = _hidden(self, token_BT, None, length_B, keys_B)
        h_BTH = _norm(model)(h_BTH)
        if model.tied:
            return decode(h_BTH, word_VH)
        return decode(h_BTH, table_of(self, model, "decoder", "decoder_new", self.vocabulary_size))


class DecoderForClassification(nn.Module):
    """Computes logits of `outputs` values from the last token of each text: [B,outputs], or [B,C,outputs] for lengths [B,C].

    If `features` are given (the output of `Features` for the same texts), the texts are not read and may be `None`.
    """

    model: AnyDecoder
    vocabulary_size: int
    outputs: int

    @nn.compact
    def __call__(
        self,
        token_BT: Array | None,
        segment_BT: Array | None,
        length: Array | None,
        keys_B: Array | None = None,
        features: Array | None = None,
    ) -> Array:
        model = self.model
        h = _features(self, token_BT, None, length, keys_B) if features is None else in_compute_dtype(features, model)
        h = _norm(model)(h)
        return at_least_float32(Dense(model, self.outputs, has_bias=False, name="classifier")(h))


def _hidden(module: nn.Module, token_BT: Any, segment_BT: Any, length: Any, keys_B: Array | None) -> tuple[Array, Any]:
    """Returns each token's vector after the layers, before a decoder's last norm, and the word table."""
    model: Model = module.model  # type: ignore[attr-defined]
    embeddings, layer = (WordEmbeddings, RotaryLayer) if isinstance(model, RotaryDecoder) else (Embeddings, Layer)
    x_BTH, word_VH = embeddings(model, module.vocabulary_size, name="embeddings")(token_BT, segment_BT, length, keys_B)  # type: ignore
    return stack(module, model, x_BTH, length, keys_B, layer), word_VH


def _norm(model: AnyDecoder) -> nn.Module:
    """Returns the norm after the last layer."""
    return RMSNorm(model, name="final_norm") if isinstance(model, RotaryDecoder) else LayerNorm(model, name="final_norm")


def _features(module: nn.Module, token_BT: Any, segment_BT: Array | None, length: Any, keys_B: Array | None) -> Array:
    """Returns the classifier's input for each text: its last token in a decoder, else its first, or the mean over its tokens without
    padding."""
    model: Model = module.model  # type: ignore[attr-defined]
    x_BTH, _ = _hidden(module, token_BT, segment_BT, length, keys_B)
    x_BCSH = x_BTH.reshape(*length.shape, -1, model.width)
    if not isinstance(model, Bert):
        return jnp.take_along_axis(x_BCSH, jnp.maximum(length - 1, 0)[..., None, None], axis=-2)[..., 0, :]
    if model.pool == "cls":
        return x_BCSH[..., 0, :]
    is_token = (jnp.arange(x_BCSH.shape[-2]) < length[..., None])[..., None]
    total = jnp.sum(jnp.where(is_token, at_least_float32(x_BCSH), 0), axis=-2)
    return (total / jnp.maximum(length, 1)[..., None]).astype(x_BTH.dtype)
