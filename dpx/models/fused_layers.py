"""The stack of BERT layers as one block: hand-scheduled backward, minimal residuals, cotangents written over dead residuals.

Forward keeps, per token and layer, 11 widths: input, qkv, context, two normalised LayerNorm inputs, and u (before GELU);
attention probabilities, GELU and dropout masks are computed again. The reverse loop writes the cotangent of qkv over qkv and that
of the second LayerNorm's input over its residual. Exactly the composition of ops in bert.py, in another order.

B: examples, T: tokens, H: width, N: heads, D: head size, F: feed-forward, L: layers.
"""

import dataclasses
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from dpx.clipping import norms
from dpx.clipping.ops import layer_norm_cotangent, rows
from dpx.clipping.probes import Op
from dpx.models import dropout as drop
from dpx.models.attention import attend, attend_backward
from dpx.models.shape import Bert

F32 = jnp.float32
# Each weight, and the residual its input is had from again.
WEIGHTS = {"qkv": "x", "attention_out": "context", "up": "attention_norm", "down": "u"}


@dataclasses.dataclass(frozen=True)
class LayerStack(Op):
    """`leaves`: the subtree `layers`; inputs: x_BTH, length_B, keys_B (dropout's record keys, or None). `forms`: one a weight."""

    model: Bert
    forms: tuple[norms.Form, ...]
    name: str = "layer_stack"
    stacked: bool = True
    rows_per_unit: int = 1

    @cached_property
    def form(self) -> dict[str, norms.Form]:
        return dict(zip(WEIGHTS, self.forms, strict=True))

    def forward(self, leaves, inputs):
        x_BTH, length_B, keys_B = inputs

        def body(x_BTH, xs):
            p, layer = xs
            return layer_forward(self.model, cast(p, x_BTH), x_BTH, layer, length_B, keys_B)

        x_BTH, saved = lax.scan(body, x_BTH, (leaves, jnp.arange(self.model.layers)))
        return x_BTH, (saved, length_B, keys_B)

    def input_cotangent(self, leaves, residuals, cotangent):
        saved, length_B, keys_B = residuals
        in_place = {name: saved[name] for name in ("qkv", "output_norm") if self._keeps_cotangent("qkv" if name == "qkv" else "down")}

        def body(carry, xs):
            g_BTH, in_place = carry
            p, r, layer = xs
            r = r | {name: lax.dynamic_index_in_dim(buffer, layer, keepdims=False) for name, buffer in in_place.items()}
            g_BTH, found = layer_backward(self.model, cast(p, g_BTH), r, g_BTH, layer, length_B, keys_B)
            record = self._record(p, r, found)
            over = {"qkv": found["g_qkv"], "output_norm": found["g_down"]}
            in_place = {name: lax.dynamic_update_index_in_dim(buffer, over[name], layer, 0) for name, buffer in in_place.items()}
            return (g_BTH, in_place), record

        read_only = {name: value for name, value in saved.items() if name not in in_place}
        xs = (leaves, read_only, jnp.arange(self.model.layers))
        (g_BTH, in_place), record = lax.scan(body, (cotangent, in_place), xs, reverse=True)
        needed = {source for weight, source in WEIGHTS.items() if self._keeps_cotangent(weight)}
        return (g_BTH, None, None), record | in_place | {name: read_only[name] for name in needed}

    def _keeps_cotangent(self, weight: str) -> bool:
        return self.form[weight] != "kept"

    def _record(self, p: Any, r: Any, found: Any) -> Any:
        """What one layer leaves behind: its squared norms, sums of biases and gains, and kept gradients or cotangents."""
        sums = jax.tree.map(self.over_rows, found["sums"])
        record = {"sums": sums, "kept": {}, "squares": sum(norms.squares(x) for x in jax.tree.leaves(sums))}
        for weight in WEIGHTS:
            a, g = self.tokens(found[f"a_{weight}"]), self.tokens(found[f"g_{weight}"])
            if self.form[weight] == "gram":
                record["squares"] += norms.gram(a, g)
                continue
            gradient = norms.per_example(a, g)
            record["squares"] += norms.squares(gradient)
            if self.form[weight] == "kept":
                record["kept"][weight] = gradient
        # qkv and down are written over residuals; the other two have no residual of their own to die.
        return record | {f"g_{weight}": found[f"g_{weight}"] for weight in ("attention_out", "up") if self._keeps_cotangent(weight)}

    def squared_norm(self, leaves, record):
        return (record["squares"],)

    def weighted_sum(self, leaves, record, weights):
        return self._summed(leaves, record, weights, None)

    def masked_sum(self, leaves, record, weights, keep_B):
        return self._summed(leaves, record, weights, keep_B)

    def _summed(self, leaves: Any, record: Any, weights: tuple[Array, ...], keep_B: Array | None) -> Any:
        def body(_, xs):
            p, r, w_B = xs
            # Masked layer by layer, so that never more than one layer's record is copied.
            return None, self._layer_sum(p, r if keep_B is None else self.masked(r, keep_B), w_B)

        weights_LB = jnp.broadcast_to(weights[0], record["squares"].shape)
        return lax.scan(body, None, (leaves, {k: v for k, v in record.items() if k != "squares"}, weights_LB))[1]

    def _layer_sum(self, p: Any, r: Any, w_B: Array) -> Any:
        summed = jax.tree.map(lambda leaf: jnp.tensordot(w_B, leaf, 1, precision="highest"), r["sums"])
        for weight in WEIGHTS:
            if self.form[weight] == "kept":
                kernel = jnp.tensordot(w_B, r["kept"][weight], 1, precision="highest")
            else:
                a, g = self._pair(p, r, weight)
                kernel = norms.product("btp,btd->pd", norms.wide(self.tokens(a)), rows(w_B, self.tokens(g)))
            summed[weight] = {"kernel": kernel, "bias": summed[weight]["bias"]}
        return summed

    def _pair(self, p: Any, r: Any, weight: str) -> tuple[Array, Array]:
        match weight:
            case "qkv":
                return r["x"], r["qkv"]
            case "attention_out":
                return r["context"], r["g_attention_out"]
            case "up":
                return scaled(r["attention_norm"], p["attention_norm"]), r["g_up"]
            case _:
                # Rounded as in the pass that took the norm: in float32, then to the compute type.
                return jax.nn.gelu(norms.wide(r["u"]), approximate=False).astype(r["u"].dtype), r["output_norm"]

    def gradient(self, leaves, residuals, cotangent):
        saved, length_B, keys_B = residuals

        def body(g_BTH, xs):
            p, r, layer = xs
            g_BTH, found = layer_backward(self.model, cast(p, g_BTH), r, g_BTH, layer, length_B, keys_B)
            summed = jax.tree.map(lambda leaf: leaf.sum(0), found["sums"])
            for weight in WEIGHTS:
                wide = summed[weight]["bias"].dtype
                a, g = found[f"a_{weight}"], found[f"g_{weight}"]
                summed[weight]["kernel"] = jnp.einsum("btp,btd->pd", a, g, preferred_element_type=wide)
            return g_BTH, summed

        g_BTH, gradient = lax.scan(body, cotangent, (leaves, saved, jnp.arange(self.model.layers)), reverse=True)
        return (g_BTH, None, None), gradient


