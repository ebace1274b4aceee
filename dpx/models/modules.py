"""Defines the parts of every model as flax modules made of ops; parameters have the paths that the declarations give.

With bare parameters a model's gradient is plain autodiff; with wrapped ones the ops record what clipping needs
(`dpx.clipping.op`), and a stack of layers is the one block of fused_layers.py unless the session forbids it.

Parameters are float32 and are cast where they are used: to bfloat16 if the model computes in it, otherwise not at all, so
parameters given in float64 yield a float64 model (the oracle of the tests). LayerNorm, softmax and logits are float32 or wider.

An example may hold several texts of equal length side by side (`length` [B,C], see attention.py); T counts the tokens of all.

B: examples, C: texts of an example, T: tokens, S: tokens of one text, H: width, F: feed-forward, V: vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpx.clipping import ops
from dpx.clipping.groups import LAYERS
from dpx.clipping.op import apply, session_of
from dpx.models import attention
from dpx.models import dropout as drop
from dpx.models.attention import attend
from dpx.models.fused_layers import Place, layer_stack
from dpx.models.lora import adapted
from dpx.models.shape import Bert, Decoder, Model
from dpx.models.trainable import BELOW


def in_compute_dtype(x: Array, model: Model) -> Array:
    """Returns `x` in the model's compute type: bfloat16 if the model computes in it, otherwise unchanged."""
    return x.astype(jnp.bfloat16) if model.dtype == "bfloat16" else x


class Dense(nn.Module):
    """The dense map x @ kernel (+ bias); kernels start at `spread` times the model's initial range."""

    model: Model
    features: int
    has_bias: bool = True
    spread: float = 1.0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        init = nn.initializers.truncated_normal(self.model.initialiser_range * self.spread)
        kernel = self.param("kernel", init, (x.shape[-1], self.features))
        return ops.dense(x, kernel, self.param("bias", nn.initializers.zeros, (self.features,)) if self.has_bias else None)


class LayerNorm(nn.Module):
    """LayerNorm over the last axis, with a gain and an offset."""

    model: Bert | Decoder

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        return ops.layer_norm(x, scale, bias, self.model.layer_norm_eps)


class Tables(NamedTuple):
    """Holds a table of the vocabulary in two parts: the rows of a checkpoint, and those of new tokens behind them."""

    old_VH: Any
    new_NH: Any


def table_of(module: nn.Module, model: Model, name: str, new: str, vocabulary_size: int) -> Any:
    """Returns the table of the vocabulary that a module has as its parameter `name`, with its new rows as `new`, if it has any."""
    init = nn.initializers.truncated_normal(model.initialiser_range)
    table_VH = module.param(name, init, (vocabulary_size - model.new_rows, model.width))
    return table_VH if not model.new_rows else Tables(table_VH, module.param(new, init, (model.new_rows, model.width)))


def looked_up(table: Any, token_BT: Array) -> Array:
    """Returns a token's row, in float32 or wider. A token is in one part of a table, and reads zeros in the other."""
    old_VH = table.old_VH if isinstance(table, Tables) else table
    at_least_f32 = jnp.promote_types(getattr(old_VH, "value", old_VH).dtype, jnp.float32)
    x_BTH = ops.lookup(old_VH, token_BT, at_least_f32)
    return x_BTH + ops.lookup(table.new_NH, token_BT - old_VH.shape[0], at_least_f32) if isinstance(table, Tables) else x_BTH


def decoded(h_BMH: Array, table: Any, *bias: Any) -> Array:
    """Returns the logits of M positions, those of new tokens last."""
    if isinstance(table, Tables):
        return jnp.concatenate([ops.decode(h_BMH, part) for part in table], axis=-1)
    return ops.decode(h_BMH, table, *bias)


class Embeddings(nn.Module):
    """Adds word, position and perhaps segment rows in float32 or wider, then applies LayerNorm in a Bert; the result has the compute type.

    It returns the word table as well, which a tied head needs.
    """

    model: Bert | Decoder
    vocabulary_size: int

    @nn.compact
    def __call__(self, token_BT: Array, segment_BT: Array | None, length: Array, keys_B: Array | None):
        model = self.model
        init = nn.initializers.truncated_normal(model.initialiser_range)
        word_VH = table_of(self, model, "word", "new", self.vocabulary_size)
        x_BTH = looked_up(word_VH, token_BT)
        position_PH = self.param("position", init, (model.positions + model.position_offset, model.width))
        if (kept := attention.kept(self)) is not None:
            x_BTH = x_BTH + position_PH[kept["place"]][:, None]
        else:
            x_BCSH = x_BTH.reshape(*length.shape, -1, model.width)
            x_BTH = ops.add_rows(x_BCSH, position_PH, model.position_offset).reshape(x_BTH.shape)
        if model.segments:
            assert segment_BT is not None
            segment_SH = self.param("segment", init, (model.segments, model.width))
            x_BTH = x_BTH + ops.small_lookup(segment_SH, jnp.minimum(segment_BT, model.segments - 1), x_BTH.dtype)
        x_BTH = in_compute_dtype(x_BTH, model)
        x_BTH = x_BTH if model.causal else LayerNorm(model, name="norm")(x_BTH)
        return drop.of_tokens(x_BTH, keys_B, -1, drop.EMBEDDING, model.dropout, length), word_VH


