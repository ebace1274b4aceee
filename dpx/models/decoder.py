"""Defines a causal decoder (GPT-2: Radford et al. 2019, or one with rotary positions) with its heads; the parameters are those of
`parameter_shapes`.

B: examples, C: texts of an example, T: tokens, S: tokens of one text, H: width, V: vocabulary.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array

from dpx.clipping import ops
from dpx.clipping.norms import at_least_float32
from dpx.models.modules import Dense, Embeddings, Layer, LayerNorm, in_compute_dtype, stack
from dpx.models.rotary_layers import RMSNorm, RotaryLayer, WordEmbeddings
from dpx.models.shape import Decoder, RotaryDecoder

AnyDecoder = Decoder | RotaryDecoder


class DecoderForCausalLM(nn.Module):
    """Computes the output of `decode(h, table)` at every position: logits [B,T,V] of the token after it."""

    model: AnyDecoder
    vocabulary_size: int

    @nn.compact
    def __call__(self, token_BT: Array, length_B: Array, keys_B: Array | None = None, decode: Callable[..., Any] = ops.decode) -> Any:
        model = self.model
        h_BTH, word_VH = _hidden(self, token_BT, length_B, keys_B)
        h_BTH = _norm(model)(h_BTH)
        if model.tied:
            return decode(h_BTH, word_VH)
        init = nn.initializers.truncated_normal(model.initialiser_range)
        return decode(h_BTH, self.param("decoder", init, (self.vocabulary_size, model.width)))


class DecoderFeatures(nn.Module):
    """Computes the classifier's input for each text, its last token after all layers: [B,H], or [B,C,H] for lengths [B,C]."""

    model: AnyDecoder
    vocabulary_size: int

    @nn.compact
    def __call__(self, token_BT: Array, segment_BT: Array | None, length: Array) -> Array:
        return _features(self, token_BT, length, None)


class DecoderForClassification(nn.Module):
    """Computes logits of `outputs` values from the last token of each text: [B,outputs], or [B,C,outputs] for lengths [B,C].

    If `features` are given (the output of `DecoderFeatures` for the same texts), the texts are not read and may be `None`.
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
        h = _features(self, token_BT, length, keys_B) if features is None else in_compute_dtype(features, model)
        h = _norm(model)(h)
        return at_least_float32(Dense(model, self.outputs, has_bias=False, name="classifier")(h))


def _hidden(module: nn.Module, token_BT: Any, length: Any, keys_B: Array | None) -> tuple[Array, Any]:
    """Returns each token's vector before the last norm, and the word table."""
    model: AnyDecoder = module.model  # type: ignore[attr-defined]
    embeddings, layer = (WordEmbeddings, RotaryLayer) if isinstance(model, RotaryDecoder) else (Embeddings, Layer)
    x_BTH, word_VH = embeddings(model, module.vocabulary_size, name="embeddings")(token_BT, None, length, keys_B)  # type: ignore
    return stack(module, model, x_BTH, length, keys_B, layer), word_VH


def _norm(model: AnyDecoder) -> nn.Module:
    """Returns the norm after the last layer."""
    return RMSNorm(model, name="final_norm") if isinstance(model, RotaryDecoder) else LayerNorm(model, name="final_norm")


def _features(module: DecoderFeatures | DecoderForClassification, token_BT: Any, length: Any, keys_B: Array | None) -> Array:
    x_BTH, _ = _hidden(module, token_BT, length, keys_B)
    x_BCSH = x_BTH.reshape(*length.shape, -1, module.model.width)
    return jnp.take_along_axis(x_BCSH, jnp.maximum(length - 1, 0)[..., None, None], axis=-2)[..., 0, :]
