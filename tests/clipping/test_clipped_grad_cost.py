"""What `dpx.clipped_grad` costs beside the same model written in ops: a BERT-Tiny and a decoder of two layers, in plain jnp.

B: examples, T: tokens, M: masked positions, H: width, A: heads, V: vocabulary.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import ops
from dpx.cost.traced import matmul_flops, temporary_bytes

B, T, M, H, A, F, V, L = 16, 128, 20, 128, 2, 512, 30_522, 2
SHAPES = {
    "word": (V, H),
    "position": (T, H),
    "layers": [
        {
            name: shape
            for name, shape in (("qkv", (H, 3 * H)), ("out", (H, H)), ("up", (H, F)), ("down", (F, H)), ("gain", (H,)), ("shift", (H,)))
        }
        for _ in range(L)
    ],
    "bias": (V,),
}
BATCH = {
    "id": jax.ShapeDtypeStruct((B, T), jnp.int32),
    "slot": jax.ShapeDtypeStruct((B, M), jnp.int32),
    "label": jax.ShapeDtypeStruct((B, M), jnp.int32),
}
PARAMS = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), SHAPES, is_leaf=lambda leaf: isinstance(leaf, tuple))
IS_CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["bert_tiny", "decoder"])


def attended(qkv, is_causal):
    """[..., T, 3H] as [..., T, H]."""
    q, k, v = (jnp.moveaxis(x.reshape(*x.shape[:-1], A, H // A), -2, -3) for x in jnp.split(qkv, 3, axis=-1))
    scores = q @ jnp.swapaxes(k, -1, -2) / np.sqrt(H // A)
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9) if is_causal else scores
    mixed = jnp.moveaxis(jax.nn.softmax(scores) @ v, -3, -2)
    return mixed.reshape(*mixed.shape[:-2], H)


def normalised(x, gain, shift):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6) * gain + shift


def slots(x, example, is_causal):
    """Positions decoded, and their labels: the masked ones, or the first of a causal model's."""
    return (
        (x[..., :M, :], example["id"][..., 1 : M + 1])
        if is_causal
        else (jnp.take_along_axis(x, example["slot"][..., None], -2), example["label"])
    )


def cross_entropy(logits, label):
    return (jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, label[..., None], -1)[..., 0]).mean(-1)


def of_one(is_causal):
    def loss(p, example):
        x = p["word"][example["id"]] + p["position"]
        for q in p["layers"]:
            x = normalised(x + attended(x @ q["qkv"], is_causal) @ q["out"], q["gain"], q["shift"])
            x = x + jax.nn.gelu(x @ q["up"]) @ q["down"]
        h, label = slots(x, example, is_causal)
        return cross_entropy(h @ p["word"].T + p["bias"], label)

    return loss


def of_ops(is_causal):
    def losses(p, batch):
        x = ops.add_rows(ops.lookup(p["word"], batch["id"]), p["position"])
        for q in p["layers"]:
            x = ops.layer_norm(x + ops.dense(attended(ops.dense(x, q["qkv"]), is_causal), q["out"]), q["gain"], q["shift"], 1e-6)
            x = x + ops.dense(jax.nn.gelu(ops.dense(x, q["up"])), q["down"])
        h, label = slots(x, batch, is_causal)
        return cross_entropy(ops.decode(h, p["word"], p["bias"]), label)

    return losses


def clip(norms_B):
    return 1 / jnp.maximum(norms_B, 1)


def both(is_causal):
    transform = dpx.clipped_grad(of_one(is_causal), clipping_norm=1.0)
    traced = lambda p, b: transform(p, b)[:2]  # noqa: E731
    written = lambda p, b: dpx.clipped_sum(of_ops(is_causal), p, b, weights=clip, checked=False)[:2]  # noqa: E731
    return traced, written


@pytest.mark.slow
@IS_CAUSAL
def test_products_of_a_plain_model_beside_the_same_in_ops(is_causal):
    traced, written = (matmul_flops(run, PARAMS, BATCH) for run in both(is_causal))
    assert 0.9 < traced / written <= 1.1


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["bert_tiny", "decoder"])
def test_memory_of_a_plain_model_beside_the_same_in_ops(is_causal):
    traced, written = (temporary_bytes(run, PARAMS, BATCH) for run in both(is_causal))
    assert traced <= 1.3 * written


@pytest.mark.slow
@IS_CAUSAL
def test_seconds_of_a_plain_model_beside_the_same_in_ops(is_causal, capsys):
    """Reported, measured in turns; not compared with a limit, since timings are noisy."""
    drawn = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(drawn.normal(0, 0.05, leaf.shape), jnp.float32), PARAMS)
    batch = {name: jnp.asarray(drawn.integers(0, T, leaf.shape), jnp.int32) for name, leaf in BATCH.items()}
    runs = [jax.jit(run) for run in both(is_causal)]
    traced, written = (np.asarray(run(params, batch)[1]) for run in runs)
    # An op takes the norm of a tied table from products, with the most that rounding may take from it added.
    np.testing.assert_allclose(traced, written, rtol=1e-3)
    assert np.all(written >= traced * (1 - 1e-6))
    seconds: list[list[float]] = [[], []]
    for _ in range(7):
        for run, taken in zip(runs, seconds, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(run(params, batch))
            taken.append(time.perf_counter() - began)
    ratio = np.median(seconds[0]) / np.median(seconds[1])
    with capsys.disabled():
        print(f"\n{'decoder' if is_causal else 'bert_tiny'}: clipped_grad takes {ratio:.2f} times as long as ops (medians of 7, by turns)")