def cast(p: Any, like: Array) -> Any:
    """Kernels and biases in the compute dtype; LayerNorms stay as they are."""
    return {name: leaf if name.endswith("norm") else jax.tree.map(lambda x: x.astype(like.dtype), leaf) for name, leaf in p.items()}


def scaled(normalised: Array, p: Any) -> Array:
    return (norms.wide(normalised) * p["scale"] + p["bias"]).astype(normalised.dtype)


def normalise(x: Array, eps: float) -> tuple[Array, Array]:
    """(x normalised over its last axis, in its dtype; the factor, float32 or wider)."""
    wide = norms.wide(x)
    centred = wide - wide.mean(-1, keepdims=True)
    factor = lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    return (centred * factor).astype(x.dtype), factor


def linear(x: Array, p: Any) -> Array:
    return x @ p["kernel"] + p["bias"]


def layer_forward(model: Bert, p: Any, x_BTH: Array, layer: Array, length_B: Array, keys_B: Array | None) -> tuple[Array, dict[str, Array]]:
    def dropped(x, site):
        return drop.dropout(x, keys_B, layer, site, model.dropout)

    qkv_BTd = linear(x_BTH, p["qkv"])
    context_BTH = attend(qkv_BTd, length_B, model.heads, lambda probs: dropped(probs, drop.ATTENTION))
    z_BTH = x_BTH + dropped(linear(context_BTH, p["attention_out"]), drop.ATTENTION_OUT)
    attention_norm, attention_factor = normalise(z_BTH, model.layer_norm_eps)
    y_BTH = scaled(attention_norm, p["attention_norm"])
    u_BTF = linear(y_BTH, p["up"])
    z_BTH = y_BTH + dropped(linear(jax.nn.gelu(u_BTF, approximate=False), p["down"]), drop.OUTPUT)
    output_norm, output_factor = normalise(z_BTH, model.layer_norm_eps)
    saved = {"x": x_BTH, "qkv": qkv_BTd, "context": context_BTH, "u": u_BTF}
    saved |= {"attention_norm": attention_norm, "attention_factor": attention_factor}
    saved |= {"output_norm": output_norm, "output_factor": output_factor}
    return scaled(output_norm, p["output_norm"]), saved