class Layer(nn.Module):
    """One layer in the form that `nn.scan` requires: (carry, scanned, broadcast...) -> (carry, None).

    A Bert normalises after each half's sum (post-LayerNorm), a Decoder before each half (pre-LayerNorm). If its parameters hold adapters
    of its dense maps, these are added (lora.py).
    """

    model: Bert | Decoder

    @nn.compact
    def __call__(self, x_BTH: Array, layer: Array, length: Array, keys_B: Array | None) -> tuple[Array, None]:
        model = self.model
        lora = self.variables.get("params", {}).get("lora", {})

        place = Place(model, layer, length, keys_B)

        def projected(x: Array, name: str, features: int, spread: float = 1.0) -> Array:
            return adapted(Dense(model, features, spread=spread, name=name)(x), x, lora, name, place.dropped)

        def attended(x_BTH: Array) -> Array:
            qkv_BT3H = projected(x_BTH, "qkv", 3 * model.width)
            seen = partial(attention.seen, self, length_R=length.reshape(-1), axis=2) if model.causal else None
            context_BTH = attend(qkv_BT3H, length, model, place.dropped_probabilities, seen)
            return place.dropped(projected(context_BTH, "attention_out", model.width, spread), drop.ATTENTION_OUT)

        def fed_forward(x_BTH: Array) -> Array:
            up_BTF = jax.nn.gelu(projected(x_BTH, "up", model.feed_forward), approximate=model.gelu == "tanh")
            return place.dropped(projected(up_BTF, "down", model.width, spread), drop.OUTPUT)

        # GPT-2 shrinks what each half adds to the residual stream as the stack grows.
        spread = (2 * model.layers) ** -0.5 if model.causal else 1.0
        if model.causal:
            x_BTH = x_BTH + attended(LayerNorm(model, name="attention_norm")(x_BTH))
            return x_BTH + fed_forward(LayerNorm(model, name="feed_forward_norm")(x_BTH)), None
        y_BTH = LayerNorm(model, name="attention_norm")(x_BTH + attended(x_BTH))
        return LayerNorm(model, name="output_norm")(y_BTH + fed_forward(y_BTH)), None


def stack(
    module: nn.Module, model: Model, x_BTH: Array, length: Array, keys_B: Array | None, layer: Callable[..., nn.Module] = Layer
) -> Array:
    """Applies all layers, the parameters `layers` of `module`: a scan over `layer`, or one block for `Layer` if clipping requires it.

    If only the top layers are trained, the layers below may be given as a separate stack, `layers_below` (see trainable.py).
    """
    params = module.variables.get("params", {})
    session = session_of(params)
    first = 0
    for name in (BELOW, LAYERS) if BELOW in params else (LAYERS,):
        count = jax.tree.leaves(params[name])[0].shape[0] if name in params else model.layers
        if session is not None and session.fused and layer is Layer:
            assert isinstance(model, Bert | Decoder)
            op = layer_stack(model, params[name], x_BTH, session, first)
            x_BTH = apply(op, params[name], (x_BTH, length, keys_B), session)
        else:
            number_L = jnp.arange(count) + first if first else jnp.arange(count)
            in_axes: Any = (0, nn.broadcast, nn.broadcast)
            by_layer: Any = {"params": 0, attention.KEPT: 0, attention.MADE: 0}
            unroll = 1 if model.scan else count
            # In a loop the compiler cannot merge a layer that is computed again with the one of the forward pass.
            one = nn.remat(layer, prevent_cse=not model.scan) if model.rematerialize == "layers" else layer  # pyright: ignore[reportArgumentType]
            scanned = nn.scan(one, by_layer, split_rngs={"params": True}, length=count, in_axes=in_axes, unroll=unroll)
            x_BTH = scanned(model, name=name)(x_BTH, number_L, length, keys_B)[0]
        first += count
    return x_BTH
