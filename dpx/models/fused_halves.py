"""Computes the two halves of a layer, attention and feed-forward, forward and backward by hand, in two orders.

Backward returns the cotangent of a half's input and adds to `factors`: each weight's input `a_` and output cotangent `g_`,
`sums`, the per-example gradients of the small leaves, and of each adapter (lora.py) the cotangents of h and of its outputs.

B: examples, T: tokens, H: width, F: feed-forward, d: 3 H.
"""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from dpx.clipping import norms
from dpx.clipping.ops import normalise_cotangent
from dpx.models import dropout as drop
from dpx.models import lora
from dpx.models.attention import attend, attend_backward
from dpx.models.shape import Bert, Decoder

WEIGHTS = ("qkv", "attention_out", "up", "down")
# Weights whose cotangent may be written over a dead residual, and that residual. A LayerNorm's normalised input would fit for `down`, but
# its reader is computed together with that cotangent, and XLA copies the whole stack twice in every layer to keep them apart.
OVER = {"qkv": "qkv"}


class Place(NamedTuple):
    """The position of a layer in a model, and its data about the rows: their lengths, and dropout's keys or None."""

    model: Bert | Decoder
    layer: Array
    length: Array
    keys_B: Array | None

    def dropped(self, x: Array, site: int, rate: Any = None) -> Array:
        """Applies dropout at the model's rate, unless another rate is given."""
        return drop.of_tokens(x, self.keys_B, self.layer, site, self.model.dropout if rate is None else rate, self.length)

    def dropped_probabilities(self, probs: Array) -> Array:
        """Applies dropout to attention probabilities, [B,N,T,S] or [B,C,N,T,S], at the model's rate."""
        # A key for each head and query.
        return drop.dropout(probs, self.keys_B, self.layer, drop.ATTENTION, self.model.dropout, places=probs.ndim - 2)


def cast(p: Any, like: Array) -> Any:
    """Returns kernels and biases in the compute type; LayerNorm parameters and rates keep their type."""

    def one(path: Any, leaf: Array) -> Array:
        return leaf if path[-1].key == "dropout" else leaf.astype(like.dtype)

    return {name: leaf if name.endswith("norm") else jax.tree_util.tree_map_with_path(one, leaf) for name, leaf in p.items()}


def scaled(normalised: Array, p: Any) -> Array:
    """Returns the normalised input of a LayerNorm times its gain plus its offset."""
    return (norms.at_least_float32(normalised) * p["scale"] + p["bias"]).astype(normalised.dtype)


def normalise(x: Array, eps: float) -> tuple[Array, Array]:
    """Returns (x normalised over its last axis, in its type; the factor, float32 or wider)."""
    x_f32 = norms.at_least_float32(x)
    centred = x_f32 - x_f32.mean(-1, keepdims=True)
    factor = lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    return (centred * factor).astype(x.dtype), factor


def norm_backward(g: Array, normalised: Array, factor: Array, p: Any) -> tuple[dict[str, Array], Array]:
    """Returns (per-example gradients of gain and offset; the cotangent of the LayerNorm's input, in g's type)."""
    g_f32, normalised = norms.at_least_float32(g), norms.at_least_float32(normalised)
    sums = {"scale": (g_f32 * normalised).sum(1), "bias": g_f32.sum(1)}
    return sums, normalise_cotangent(g_f32 * p["scale"], normalised, factor).astype(g.dtype)


def linear(place: Place, x: Array, p: Any, weight: str, saved: dict[str, Array]) -> Array:
    """Applies a dense map and its adapters to x; `saved` gets what their backward pass needs."""
    y, own = lora.forward(x @ p[weight]["kernel"] + p[weight]["bias"], x, p.get("lora", {}), weight, place.dropped)
    saved |= own
    return y


def linear_backward(place: Place, g: Array, p: Any, r: Any, weight: str, factors: Any) -> Array:
    """Returns the cotangent of the input of `linear`."""
    g_x, own = g @ p[weight]["kernel"].T, lora.backward(g, p.get("lora", {}), r, weight, factors, place.dropped)
    return g_x if own is None else g_x + own


def gelu_and_slope(u: Array, form: str) -> tuple[Array, Array]:
    """Returns GELU and its derivative at u: u Phi(u), or with GPT-2's approximation of Phi."""
    if form == "exact":
        cumulative, density = 0.5 * (1 + lax.erf(u * 0.5**0.5)), jnp.exp(-0.5 * jnp.square(u)) * (0.5 / jnp.pi) ** 0.5
    else:
        inner = (2 / jnp.pi) ** 0.5 * (u + 0.044715 * u**3)
        cumulative = 0.5 * (1 + jnp.tanh(inner))
        density = 0.5 * (1 - jnp.square(jnp.tanh(inner))) * (2 / jnp.pi) ** 0.5 * (1 + 3 * 0.044715 * jnp.square(u))
    return u * cumulative, cumulative + u * density


def attention(place: Place, p: Any, x_BTH: Array) -> tuple[Array, dict[str, Array]]:
    """Applies the attention half before its residual sum. Returns the output and the residuals for the backward pass."""
    saved: dict[str, Array] = {}
    qkv_BTd = linear(place, x_BTH, p, "qkv", saved)
    context_BTH = attend(qkv_BTd, place.length, place.model, place.dropped_probabilities)
    out_BTH = place.dropped(linear(place, context_BTH, p, "attention_out", saved), drop.ATTENTION_OUT)
    return out_BTH, saved | {"qkv": qkv_BTd, "context": context_BTH}


