"""Computes the stack of layers as one block, with a backward pass written by hand that keeps few residuals.

Forward keeps, per token and layer, 11 widths (a Bert: input, qkv, context, two normalised LayerNorm inputs, and u, before GELU)
or 10 (a Decoder, which needs no input); attention probabilities, GELU and dropout masks are computed again. The reverse loop
writes cotangents over dead residuals. The block computes exactly the composition of ops in modules.py, in another order.
With `model.rematerialize=layers` it keeps the input alone, 1 width, and computes the others again in the reverse loop; inputs and
cotangents of trained matrices whose norm is not taken from kept gradients are then records, and remain until the sum.

Without the loop the results of layers stay separate, one entry per layer, and the compiler reuses dead buffers: a stack of kept
gradients would be filled with zeros, written and read once more, a tenth of the time of a small model on a CPU.

A layer has two halves, attention and feed-forward, in two orders (`PostNorm`, `PreNorm`). The backward pass of a half returns the cotangent
of its input and adds to `factors`: each weight's input `a_` and output cotangent `g_`,
`sums`, the per-example gradients of the small leaves, and of each adapter (lora.py) the cotangents of h and of its outputs.

B: examples, T: tokens, H: width, F: feed-forward, L: layers, d: 3 H.
"""

import dataclasses
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from dpx.clipping import bounds, norms
from dpx.clipping.norms import rows
from dpx.clipping.op import Op, ProbeSession, is_probed
from dpx.clipping.ops import form_of, normalise_cotangent
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


# With more layers than this, an unrolled program costs more compile time than its loop costs.
MOST_IN_LINE = 8


