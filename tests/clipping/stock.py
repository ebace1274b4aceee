"""Small models as their libraries' pages write them: none knows of dpx. Each gives (loss of one example, parameters, routes).

T: tokens, D: width, V: vocabulary.
"""

from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

B, T, D, V, HEADS = 3, 6, 8, 13, 2


def batch():
    drawn = np.random.default_rng(1)
    ids = drawn.integers(0, V, (B, T))
    ids[0, :3] = ids[0, 0]
    return {
        "id": jnp.asarray(ids),
        "x": jnp.asarray(drawn.normal(0, 1, (B, T, D)) * np.linspace(0.3, 2, B)[:, None, None], jnp.float32),
        "label": jnp.asarray(drawn.integers(0, V, B)),
    }


def moved(params, seed: int = 3):
    """Away from zeros and ones, so that no gradient is small by accident."""
    drawn = np.random.default_rng(seed)
    # By numpy: jax would compile a program to add each shape.
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf) + drawn.normal(0, 0.2, leaf.shape).astype(leaf.dtype)), params)


def next_tokens(logits_TV, id_T):
    picked = jnp.take_along_axis(logits_TV[:-1], id_T[1:, None], axis=1)
    return (jax.nn.logsumexp(logits_TV[:-1], axis=-1) - picked[:, 0]).mean()


class LinenBlock(nn.Module):
    is_causal: bool

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(jnp.ones(x.shape[0])) if self.is_causal else None
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(D)(nn.gelu(nn.Dense(2 * D)(nn.LayerNorm()(x))))


class LinenModel(nn.Module):
    """GPT-2's shape (causal, pre-norm), or BERT's with a classifier on the first token."""

    is_causal: bool
    is_tied: bool

    @nn.compact
    def __call__(self, id_T):
        words = nn.Embed(V, D)
        x = LinenBlock(self.is_causal)(words(id_T) + nn.Embed(T + 2, D)(jnp.arange(len(id_T))))
        x = nn.LayerNorm()(x)
        if not self.is_causal:
            x = nn.tanh(nn.Dense(D, name="pooler")(x))
        return words.attend(x) if self.is_tied else nn.Dense(V)(x)


def linen(is_causal: bool, is_tied: bool):
    model = LinenModel(is_causal, is_tied)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros(T, int))["params"]

    def loss(params, example):
        logits_TV = model.apply({"params": params}, example["id"])
        return next_tokens(logits_TV, example["id"]) if is_causal else -jax.nn.log_softmax(logits_TV[0])[example["label"]]

    return loss, moved(params), {"product", "lookup", "elementwise"}


def linen_scanned():
    """Layers stacked, by `nn.scan` with remat."""
    scanned = nn.scan(nn.remat(Carrying), {"params": 0}, split_rngs={"params": True}, length=2)(True)
    params = jax.jit(scanned.init)(jax.random.key(0), jnp.zeros((T, D)), None)["params"]
    return lambda p, e: jnp.square(scanned.apply({"params": p}, e["x"], None)[0]).mean(), moved(params), {"product", "elementwise"}


class Carrying(LinenBlock):
    @nn.compact
    def __call__(self, x, _):
        return LinenBlock(self.is_causal)(x), None


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.words = nnx.Embed(V, D, rngs=rngs)
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, D, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(D, 2 * D, rngs=rngs), nnx.Linear(2 * D, D, rngs=rngs)

    def __call__(self, id_T):
        x = self.words(id_T)
        x = x + self.attention(self.norm(x))
        return self.words.attend(x + self.down(nnx.relu(self.up(x))))


def flax_nnx():
    graph, params = nnx.split(NnxModel(nnx.Rngs(0)), nnx.Param)
    return (lambda p, e: next_tokens(nnx.merge(graph, p)(e["id"]), e["id"])), moved(params), {"product", "lookup", "elementwise"}


class EquinoxModel(eqx.Module):
    words: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.words, self.norm = eqx.nn.Embedding(V, D, key=keys[0]), eqx.nn.LayerNorm(D)
        self.attention = eqx.nn.MultiheadAttention(HEADS, D, key=keys[1])
        self.mlp = eqx.nn.MLP(D, V, 2 * D, 1, key=keys[2])

    def __call__(self, id_T):
        x = jax.vmap(self.norm)(jax.vmap(self.words)(id_T))
        return jax.vmap(self.mlp)(x + self.attention(x, x, x))


def equinox():
    params, rest = eqx.partition(EquinoxModel(jax.random.key(0)), eqx.is_inexact_array)
    return (lambda p, e: next_tokens(eqx.combine(p, rest)(e["id"]), e["id"])), moved(params), {"product", "lookup", "elementwise"}


def haiku():
    def forward(id_T):
        x = hk.Embed(V, D)(id_T)
        x = x + hk.MultiHeadAttention(HEADS, D // HEADS, w_init=hk.initializers.RandomNormal(0.3))(x, x, x)
        return hk.Linear(V)(hk.LayerNorm(-1, create_scale=True, create_offset=True)(x))

    model = hk.without_apply_rng(hk.transform(forward))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros(T, int))
    return (lambda p, e: next_tokens(model.apply(p, e["id"]), e["id"])), moved(params), {"product", "lookup", "elementwise"}


def haiku_lstm():
    model = hk.without_apply_rng(hk.transform(lambda x: hk.dynamic_unroll(core := hk.LSTM(D), x, core.initial_state(None))[0]))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((T, D)))
    return (lambda p, e: jnp.square(model.apply(p, e["x"])).mean()), moved(params), {"product", "elementwise"}


def experts():
    """A mixture, each token's two best of four experts."""
    drawn = np.random.default_rng(0)
    shapes = {"gate": (D, 4), "up": (4, D, 2 * D), "down": (4, 2 * D, D)}

    def loss(p, e):
        gate_TE = jax.nn.softmax(e["x"] @ p["gate"])
        gate_TE = jnp.where(gate_TE >= jax.lax.top_k(gate_TE, 2)[0][:, 1:], gate_TE, 0)
        y_TED = jnp.einsum("tef,efd->ted", jax.nn.relu(jnp.einsum("td,edf->tef", e["x"], p["up"])), p["down"])
        return jnp.square(jnp.einsum("te,ted->td", gate_TE, y_TED)).mean()

    return loss, {name: jnp.asarray(drawn.normal(0, 0.5, shape), jnp.float32) for name, shape in shapes.items()}, {"product"}


def convolution():
    model: Any = nn.Sequential([nn.Conv(D, (3,)), nn.relu, nn.Conv(4, (3,))])
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, T, D)))["params"]
    return (lambda p, e: jnp.square(model.apply({"params": p}, e["x"][None])).mean()), moved(params), {"convolution", "elementwise"}


def gradient_penalty():
    model: Any = nn.Sequential([nn.Dense(2 * D), nn.tanh, nn.Dense(1)])
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros(D))["params"]

    def loss(p, e):
        value = lambda x_TD: model.apply({"params": p}, x_TD).sum()  # noqa: E731
        return value(e["x"]) + jnp.square(jax.grad(value)(e["x"])).mean()

    return loss, moved(params), {"product", "elementwise"}


MODELS = {
    "gpt2": lambda: linen(True, False),
    "gpt2_tied": lambda: linen(True, True),
    "bert": lambda: linen(False, False),
    "bert_tied": lambda: linen(False, True),
    "linen_scanned": linen_scanned,
    "nnx": flax_nnx,
    "equinox": equinox,
    "haiku": haiku,
    "haiku_lstm": haiku_lstm,
    "experts": experts,
    "convolution": convolution,
    "gradient_penalty": gradient_penalty,
}