def layer_backward(model: Bert, p: Any, r: Any, g_BTH: Array, layer: Array, length_B: Array, keys_B: Array | None) -> tuple[Array, Any]:
    """(cotangent of the layer's input; each weight's input `a_` and output cotangent `g_`, and per-example sums of the small leaves)."""

    def dropped(x, site):
        return drop.dropout(x, keys_B, layer, site, model.dropout)

    sums: dict[str, Any] = {}
    sums["output_norm"], g_z = norm_backward(g_BTH, r["output_norm"], r["output_factor"], p["output_norm"])
    g_down = dropped(g_z, drop.OUTPUT)
    u = norms.wide(r["u"])
    cumulative, density = 0.5 * (1 + lax.erf(u * 0.5**0.5)), jnp.exp(-0.5 * jnp.square(u)) * (0.5 / jnp.pi) ** 0.5
    activated_BTF = (u * cumulative).astype(r["u"].dtype)
    g_up = ((g_down @ p["down"]["kernel"].T) * (cumulative + u * density)).astype(r["u"].dtype)
    g_y = g_z + g_up @ p["up"]["kernel"].T
    sums["attention_norm"], g_z = norm_backward(g_y, r["attention_norm"], r["attention_factor"], p["attention_norm"])
    g_attended = dropped(g_z, drop.ATTENTION_OUT)
    g_context = g_attended @ p["attention_out"]["kernel"].T
    g_qkv = attend_backward(r["qkv"], r["context"], g_context, length_B, model.heads, lambda probs: dropped(probs, drop.ATTENTION))
    found = {
        "a_qkv": r["x"],
        "g_qkv": g_qkv,
        "a_attention_out": r["context"],
        "g_attention_out": g_attended,
        "a_up": scaled(r["attention_norm"], p["attention_norm"]),
        "g_up": g_up,
        "a_down": activated_BTF,
        "g_down": g_down,
    }
    for weight in WEIGHTS:
        sums[weight] = {"bias": norms.wide(found[f"g_{weight}"]).sum(1)}
    return g_z + g_qkv @ p["qkv"]["kernel"].T, found | {"sums": sums}


def norm_backward(g: Array, normalised: Array, factor: Array, p: Any) -> tuple[dict[str, Array], Array]:
    """(per-example gradients of gain and offset; cotangent of the LayerNorm's input, in g's dtype)."""
    wide, normalised = norms.wide(g), norms.wide(normalised)
    sums = {"scale": (wide * normalised).sum(1), "bias": wide.sum(1)}
    return sums, layer_norm_cotangent(wide * p["scale"], normalised, factor).astype(g.dtype)
