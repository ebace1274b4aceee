"""Computes a model of the Gemma family (gemma.py) for one example, in plain JAX, with the declared parameters.

Matrices are in the compute type, which is the type of the word table's rows; norms, positions and softmax are float32 or wider.

T: tokens (S: those looked at), H: width, F: feed-forward, G: key-value heads, Q: queries that share one, D: numbers of a head.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jaxtyping import Array

from dpx.clipping.groups import LAYERS
from dpx.clipping.norms import at_least_float32
from dpx.models.protocol import Shapes
from dpx.models.trainable import BELOW


class Settings(NamedTuple):
    """The settings that the model reads from its declaration; all others follow from the shapes of the parameters."""

    key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rotary_base: float


def initial(shapes: Shapes, key: Any, spread: float) -> dict[str, Any]:
    """Returns initial parameters: kernels and the table are drawn from a normal of standard deviation `spread`, cut at two deviations.

    The scales of norms, which are offsets from one, start at zero.
    """
    drawn = jax.nn.initializers.truncated_normal(spread)
    params = {
        path: jnp.zeros(shape) if path.endswith("/scale") else drawn(jax.random.fold_in(key, place), shape)
        for place, (path, shape) in enumerate(shapes.items())
    }
    return unflatten_dict(params, sep="/")


def hidden(settings: Settings, params: Any, tokens_T: Array) -> Array:
    """Returns the vector of each token after the last norm, [T, H]."""
    word_TH = params["embeddings"]["word"][tokens_T]
    x_TH = word_TH * jnp.asarray(math.sqrt(word_TH.shape[1]), word_TH.dtype)

    def layer(x_TH: Array, of_layer: Any) -> tuple[Array, None]:
        x_TH = x_TH + _attended(settings, of_layer, _normed(settings, x_TH, of_layer["attention_norm"]))
        return x_TH + _fed_forward(of_layer, _normed(settings, x_TH, of_layer["feed_forward_norm"])), None

    for stack in (BELOW, LAYERS) if BELOW in params else (LAYERS,):
        x_TH = jax.lax.scan(layer, x_TH, params[stack])[0]
    return _normed(settings, x_TH, params["final_norm"])


def _normed(settings: Settings, x: Array, norm: Any) -> Array:
    """Applies RMSNorm (Zhang & Sennrich 2019), times one plus its scale."""
    wide = at_least_float32(x)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + settings.rms_norm_eps)
    return (normed * (1 + norm["scale"])).astype(x.dtype)


def _attended(settings: Settings, of_layer: Any, x_TH: Array) -> Array:
    T, G, D = len(x_TH), settings.key_value_heads, settings.head_dim
    query_TGQD = _turned((x_TH @ of_layer["query"]["kernel"]).reshape(T, G, -1, D), settings.rotary_base)
    key_SGD = _turned((x_TH @ of_layer["key"]["kernel"]).reshape(T, G, D), settings.rotary_base)
    value_SGD = (x_TH @ of_layer["value"]["kernel"]).reshape(T, G, D)
    scores_GQTS = jnp.einsum("tgqd,sgd->gqts", query_TGQD, key_SGD) / math.sqrt(D)
    scores_GQTS = jnp.where(jnp.tri(T, dtype=bool), at_least_float32(scores_GQTS), -jnp.inf)
    context_TGQD = jnp.einsum("gqts,sgd->tgqd", jax.nn.softmax(scores_GQTS).astype(x_TH.dtype), value_SGD)
    return context_TGQD.reshape(T, -1) @ of_layer["attention_out"]["kernel"]


def _turned(x: Array, base: float) -> Array:
    """Applies rotary positions: it turns the pairs (d, d + D/2) of each token's vector by its position times base^(-2d/D) (Su et al. 2021).

    The position is the token's place in its text, from 0.
    """
    wide, half = at_least_float32(x), x.shape[-1] // 2
    rate_D = base ** (-jnp.arange(half, dtype=wide.dtype) / half)
    angle_TD = jnp.arange(len(x), dtype=wide.dtype)[:, None] * rate_D
    angle = angle_TD.reshape(len(x), *[1] * (x.ndim - 2), half)
    left, right = wide[..., :half], wide[..., half:]
    turned = (left * jnp.cos(angle) - right * jnp.sin(angle), right * jnp.cos(angle) + left * jnp.sin(angle))
    return jnp.concatenate(turned, -1).astype(x.dtype)


def _fed_forward(of_layer: Any, x_TH: Array) -> Array:
    """Applies GeGLU (Shazeer 2020), with GELU's tanh form."""
    gated_TF = jax.nn.gelu(x_TH @ of_layer["gate"]["kernel"], approximate=True) * (x_TH @ of_layer["up"]["kernel"])
    return gated_TF @ of_layer["down"]["kernel"]
