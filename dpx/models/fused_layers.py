"""The stack of layers as one block: hand-scheduled backward, minimal residuals, cotangents written over dead residuals.

Forward keeps, per token and layer, 11 widths (a Bert: input, qkv, context, two normalised LayerNorm inputs, and u, before GELU)
or 10 (a Decoder, which needs no input); attention probabilities, GELU and dropout masks are computed again. The reverse loop
writes cotangents over residuals that died. Exactly the composition of ops in modules.py, in another order.

B: examples, T: tokens, H: width, F: feed-forward, L: layers.
"""

import dataclasses
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from dpx.clipping import norms
from dpx.clipping.ops import form_of, rows
from dpx.clipping.probes import Op, session_of
from dpx.models.fused_halves import ORDERS, WEIGHTS, Order, Place, cast, gelu_and_slope, scaled
from dpx.models.shape import Model


def gelu_of(model: Model) -> Any:
    """The model's GELU, in the dtype of its argument."""
    return partial(jax.nn.gelu, approximate=model.gelu == "tanh")


def forms(layers: Any, x_BTH: Array) -> tuple[norms.Form, ...]:
    """The norm form of each of a layer's weights, from the shapes and the memory the session may use."""
    return tuple(form_of(x_BTH.shape[0], x_BTH.shape[1], layers[weight]["kernel"]) for weight in WEIGHTS) if session_of(layers) else ()


@dataclasses.dataclass(frozen=True)
class LayerStack(Op):
    """`leaves`: the subtree `layers`; inputs: x_BTH, length, keys_B (dropout's record keys, or None). `forms`: one a weight."""

    model: Model
    forms: tuple[norms.Form, ...]
    name: str = "layer_stack"
    stacked: bool = True
    rows_per_unit: int = 1

    @cached_property
    def form(self) -> dict[str, norms.Form]:
        return dict(zip(WEIGHTS, self.forms, strict=True))

    @property
    def order(self) -> Order:
        return ORDERS[self.model.causal]

    @property
    def over(self) -> dict[str, str]:
        """Weights whose cotangent is kept, and is written over a residual that died: which one."""
        return {weight: residual for weight, residual in self.order.over.items() if self.form[weight] != "kept"}

    @property
    def unroll(self) -> int:
        return 1 if self.model.scan else self.model.layers

    def forward(self, leaves, inputs):
        x_BTH, length, keys_B = inputs

        def body(x_BTH, xs):
            p, layer = xs
            return self.order.forward(Place(self.model, layer, length, keys_B), cast(p, x_BTH), x_BTH)

        x_BTH, saved = lax.scan(body, x_BTH, (leaves, jnp.arange(self.model.layers)), unroll=self.unroll)
        return x_BTH, (saved, length, keys_B)

    def input_cotangent(self, leaves, residuals, cotangent):
        saved, length, keys_B = residuals
        in_place = {residual: saved[residual] for residual in self.over.values()}

        def body(carry, xs):
            g_BTH, in_place = carry
            p, r, layer = xs
            r = r | {name: lax.dynamic_index_in_dim(buffer, layer, keepdims=False) for name, buffer in in_place.items()}
            g_BTH, found = self.order.backward(Place(self.model, layer, length, keys_B), cast(p, g_BTH), r, g_BTH)
            record = self._record(found)
            over = {residual: found[f"g_{weight}"] for weight, residual in self.over.items()}
            in_place = {name: lax.dynamic_update_index_in_dim(buffer, over[name], layer, 0) for name, buffer in in_place.items()}
            return (g_BTH, in_place), record

        read_only = {name: value for name, value in saved.items() if name not in in_place}
        xs = (leaves, read_only, jnp.arange(self.model.layers))
        (g_BTH, in_place), record = lax.scan(body, (cotangent, in_place), xs, reverse=True, unroll=self.unroll)
        needed = {self.order.sources[weight] for weight in WEIGHTS if self.form[weight] != "kept"}
        return (g_BTH, None, None), record | in_place | {name: read_only[name] for name in needed}

    def _record(self, found: Any) -> Any:
        """What one layer leaves behind: its squared norms, sums of biases and gains, and kept gradients or cotangents."""
        sums = jax.tree.map(self.over_rows, found["sums"])
        record = {"sums": sums, "kept": {}, "squares": sum(norms.squares(x) for x in jax.tree.leaves(sums))}
        for weight in WEIGHTS:
            a, g = self.tokens(found[f"a_{weight}"]), self.tokens(found[f"g_{weight}"])
            if self.form[weight] == "gram":
                record["squares"] += norms.gram(a, g)
            else:
                gradient = norms.per_example(a, g)
                record["squares"] += norms.squares(gradient)
            if self.form[weight] == "kept":
                record["kept"][weight] = gradient
            elif weight not in self.over:
                # No residual of its own dies for it to be written over.
                record[f"g_{weight}"] = found[f"g_{weight}"]
        return record

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
        xs = (leaves, {k: v for k, v in record.items() if k != "squares"}, weights_LB)
        return lax.scan(body, None, xs, unroll=self.unroll)[1]

    def _layer_sum(self, p: Any, r: Any, w_B: Array) -> Any:
        summed = jax.tree.map(lambda leaf: jnp.tensordot(w_B, leaf, 1, precision="highest"), r["sums"])
        for weight in WEIGHTS:
            if self.form[weight] == "kept":
                kernel = jnp.tensordot(w_B, r["kept"][weight], 1, precision="highest")
            else:
                a, g = self._input(p, r, weight), r[self.over.get(weight, f"g_{weight}")]
                kernel = norms.product("btp,btd->pd", norms.wide(self.tokens(a)), rows(w_B, self.tokens(g)))
            summed[weight] = {"kernel": kernel, "bias": summed[weight]["bias"]}
        return summed

    def _input(self, p: Any, r: Any, weight: str) -> Array:
        """A weight's input, had again from a residual."""
        source = self.order.sources[weight]
        if source == "u":
            # By the expression that the norm was taken with, rounded as there: in float32, then to the compute type.
            return gelu_and_slope(norms.wide(r["u"]), self.model.gelu)[0].astype(r["u"].dtype)
        return scaled(r[source], p[source]) if source in p else r[source]

    def gradient(self, leaves, residuals, cotangent):
        saved, length, keys_B = residuals

        def body(g_BTH, xs):
            p, r, layer = xs
            g_BTH, found = self.order.backward(Place(self.model, layer, length, keys_B), cast(p, g_BTH), r, g_BTH)
            summed = jax.tree.map(lambda leaf: leaf.sum(0), found["sums"])
            for weight in WEIGHTS:
                wide = summed[weight]["bias"].dtype
                a, g = found[f"a_{weight}"], found[f"g_{weight}"]
                summed[weight]["kernel"] = jnp.einsum("btp,btd->pd", a, g, preferred_element_type=wide)
            return g_BTH, summed

        xs = (leaves, saved, jnp.arange(self.model.layers))
        g_BTH, gradient = lax.scan(body, cotangent, xs, reverse=True, unroll=self.unroll)
        return (g_BTH, None, None), gradient
