"""A causal decoder (GPT-2: Radford et al. 2019) with its heads; parameters are exactly `Decoder.parameter_shapes`.

B: examples, C: texts of an example, T: tokens, S: tokens of one text, H: width, V: vocabulary.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array

from dpx.clipping import ops
from dpx.clipping.norms import at_least_float32
from dpx.models.modules import Dense, Embeddings, LayerNorm, stack
from dpx.models.shape import Decoder


class DecoderForCausalLM(nn.Module):
    """What `decode(h, table)` makes of every position: logits [B,T,V] of the token after it."""

    model: Decoder
    vocabulary_size: int

    @nn.compact
    def __call__(self, token_BT: Array, length_B: Array, keys_B: Array | None = None, decode: Callable[..., Any] = ops.decode) -> Any:
        model = self.model
        x_BTH, word_VH = Embeddings(model, self.vocabulary_size, name="embeddings")(token_BT, None, length_B, keys_B)
        h_BTH = LayerNorm(model, name="final_norm")(stack(self, model, x_BTH, length_B, keys_B))
        if model.tied:
            return decode(h_BTH, word_VH)
        init = nn.initializers.truncated_normal(model.initialiser_range)
        return decode(h_BTH, self.param("decoder", init, (self.vocabulary_size, model.width)))


class DecoderForClassification(nn.Module):
    """Logits of `outputs` values from the last token of each text: [B,outputs], or [B,C,outputs] for lengths [B,C]."""

    model: Decoder
    vocabulary_size: int
    outputs: int

    @nn.compact
    def __call__(self, token_BT: Array, segment_BT: Array | None, length: Array, keys_B: Array | None = None) -> Array:
        model = self.model
        x_BTH, _ = Embeddings(model, self.vocabulary_size, name="embeddings")(token_BT, None, length, keys_B)
        x_BTH = stack(self, model, x_BTH, length, keys_B)
        x_BCSH = x_BTH.reshape(*length.shape, -1, model.width)
        last = jnp.maximum(length - 1, 0)[..., None, None]
        h = LayerNorm(model, name="final_norm")(jnp.take_along_axis(x_BCSH, last, axis=-2)[..., 0, :])
        return at_least_float32(Dense(model, self.outputs, has_bias=False, name="classifier")(h))
