"""Defines BERT (Devlin et al. 2019) and RoBERTa (Liu et al. 2019) with their heads; the parameters are those of `Bert.parameter_shapes`.

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
from dpx.models.modules import Dense, Embeddings, LayerNorm, in_compute_dtype, stack
from dpx.models.shape import Bert


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
        embeddings = Embeddings(model, self.vocabulary_size, name="embeddings")
        x_BTH, word_VH = embeddings(token_BT, segment_BT, length_B, keys_B)
        x_BTH = stack(self, model, x_BTH, length_B, keys_B)
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


def pooled(x_BTH: Array, length: Array, model: Bert) -> Array:
    """Returns the classifier's input for each text, [B,H] or [B,C,H]: its first token, or the mean over its tokens without padding."""
    x_BCSH = x_BTH.reshape(*length.shape, -1, model.width)
    if model.pool == "cls":
        return x_BCSH[..., 0, :]
    is_token = (jnp.arange(x_BCSH.shape[-2]) < length[..., None])[..., None]
    at_least_f32 = at_least_float32(x_BCSH)
    total = jnp.sum(jnp.where(is_token, at_least_f32, 0), axis=-2)
    return (total / jnp.maximum(length, 1)[..., None]).astype(x_BTH.dtype)


class BertFeatures(nn.Module):
    """Computes the classifier's input for each text, from embeddings, layers and `pooled`: [B,H], or [B,C,H] for lengths [B,C]."""

    model: Bert
    vocabulary_size: int

    @nn.compact
    def __call__(self, token_BT: Array, segment_BT: Array, length: Array) -> Array:
        return _features(self, token_BT, segment_BT, length, None)


class BertForClassification(nn.Module):
    """Computes logits of `outputs` values from each text's `pooled` vector: [B,outputs], or [B,C,outputs] for lengths [B,C].

    With `noised` the last map reads `noised(h)` in place of its input h, without dropout after it. If `features` are given (the output of
    `BertFeatures` for the same texts), the texts are not read and may be `None`.
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
        h = drop.of_head(h, keys_B, model, 0) if noised is None else noised(h)
        return at_least_float32(Dense(model, self.outputs, name="classifier")(h))


def _features(
    module: BertFeatures | BertForClassification, token_BT: Any, segment_BT: Array | None, length: Any, keys_B: Array | None
) -> Array:
    model = module.model
    x_BTH, _ = Embeddings(model, module.vocabulary_size, name="embeddings")(token_BT, segment_BT, length, keys_B)
    return pooled(stack(module, model, x_BTH, length, keys_B), length, model)