def layer_stack(model: Bert | Decoder, layers: Any, x_BTH: Array, session: ProbeSession, first: int = 0) -> "LayerStack":
    """Returns the block for parameters `layers`, wrapped or not.

    The form of each weight's norm follows from the shapes and the memory that the session may use. The layers are all of the model's, or as
    many as `layers` holds from number `first` on.

    A short stack is unrolled if memory suffices: if the gradient of every trained weight is kept, and nothing is computed again.
    """
    B, T, H = x_BTH.shape
    kernels = {weight: layers[weight]["kernel"] for weight in WEIGHTS}
    trained = [weight for weight, kernel in kernels.items() if is_probed(kernel)]
    if kernels["qkv"].shape[0] != model.layers:
        model = dataclasses.replace(model, layers=kernels["qkv"].shape[0])
    if trained:
        held = B * T * (7 * H + model.feed_forward) * model.layers * x_BTH.dtype.itemsize
        session.hold("layers", held * len(trained) // len(WEIGHTS))
    forms: tuple[norms.Form, ...] = tuple(form_of(B, T, kernel, kernel.shape[-2:]) for kernel in kernels.values())
    is_plenty = model.layers <= MOST_IN_LINE and model.rematerialize == "none"
    is_plenty = is_plenty and all(form == "kept" for form, weight in zip(forms, WEIGHTS, strict=True) if weight in trained)
    return LayerStack(model, forms, is_loop=model.scan and not is_plenty, first=first)


def in_line(layers: int, body: Any, carry: Any, xs: tuple, reverse: bool = False) -> tuple[Any, list[Any]]:
    """Applies `body` over layers as `lax.scan` does, but without a loop: results stay separate, one entry for each layer.

    Each of `xs` is a tree of stacks [L, ...], or such a list.
    """

    def at(x: Any, layer: int) -> Any:
        return x[layer] if isinstance(x, list) else jax.tree.map(lambda leaf: leaf[layer], x)

    outputs: list[Any] = [None] * layers
    for layer in reversed(range(layers)) if reverse else range(layers):
        carry, outputs[layer] = body(carry, tuple(at(x, layer) for x in xs))
    return carry, outputs


def stacked(each: Any) -> Any:
    """Returns the results of `over_layers` as stacks [L, ...]."""
    return jax.tree.map(lambda *layers: jnp.stack(layers), *each) if isinstance(each, list) else each


@dataclasses.dataclass(frozen=True)
class LayerStack(Op):
    """The stack of layers as one op.

    `leaves` are the subtree `layers`; the inputs are x_BTH, length and keys_B (dropout's record keys, or None). `forms` has one form for
    each weight.

    `first`: the number of the lowest layer, which dropout's masks follow from.
    """

    norm_sees_all = True
    model: Bert | Decoder
    forms: tuple[norms.Form, ...]
    is_loop: bool = True
    name: str = "layer_stack"
    stacked: bool = True
    rows_per_unit: int = 1
    frozen: tuple[str, ...] = ()
    first: int = 0

    @cached_property
    def form(self) -> dict[str, norms.Form]:
        """Returns the form of the norm of every trained kernel, by weight."""
        return {weight: form for weight, form in zip(WEIGHTS, self.forms, strict=True) if self.trains(f"{weight}/kernel")}

    @property
    def order(self) -> type[PreNorm | PostNorm]:
        """Returns the order of the halves of a layer."""
        return PreNorm if self.model.causal else PostNorm

    @property
    def is_rematerialized(self) -> bool:
        """Returns whether the reverse pass computes a layer's residuals again from its input."""
        return self.model.rematerialize == "layers"

    @property
    def over(self) -> dict[str, str]:
        """Returns the weights whose cotangent is kept, each with the residual that it overwrites in the loop."""
        over = OVER if self.is_loop and not self.is_rematerialized else {}
        return {weight: residual for weight, residual in over.items() if self.form.get(weight, "kept") != "kept"}

    @property
    def needed(self) -> set[str]:
        """Returns the residuals from which inputs of weights are recomputed when their gradients are summed."""
        return {self.order.sources[weight] for weight, form in self.form.items() if form != "kept"}

    @property
    def recorded(self) -> set[str]:
        """Returns the residuals that each layer's record holds: those needed that are not in a stack already."""
        if not self.is_loop:
            return self.needed
        return self.needed - {"x"} if self.is_rematerialized else set()

    @property
    def numbers(self) -> Array:
        """Returns the numbers of the layers, counted from the model's lowest."""
        return jnp.arange(self.model.layers) + self.first if self.first else jnp.arange(self.model.layers)

    def values_needed(self):
        """Returns the frozen LayerNorm parameters from which the inputs of weights are recomputed."""
        gains = [f"{source}/{leaf}" for source in sorted(self.needed) if source.endswith("norm") for leaf in ("scale", "bias")]
        return tuple(name for name in gains if not self.trains(name))

    def over_layers(self, body: Any, carry: Any, xs: tuple, reverse: bool = False) -> tuple[Any, Any]:
        """Applies `body` over the layers, as a loop or unrolled."""
        run = lax.scan if self.is_loop else partial(in_line, self.model.layers)
        return run(body, carry, xs, reverse=reverse)

    def forward(self, leaves, inputs):
        x_BTH, length, keys_B = inputs

        def body(x_BTH, xs):
            p, layer = xs
            y_BTH, saved = self.order.forward(Place(self.model, layer, length, keys_B), cast(p, x_BTH), x_BTH)
            if self.is_rematerialized:
                return y_BTH, {"x": x_BTH}
            return y_BTH, {name: residual for name, residual in saved.items() if self._is_kept(name, p)}

        x_BTH, saved = self.over_layers(body, x_BTH, (leaves, self.numbers))
        return x_BTH, (saved, length, keys_B)

    def _is_kept(self, residual: str, p: Any) -> bool:
        """Returns whether the backward pass needs a residual.

        The input of `qkv` and the h of adapters are kept only for trained parameters.
        """
        if residual == "x":
            adapters = [name for name, *_ in lora.adapters_of(p.get("lora", {}), "qkv")]
            return self.trains("qkv/kernel") or any(self.trains(f"lora/{name}/a") for name in adapters)
        return not residual.startswith("h_") or self.trains(f"lora/{residual[2:]}/b")

    def _layer_backward(self, place: Place, p: Any, r: Any, g_BTH: Array) -> tuple[Array, Any, Any]:
        """Returns (the cotangent of a layer's input, factors, its residuals), from what `forward` kept of it."""
        p = cast(p, g_BTH)
        if self.is_rematerialized:
            # Outside a loop a compiler may merge this with the forward pass and keep everything; that for CPUs does so all the same.
            x_BTH, g_BTH = (r["x"], g_BTH) if self.is_loop else lax.optimization_barrier((r["x"], g_BTH))
            # Rounded to their type before norms are taken of them: the sum reads what was stored.
            r = jax.tree.map(norms.as_stored, self.order.forward(place, p, x_BTH)[1])
        return *self.order.backward(place, p, r, g_BTH), r

    def input_cotangent(self, leaves, residuals, cotangent):
        saved, length, keys_B = residuals
        # Without a loop no residual is overwritten, and each layer's record holds what it needs.
        in_place = {residual: saved[residual] for residual in self.over.values()}

        def body(carry, xs):
            g_BTH, in_place = carry
            p, r, layer = xs
            r = r | {name: lax.dynamic_index_in_dim(buffer, layer, keepdims=False) for name, buffer in in_place.items()}
            g_BTH, factors, r = self._layer_backward(Place(self.model, layer, length, keys_B), p, r, g_BTH)
            record = self._record(factors) | {name: r[name] for name in self.recorded}
            over = {residual: factors[f"g_{weight}"] for weight, residual in self.over.items()}
            in_place = {name: lax.dynamic_update_index_in_dim(buffer, over[name], layer, 0) for name, buffer in in_place.items()}
            return (g_BTH, in_place), record

        read_only = {name: value for name, value in saved.items() if name not in in_place} if in_place else saved
        xs = (leaves, read_only, self.numbers)
        (g_BTH, in_place), record = self.over_layers(body, (cotangent, in_place), xs, reverse=True)
        if self.is_loop:
            record = record | in_place | {name: read_only[name] for name in self.needed - self.recorded}
        return (g_BTH, None, None), record

    def _record(self, factors: Any) -> Any:
        """Returns the results of one layer: its squared norms, sums of biases and gains, and kept gradients or cotangents."""
        sums = jax.tree.map(self.over_rows, self._trained_sums(factors))
        sums |= self._of_adapters(factors, lambda a, g: norms.per_example(self.tokens(a), self.tokens(g)))
        if not sums and not self.form:
            return {}
        record = {"sums": sums, "kept": {}, "squares": sum(norms.squares(x) for x in jax.tree.leaves(sums))}
        for weight in self.form:
            a, g = self.tokens(factors[f"a_{weight}"]), self.tokens(factors[f"g_{weight}"])
            own = norms.recorded(self.form[weight], a, g)
            record["squares"] += bounds.upper(norms.of_recorded(self.form[weight], own))
            if self.form[weight] == "kept":
                record["kept"][weight] = own["kernel"]
            elif weight not in self.over:
                # It cannot overwrite a dead residual, so it is kept here.
                record[f"g_{weight}"] = factors[f"g_{weight}"]
        return record

    def _trained_sums(self, factors: Any) -> Any:
        """Returns the sums of the trained small leaves, by their paths."""
        if not self.frozen:
            return factors["sums"]
        kept = {name: {leaf: x for leaf, x in of.items() if self.trains(f"{name}/{leaf}")} for name, of in factors["sums"].items()}
        return {name: of for name, of in kept.items() if of}

    def _of_adapters(self, factors: Any, product: Any) -> Any:
        """Applies `product` to input and output cotangent of each trained factor, and returns the results under the name `lora`."""
        gradients = {}
        for name, (h_BTr, g_BTr, g_BTc, taken) in factors.get("lora", {}).items():
            own = {"b": product(h_BTr, g_BTc)} if self.trains(f"lora/{name}/b") else {}
            if self.trains(f"lora/{name}/a"):
                own["a"] = product(taken(factors[f"a_{lora.ADDED[name].weight}"]), g_BTr)
            gradients |= {name: own} if own else {}
        return {"lora": gradients} if gradients else {}

    def by_unit(self, record, units):
        if not self.is_loop:
            return super().by_unit(record, units)
        return [jnp.moveaxis(leaf, 0, 1).reshape(units, -1) for leaf in jax.tree.leaves(record)]

    def squared_norm(self, leaves, record):
        return (record["squares"] if self.is_loop else jnp.stack([layer["squares"] for layer in record]),)

    def weighted_sum(self, leaves, record, weights):
        return self.masked_sum(leaves, record, weights, None)

    def masked_sum(self, leaves, record, weights, keep_B: Array | None):
        def body(_, xs):
            p, r, w_B = xs
            # Masked layer by layer, so that at most one layer's record is copied.
            r = r if keep_B is None else self.masked(r, keep_B)
            summed = jax.tree.map(lambda leaf: jnp.tensordot(w_B, leaf, 1, precision="highest"), r["sums"])
            for weight, form in self.form.items():
                if form == "kept":
                    kernel = jnp.tensordot(w_B, r["kept"][weight], 1, precision="highest")
                else:
                    a, g = self._input(p, r, weight), r[self.over.get(weight, f"g_{weight}")]
                    kernel = norms.summed(self.tokens(a), rows(w_B, self.tokens(g)))
                summed[weight] = {"kernel": kernel} | summed.get(weight, {})
            return None, summed

        weights_LB = jnp.broadcast_to(weights[0], self.squared_norm(leaves, record)[0].shape)
        if self.is_loop:
            record = {name: leaf for name, leaf in record.items() if name != "squares"}
        return stacked(self.over_layers(body, None, (leaves, record, weights_LB))[1])

    def _input(self, p: Any, r: Any, weight: str) -> Array:
        """Returns a weight's input, recomputed from a residual."""
        source = self.order.sources[weight]
        if source == "u":
            # By the same expression as for the norm, with the same rounding: in float32, then to the compute type.
            return gelu_and_slope(norms.at_least_float32(r["u"]), self.model.gelu)[0].astype(r["u"].dtype)
        return scaled(r[source], p[source]) if source in p else r[source]

    def gradient(self, leaves, residuals, cotangent):
        saved, length, keys_B = residuals

        def body(g_BTH, xs):
            p, r, layer = xs
            g_BTH, factors, _ = self._layer_backward(Place(self.model, layer, length, keys_B), p, r, g_BTH)
            summed = jax.tree.map(lambda leaf: leaf.sum(0), self._trained_sums(factors))
            for weight in self.form:
                summed.setdefault(weight, {})["kernel"] = norms.contracted(factors[f"a_{weight}"], factors[f"g_{weight}"])
            return g_BTH, summed | self._of_adapters(factors, norms.contracted)

        xs = (leaves, saved, self.numbers)
        g_BTH, gradient = self.over_layers(body, cotangent, xs, reverse=True)
        return (g_BTH, None, None), stacked(gradient)
