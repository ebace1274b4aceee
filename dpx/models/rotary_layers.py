"""Defines the layers of decoders with rotary positions (shape.py) as flax modules made of ops; parameters have the declared paths.

Norms, positions, softmax and logits are float32 or wider; matrices are in the compute type.

B: examples, C: texts of an example, R: texts of all, T: tokens of an example, S, U: tokens of one text (queries, keys), H: width, V:
vocabulary, N: query heads, G: key-value heads, Q: query heads that share one, D: numbers of a head.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dpx.clipping import ops
from dpx.clipping.norms import at_least_float32
from dpx.models import dropout as drop
from dpx.models.attention import MASKED_SCORE, by_text, places, seen
from dpx.models.lora import adapted
from dpx.models.modules import Dense, in_compute_dtype, looked_up, table_of
from dpx.models.shape import RotaryDecoder

# The backward pass keeps such a function's inputs and matrix products, and computes everything else again. Layers run in a loop, whose
# forward and backward passes no compiler merges.
_keeps_products = functools.partial(jax.checkpoint, prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable, static_argnums=0)


class RMSNorm(nn.Module):
    """RMSNorm over the last axis, times a scale that starts at one."""

    model: RotaryDecoder

    @nn.compact
    def __call__(self, x: Array) -> Array:
        offset = self.model.norm_offset
        scale = self.param("scale", nn.initializers.constant(1.0 - offset), (x.shape[-1],))
        return ops.rms_norm(x, scale, self.model.rms_norm_eps, offset)


class WordEmbeddings(nn.Module):
    """Looks up words, in the compute type; it returns the word table as well, which a tied head needs."""

    model: RotaryDecoder
    vocabulary_size: int

    @nn.compact
    def __call__(self, token_BT: Array, segment_BT: Array | None, length: Array, keys_B: Array | None):
        model = self.model
        word_VH = table_of(self, model, "word", "new", self.vocabulary_size)
        x_BTH = in_compute_dtype(looked_up(word_VH, token_BT), model)
        return x_BTH if model.embedding_factor == 1 else x_BTH * jnp.asarray(model.embedding_factor, x_BTH.dtype), word_VH


class RotaryLayer(nn.Module):
    """One layer in the form that `nn.scan` requires: (carry, scanned, broadcast...) -> (carry, None).

    If its parameters hold adapters of its dense maps, these are added (lora.py).
    """

    model: RotaryDecoder

    @nn.compact
    def __call__(self, x_BTH: Array, layer: Array, length: Array, keys_B: Array | None) -> tuple[Array, None]:
        model = self.model
        lora = self.variables.get("params", {}).get("lora", {})

        def dropped(x: Array, site: int, rate: Any) -> Array:
            return drop.of_tokens(x, keys_B, layer, site, rate, length)

        def projected(x: Array, name: str, features: int, has_bias: bool = False) -> Array:
            return adapted(Dense(model, features, has_bias, name=name)(x), x, lora, name, dropped)

        def heads_of(x_BTH: Array, name: str, heads: int, norms: str = "none") -> Array:
            y_BTd = projected(x_BTH, name, heads * model.head_dim, model.attention_biases != "none")
            y_BTd = RMSNorm(model, name=f"{name}_norm")(y_BTd) if norms == "whole" else y_BTd
            y_BTND = y_BTd.reshape(*y_BTd.shape[:2], heads, model.head_dim)
            y_BTND = RMSNorm(model, name=f"{name}_norm")(y_BTND) if norms == "head" else y_BTND
            return by_text(y_BTND.reshape(y_BTd.shape), length).reshape(length.size, -1, heads, model.head_dim)

        def attended(x_BTH: Array) -> Array:
            q_RSND = heads_of(x_BTH, "query", model.heads, model.query_key_norms)
            k_RUGD = heads_of(x_BTH, "key", model.key_value_heads, model.query_key_norms)
            v_RUGD = heads_of(x_BTH, "value", model.key_value_heads)
            length_R = length.reshape(-1)
            place = places(self, length_R, q_RSND.shape[1])
            rate_D, is_windowed = rates_of(model, layer)
            q_RSND, k_RUGD = turned(q_RSND, place, rate_D), turned(k_RUGD, place, rate_D)
            k_RUGD, v_RUGD = seen(self, k_RUGD, v_RUGD, length_R, axis=1)
            context_RSH = attend(model, q_RSND, k_RUGD, v_RUGD, place, length_R, is_windowed)
            context_BTH = context_RSH.reshape(*x_BTH.shape[:2], -1)
            return projected(context_BTH, "attention_out", model.width, model.attention_biases == "all")

        def fed_forward(x_BTH: Array) -> Array:
            gate_BTF, up_BTF = (projected(x_BTH, name, model.feed_forward) for name in ("gate", "up"))
            return projected(gated(model.activation, gate_BTF, up_BTF), "down", model.width)

        for name, half in (("attention", attended), ("feed_forward", fed_forward)):
            added_BTH = half(RMSNorm(model, name=f"{name}_norm")(x_BTH) if model.has_pre_norms else x_BTH)
            x_BTH = x_BTH + (RMSNorm(model, name=f"{name}_post_norm")(added_BTH) if model.has_post_norms else added_BTH)
        return x_BTH, None


@_keeps_products
def gated(activation: str, gate_BTF: Array, up_BTF: Array) -> Array:
    """Returns the activation of the gate, times the other projection."""
    activated = jax.nn.silu(gate_BTF) if activation == "silu" else jax.nn.gelu(gate_BTF, approximate=True)
    return activated * up_BTF


def attend(
    model: RotaryDecoder, q_RSND: Array, k_RUGD: Array, v_RUGD: Array, place: Array, length_R: Array, is_windowed: Array | None
) -> Float[Array, "R S d"]:
    """Returns the context of the tokens at `place`, [S] or [R,1], whose queries and keys are turned.

    A token sees itself and the tokens before it, if `is_windowed` those within the model's window.
    """
    if model.attention == "explicit":
        return _attended(model, q_RSND, k_RUGD, v_RUGD, place, length_R, is_windowed)
    options = {"scale": model.query_scale, "is_causal": True, "implementation": model.attention}
    context_RSND = jax.nn.dot_product_attention(q_RSND, k_RUGD, v_RUGD, key_value_seq_lengths=length_R.astype(jnp.int32), **options)
    return context_RSND.reshape(*q_RSND.shape[:2], -1)


@_keeps_products
def _attended(
    model: RotaryDecoder, q_RSND: Array, k_RUGD: Array, v_RUGD: Array, place: Array, length_R: Array, is_windowed: Array | None
) -> Float[Array, "R S d"]:
    """Returns the context by the formula."""
    R, S, _, D = q_RSND.shape
    G = k_RUGD.shape[2]
    at_least_f32 = jnp.promote_types(q_RSND.dtype, jnp.float32)
    scores_RGQSU = (
        jnp.einsum("rsgqd,rugd->rgqsu", q_RSND.reshape(R, S, G, -1, D), k_RUGD, preferred_element_type=at_least_f32) * model.query_scale
    )
    place_U = jnp.arange(k_RUGD.shape[1])
    # [S,U], or [R,1,1,1,U].
    distance = (place if place.ndim == 1 else place[:, None, None])[..., None] - place_U
    is_seen = distance >= 0
    if is_windowed is not None:
        is_seen &= (distance < (model.window or len(place_U))) | ~is_windowed
    is_seen = is_seen & (place_U < length_R[:, None])[:, None, None, None, :]
    scores_RGQSU = jnp.where(is_seen, capped(scores_RGQSU, model.attention_cap), MASKED_SCORE)
    probs_RGQSU = jax.nn.softmax(scores_RGQSU, axis=-1).astype(v_RUGD.dtype)
    return jnp.einsum("rgqsu,rugd->rsgqd", probs_RGQSU, v_RUGD).reshape(R, S, -1)


def rates_of(model: RotaryDecoder, layer: Array) -> tuple[Array | np.ndarray, Array | None]:
    """Returns the rates of the layer of this number, [D/2], and whether it has a window; None if no layer has one."""
    rate_D = rates(model, model.rotary_base, is_scaled=True)
    if model.unturned_every is not None:
        rate_D = jnp.where((layer + 1) % model.unturned_every == 0, 0.0, rate_D)
    if model.window is None:
        return rate_D, None
    is_windowed = (layer + 1) % model.full_every != 0
    if model.window_rotary_base is None:
        return rate_D, is_windowed
    return jnp.where(is_windowed, rates(model, model.window_rotary_base, is_scaled=False), rate_D), is_windowed


def capped(x: Array, cap: float | None) -> Array:
    """Returns c tanh(x / c) for a cap c, or x itself."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rates(model: RotaryDecoder, base: float, *, is_scaled: bool) -> np.ndarray:
    """Returns the angle by which each pair of a head's numbers turns from one position to the next, [D/2]."""
    rate_D = base ** -(np.arange(0, model.head_dim, 2) / model.head_dim)
    if not is_scaled or model.rotary_scaling == "none":
        return rate_D
    if model.rotary_scaling == "linear":
        return rate_D / model.rotary_factor
    # Waves in the original context: few are long, many short.
    waves_D = model.rotary_original_positions * rate_D / (2 * math.pi)
    low, high = model.rotary_low_frequency, model.rotary_high_frequency
    kept_D = np.clip((waves_D - low) / (high - low), 0, 1)
    return rate_D * (kept_D + (1 - kept_D) / model.rotary_factor)


def turned(x_RSND: Array, place: Array, rate_D: Array | np.ndarray) -> Array:
    """Applies rotary positions: it turns the pairs (d, d + D/2) of a token's heads by its position times the rate (Su et al. 2021).

    The position is the token's place in its text, from 0: [S] for all texts, or [R,S].
    """
    wide, half = at_least_float32(x_RSND), x_RSND.shape[-1] // 2
    angle = place.astype(wide.dtype)[..., None] * jnp.asarray(rate_D, wide.dtype)
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    left, right = wide[..., :half], wide[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1).astype(x_RSND.dtype)
