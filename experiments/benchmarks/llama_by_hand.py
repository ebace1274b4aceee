"""What `dpx.clipped_grad` costs beside `jax.grad`: a Llama of two layers in plain jax.numpy, its word table tied to the decoder and untied.

    python experiments/benchmarks/llama_by_hand.py [rounds]

Prints the ratio of matrix-product FLOPs (counted in the traced programs) and of seconds (medians, both by turns in this process). Run
nothing beside it. An earlier revision: the same line with PYTHONPATH set to a checkout of it.

Shape legend: B examples, T tokens, H width, A heads, D width of a head, F width between, V vocabulary.
"""

import inspect
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import dpx
from dpx.cost.traced import matmul_flops

B, T, H, A, F, V, L = 16, 128, 256, 4, 688, 8192, 2
D = H // A


def shapes(is_tied: bool) -> dict[str, tuple[int, ...]]:
    of_layer = {"qkv": (H, 3 * H), "out": (H, H), "gate": (H, F), "up": (H, F), "down": (F, H), "norm": (H,), "norm_2": (H,)}
    layers = {f"{name}_{layer}": shape for layer in range(L) for name, shape in of_layer.items()}
    return {"word": (V, H), "norm": (H,), **layers} | ({} if is_tied else {"decoder": (H, V)})


def scaled(x_TH, gain_H):
    return x_TH * jax.lax.rsqrt(jnp.square(x_TH).mean(-1, keepdims=True) + 1e-6) * gain_H


def rotated(x_TAD):
    angles = jnp.arange(T)[:, None] / 10_000 ** (jnp.arange(D // 2) / (D // 2))
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = x_TAD[..., : D // 2], x_TAD[..., D // 2 :]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], -1)


def attended(qkv_T3H):
    q, k, v = (x.reshape(T, A, D) for x in jnp.split(qkv_T3H, 3, -1))
    scores = jnp.einsum("tad,sad->ats", rotated(q), rotated(k)) / np.sqrt(D)
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)
    return jnp.einsum("ats,sad->tad", jax.nn.softmax(scores), v).reshape(T, H)


def loss(p, id_T):
    """Mean cross entropy of the next token, of one example."""
    x_TH = p["word"][id_T]
    for layer in range(L):
        w = lambda name, layer=layer: p[f"{name}_{layer}"]  # noqa: E731
        x_TH = x_TH + attended(scaled(x_TH, w("norm")) @ w("qkv")) @ w("out")
        h_TH = scaled(x_TH, w("norm_2"))
        x_TH = x_TH + (jax.nn.silu(h_TH @ w("gate")) * (h_TH @ w("up"))) @ w("down")
    decoder_HV = p["decoder"] if "decoder" in p else p["word"].T
    logits_TV = scaled(x_TH, p["norm"]) @ decoder_HV
    chosen_T = jnp.take_along_axis(logits_TV[:-1], id_T[1:, None], -1)[:, 0]
    return (jax.nn.logsumexp(logits_TV[:-1], -1) - chosen_T).mean()


def private(p, id_BT):
    if "argnums" in inspect.signature(dpx.clipped_grad).parameters:
        return dpx.clipped_grad(loss, clipping_norm=1.0)(p, id_BT)[0]
    # Before it was a transform it took parameters, a batch and the weights of norms.
    return dpx.clipped_grad(loss, p, id_BT, weights=lambda norm_B: 1 / jnp.maximum(norm_B, 1.0))[0]


def plain(p, id_BT):
    return jax.grad(lambda p: jax.vmap(lambda id_T: loss(p, id_T))(id_BT).sum())(p)


def main(rounds: int) -> None:
    for is_tied in (True, False):
        drawn = np.random.default_rng(0)
        p = {name: jnp.asarray(drawn.normal(0, 0.05, shape), jnp.float32) for name, shape in shapes(is_tied).items()}
        id_BT = jnp.asarray(drawn.integers(0, V, (B, T)), jnp.int32)
        flops = [matmul_flops(function, p, id_BT) for function in (private, plain)]
        runs, seconds = [jax.jit(private), jax.jit(plain)], ([], [])
        for turn in range(rounds + 1):
            for run, taken in zip(runs, seconds, strict=True):
                began = time.perf_counter()
                jax.block_until_ready(run(p, id_BT))
                if turn:
                    taken.append(time.perf_counter() - began)
        ratio = statistics.median(one / other for one, other in zip(*seconds, strict=True))
        print(f"{'tied' if is_tied else 'untied'}: products {flops[0] / flops[1]:.4f}, seconds {ratio:.3f} of a plain gradient")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