def attention_backward(place: Place, p: Any, r: Any, g_BTH: Array, factors: Any) -> Array:
    """Returns the cotangent of the input of `attention`."""
    g_attended = place.dropped(g_BTH, drop.ATTENTION_OUT)
    g_context = linear_backward(place, g_attended, p, r, "attention_out", factors)
    g_qkv = attend_backward(r["qkv"], r["context"], g_context, place.length, place.model, place.dropped_probabilities)
    factors |= {"a_attention_out": r["context"], "g_attention_out": g_attended, "g_qkv": g_qkv}
    _sum_biases(factors, "attention_out", "qkv")
    return linear_backward(place, g_qkv, p, r, "qkv", factors)


def feed_forward(place: Place, p: Any, x_BTH: Array) -> tuple[Array, dict[str, Array]]:
    """Applies the feed-forward half before its residual sum. Returns the output and the residuals for the backward pass."""
    saved: dict[str, Array] = {}
    u_BTF = linear(place, x_BTH, p, "up", saved)
    activated_BTF = jax.nn.gelu(u_BTF, approximate=place.model.gelu == "tanh")
    return place.dropped(linear(place, activated_BTF, p, "down", saved), drop.OUTPUT), saved | {"u": u_BTF}


def feed_forward_backward(place: Place, p: Any, r: Any, g_BTH: Array, factors: Any) -> Array:
    """Returns the cotangent of the input of `feed_forward`."""
    dtype, g_down = r["u"].dtype, place.dropped(g_BTH, drop.OUTPUT)
    activated, slope = gelu_and_slope(norms.at_least_float32(r["u"]), place.model.gelu)
    g_up = (linear_backward(place, g_down, p, r, "down", factors) * slope).astype(dtype)
    factors |= {"a_down": activated.astype(dtype), "g_down": g_down, "g_up": g_up}
    _sum_biases(factors, "down", "up")
    return linear_backward(place, g_up, p, r, "up", factors)


def _sum_biases(factors: Any, *weights: str) -> None:
    for weight in weights:
        factors["sums"][weight] = {"bias": norms.at_least_float32(factors[f"g_{weight}"]).sum(1)}


class PostNorm:
    """A layer that normalises after each half's sum, as Bert.

    `sources` names the residual from which each weight's input is recomputed; if it is the name of a LayerNorm, that norm's gain and offset
    are applied.
    """

    sources: ClassVar = {"qkv": "x", "attention_out": "context", "up": "attention_norm", "down": "u"}

    @staticmethod
    def forward(place: Place, p: Any, x_BTH: Array) -> tuple[Array, dict[str, Array]]:
        eps = place.model.layer_norm_eps
        attended, saved = attention(place, p, x_BTH)
        saved["attention_norm"], saved["attention_factor"] = normalise(x_BTH + attended, eps)
        y_BTH = scaled(saved["attention_norm"], p["attention_norm"])
        fed, u = feed_forward(place, p, y_BTH)
        saved["output_norm"], saved["output_factor"] = normalise(y_BTH + fed, eps)
        return scaled(saved["output_norm"], p["output_norm"]), saved | u | {"x": x_BTH}

    @staticmethod
    def backward(place: Place, p: Any, r: Any, g_BTH: Array) -> tuple[Array, Any]:
        factors: dict[str, Any] = {"sums": {}, "a_qkv": r.get("x"), "a_up": scaled(r["attention_norm"], p["attention_norm"])}
        factors["sums"]["output_norm"], g_z = norm_backward(g_BTH, r["output_norm"], r["output_factor"], p["output_norm"])
        g_y = g_z + feed_forward_backward(place, p, r, g_z, factors)
        factors["sums"]["attention_norm"], g_z = norm_backward(g_y, r["attention_norm"], r["attention_factor"], p["attention_norm"])
        return g_z + attention_backward(place, p, r, g_z, factors), factors


class PreNorm:
    """A layer that normalises before each half, as a Decoder; `sources` are those of `PostNorm`."""

    sources: ClassVar = {"qkv": "attention_norm", "attention_out": "context", "up": "feed_forward_norm", "down": "u"}

    @staticmethod
    def forward(place: Place, p: Any, x_BTH: Array) -> tuple[Array, dict[str, Array]]:
        eps = place.model.layer_norm_eps
        normalised, factor = normalise(x_BTH, eps)
        attended, saved = attention(place, p, scaled(normalised, p["attention_norm"]))
        saved |= {"attention_norm": normalised, "attention_factor": factor}
        x_BTH = x_BTH + attended
        normalised, factor = normalise(x_BTH, eps)
        fed, u = feed_forward(place, p, scaled(normalised, p["feed_forward_norm"]))
        return x_BTH + fed, saved | u | {"feed_forward_norm": normalised, "feed_forward_factor": factor}

    @staticmethod
    def backward(place: Place, p: Any, r: Any, g_BTH: Array) -> tuple[Array, Any]:
        factors: dict[str, Any] = {"sums": {}}
        for weight, norm in (("qkv", "attention_norm"), ("up", "feed_forward_norm")):
            factors[f"a_{weight}"] = scaled(r[norm], p[norm])
        g_normed = feed_forward_backward(place, p, r, g_BTH, factors)
        factors["sums"]["feed_forward_norm"], g_z = norm_backward(
            g_normed, r["feed_forward_norm"], r["feed_forward_factor"], p["feed_forward_norm"]
        )
        g_BTH = g_BTH + g_z
        g_normed = attention_backward(place, p, r, g_BTH, factors)
        factors["sums"]["attention_norm"], g_z = norm_backward(g_normed, r["attention_norm"], r["attention_factor"], p["attention_norm"])
        return g_BTH + g_z, factors
