"""What `dpx.clipped_grad` costs for models of many kinds, beside a plain gradient, `vmap(grad)` with clipping and jax-privacy.

    python experiments/benchmarks/programs.py [rounds] [names]

Prints for each model the FLOPs of products and convolutions (counted in the traced programs), the compiler's temporary bytes, and the
seconds (medians, all ways by turns in this process), each as a ratio to `vmap(grad)` with clipping; and the largest error of the clipped
sum against float64 gradients that are taken one example at a time. With 0 rounds nothing is timed. Run nothing beside it. jax-privacy is
left out if it is not installed.

Shape legend: B examples, T tokens, H width, A heads, D width of a head, F width between, E experts, V vocabulary, C classes.
"""

import dataclasses
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpx
from dpx.cost.traced import compiled_temporaries, matmul_flops

CLIPPING_NORM = 1.0


@dataclasses.dataclass(frozen=True)
class Subject:
    """A loss of one example, the shapes of its parameters, and the shapes of an example: numbers, or ids below `ids`."""

    loss: Callable[[Any, Any], Any]
    shapes: dict[str, tuple[int, ...]]
    example: tuple[int, ...]
    examples: int
    ids: int | None = None

    def params(self, dtype: Any = np.float32) -> dict[str, Any]:
        drawn = np.random.default_rng(0)
        scaled = lambda shape: drawn.normal(0, 1 / np.sqrt(np.prod(shape[:-1])), shape)  # noqa: E731
        return {name: np.asarray(scaled(shape), dtype) for name, shape in self.shapes.items()}

    def batch(self, dtype: Any = np.float32) -> Any:
        drawn, shape = np.random.default_rng(1), (self.examples, *self.example)
        return drawn.integers(0, self.ids, shape) if self.ids else np.asarray(drawn.normal(0, 1, shape), dtype)


def cross_entropy(logits: Any, label: Any) -> Any:
    return (jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, label[..., None], -1)[..., 0]).mean()


def scaled(x: Any, gain: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * gain


def convolutional(stages: tuple[int, ...] = (32, 64, 128), side: int = 32, classes: int = 10, groups: int = 8) -> Subject:
    """A residual net with GroupNorm, as private image classifiers have it."""
    shapes: dict[str, tuple[int, ...]] = {"stem": (3, 3, 3, stages[0]), "head": (stages[-1], classes)}
    for at, (into, out) in enumerate(zip((stages[0], *stages), stages, strict=False)):
        shapes |= {f"first_{at}": (3, 3, into, out), f"second_{at}": (3, 3, out, out), f"skip_{at}": (1, 1, into, out)}
        shapes |= {f"gain_{at}": (into,), f"shift_{at}": (into,), f"gain2_{at}": (out,)}

    def convolved(x_SSC: Any, kernel: Any, stride: int = 1) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x_SSC[None], kernel, (stride, stride), "SAME", dimension_numbers=numbers)[0]

    def normalised(x_SSC: Any, gain: Any) -> Any:
        grouped = x_SSC.reshape(*x_SSC.shape[:2], groups, -1)
        centred = grouped - grouped.mean((0, 1, 3), keepdims=True)
        scale = jax.lax.rsqrt(jnp.square(centred).mean((0, 1, 3), keepdims=True) + 1e-5)
        return (centred * scale).reshape(x_SSC.shape) * gain

    def loss(p: Any, x_SSC: Any) -> Any:
        x = convolved(x_SSC, p["stem"])
        for at in range(len(stages)):
            stride = 1 if at == 0 else 2
            h = jax.nn.relu(normalised(x, p[f"gain_{at}"]) + p[f"shift_{at}"])
            inner = jax.nn.relu(normalised(convolved(h, p[f"first_{at}"], stride), p[f"gain2_{at}"]))
            x = convolved(h, p[f"skip_{at}"], stride) + convolved(inner, p[f"second_{at}"])
        return cross_entropy(jax.nn.relu(x).mean((0, 1)) @ p["head"], jnp.argmax(x_SSC.sum((0, 1))))

    return Subject(loss, shapes, (side, side, 3), 16)


def bytes_(T: int = 4096, V: int = 256, H: int = 8) -> Subject:
    """A byte model: a long text, a small vocabulary, a narrow embedding (MalConv's shape)."""
    shapes = {"word": (V, H), "gate": (8, H, 16), "filter": (8, H, 16), "head": (16, 2)}

    def loss(p: Any, id_T: Any) -> Any:
        x_TH, numbers = p["word"][id_T], ("NWC", "WIO", "NWC")
        run = lambda kernel: jax.lax.conv_general_dilated(x_TH[None], kernel, (8,), "VALID", dimension_numbers=numbers)[0]  # noqa: E731
        return cross_entropy((run(p["filter"]) * jax.nn.sigmoid(run(p["gate"]))).max(0) @ p["head"], id_T[0] % 2)

    return Subject(loss, shapes, (T,), 16, ids=V)


def lstm(T: int = 64, V: int = 2048, H: int = 128) -> Subject:
    shapes = {"word": (V, H), "into": (H, 4 * H), "across": (H, 4 * H), "bias": (4 * H,), "head": (H, V)}

    def loss(p: Any, id_T: Any) -> Any:
        def cell(carried: Any, x_H: Any) -> Any:
            h_H, c_H = carried
            i, f, g, o = jnp.split(x_H @ p["into"] + h_H @ p["across"] + p["bias"], 4)
            c_H = jax.nn.sigmoid(f) * c_H + jax.nn.sigmoid(i) * jnp.tanh(g)
            h_H = jax.nn.sigmoid(o) * jnp.tanh(c_H)
            return (h_H, c_H), h_H

        _, h_TH = jax.lax.scan(cell, (jnp.zeros(H), jnp.zeros(H)), p["word"][id_T])
        return cross_entropy(h_TH[:-1] @ p["head"], id_T[1:])

    return Subject(loss, shapes, (T,), 16, ids=V)


def gates(T: int = 64, V: int = 2048, H: int = 128) -> Subject:
    """An LSTM that has a kernel for each gate and concatenates them in each round, as flax's `OptimizedLSTMCell` does."""
    of_gate = {"into": (H, H), "across": (H, H), "bias": (H,)}
    shapes = {f"{name}_{gate}": shape for gate in "ifgo" for name, shape in of_gate.items()} | {"word": (V, H), "head": (H, V)}

    def loss(p: Any, id_T: Any) -> Any:
        def cell(carried: Any, x_H: Any) -> Any:
            h_H, c_H = carried
            into, across, bias = (jnp.concatenate([p[f"{name}_{gate}"] for gate in "ifgo"], -1) for name in of_gate)
            i, f, g, o = jnp.split(x_H @ into + h_H @ across + bias, 4)
            c_H = jax.nn.sigmoid(f) * c_H + jax.nn.sigmoid(i) * jnp.tanh(g)
            h_H = jax.nn.sigmoid(o) * jnp.tanh(c_H)
            return (h_H, c_H), h_H

        _, h_TH = jax.lax.scan(cell, (jnp.zeros(H), jnp.zeros(H)), p["word"][id_T])
        return cross_entropy(h_TH[:-1] @ p["head"], id_T[1:])

    return Subject(loss, shapes, (T,), 16, ids=V)


def attended(q_THD: Any, k_THD: Any, v_THD: Any, is_causal: bool) -> Any:
    scores = jnp.einsum("tad,sad->ats", q_THD, k_THD) / np.sqrt(q_THD.shape[-1])
    T = scores.shape[-1]
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9) if is_causal else scores
    return jnp.einsum("ats,sad->tad", jax.nn.softmax(scores), v_THD).reshape(T, -1)


def experts(T: int = 64, V: int = 2048, H: int = 128, E: int = 4, F: int = 256) -> Subject:
    """One layer whose feed-forward part is a mixture of experts, all computed and weighted by a router."""
    shapes = {"word": (V, H), "qkv": (H, 3 * H), "router": (H, E), "up": (E, H, F), "down": (E, F, H), "norm": (H,)}

    def loss(p: Any, id_T: Any) -> Any:
        x_TH = p["word"][id_T]
        heads = [x.reshape(T, 4, -1) for x in jnp.split(x_TH @ p["qkv"], 3, -1)]
        x_TH = scaled(x_TH + attended(*heads, is_causal=True), p["norm"])
        routed_TE = jax.nn.softmax(x_TH @ p["router"])
        between = jax.nn.gelu(jnp.einsum("th,ehf->etf", x_TH, p["up"]))
        x_TH = x_TH + jnp.einsum("te,eth->th", routed_TE, jnp.einsum("etf,efh->eth", between, p["down"]))
        return cross_entropy((x_TH @ p["word"].T)[:-1], id_T[1:])

    return Subject(loss, shapes, (T,), 16, ids=V)


def bert_tiny(T: int = 128, V: int = 30_522, H: int = 128, A: int = 2, F: int = 512, layers: int = 2, decoded: int = 20) -> Subject:
    of_layer = {"qkv": (H, 3 * H), "out": (H, H), "up": (H, F), "down": (F, H), "gain": (H,), "shift": (H,)}
    shapes = {f"{name}_{at}": shape for at in range(layers) for name, shape in of_layer.items()}
    shapes |= {"word": (V, H), "position": (T, H), "bias": (V,)}

    def loss(p: Any, id_T: Any) -> Any:
        x_TH = p["word"][id_T] + p["position"]
        for at in range(layers):
            heads = [x.reshape(T, A, -1) for x in jnp.split(x_TH @ p[f"qkv_{at}"], 3, -1)]
            x_TH = x_TH + attended(*heads, is_causal=False) @ p[f"out_{at}"]
            x_TH = scaled(x_TH - x_TH.mean(-1, keepdims=True), p[f"gain_{at}"]) + p[f"shift_{at}"]
            x_TH = x_TH + jax.nn.gelu(x_TH @ p[f"up_{at}"]) @ p[f"down_{at}"]
        return cross_entropy(x_TH[:decoded] @ p["word"].T + p["bias"], id_T[1 : decoded + 1])

    return Subject(loss, shapes, (T,), 16, ids=V)


def llama(T: int = 128, V: int = 8192, H: int = 256, A: int = 4, F: int = 688, layers: int = 2, is_scanned: bool = False) -> Subject:
    of_layer = {"qkv": (H, 3 * H), "out": (H, H), "gate": (H, F), "up": (H, F), "down": (F, H), "norm": (H,), "norm_2": (H,)}
    shapes = {f"{name}_{at}": shape for at in range(layers) for name, shape in of_layer.items()}
    if is_scanned:
        shapes = {f"layer_{name}": (layers, *shape) for name, shape in of_layer.items()}
    shapes |= {"word": (V, H), "norm": (H,)}

    def rotated(x_TAD: Any) -> Any:
        half = x_TAD.shape[-1] // 2
        angles = jnp.arange(T)[:, None] / 10_000 ** (jnp.arange(half) / half)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        first, second = x_TAD[..., :half], x_TAD[..., half:]
        return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], -1)

    def layer(x_TH: Any, p: Any) -> tuple[Any, None]:
        q, k, v = (x.reshape(T, A, -1) for x in jnp.split(scaled(x_TH, p["norm"]) @ p["qkv"], 3, -1))
        x_TH = x_TH + attended(rotated(q), rotated(k), v, is_causal=True) @ p["out"]
        h_TH = scaled(x_TH, p["norm_2"])
        return x_TH + (jax.nn.silu(h_TH @ p["gate"]) * (h_TH @ p["up"])) @ p["down"], None

    def loss(p: Any, id_T: Any) -> Any:
        x_TH = p["word"][id_T]
        if is_scanned:
            x_TH, _ = jax.lax.scan(layer, x_TH, {name: p[f"layer_{name}"] for name in of_layer})
        for at in range(0 if is_scanned else layers):
            x_TH, _ = layer(x_TH, {name: p[f"{name}_{at}"] for name in of_layer})
        return cross_entropy((scaled(x_TH, p["norm"]) @ p["word"].T)[:-1], id_T[1:])

    return Subject(loss, shapes, (T,), 16, ids=V)


SUBJECTS = {
    "convolutional": convolutional,
    "bytes": bytes_,
    "lstm": lstm,
    "gates": gates,
    "experts": experts,
    "bert_tiny": bert_tiny,
    "llama": llama,
}


def ways(subject: Subject) -> dict[str, Callable[[Any, Any], Any]]:
    """Returns the sums to compare, each a function of parameters and batch."""
    options = {"clipping_norm": CLIPPING_NORM}
    found: dict[str, Callable[[Any, Any], Any]] = {
        "plain": lambda p, b: jax.grad(lambda p: jax.vmap(subject.loss, (None, 0))(p, b).sum())(p),
        "vmap": lambda p, b: dpx.clipped_grad(subject.loss, method="vmap", **options)(p, b).total,
        "dpx": lambda p, b: dpx.clipped_grad(subject.loss, **options)(p, b).total,
    }
    if importlib.util.find_spec("jax_privacy") is not None:
        from jax_privacy.clipping import clipped_grad

        of_rows = clipped_grad(lambda p, x: subject.loss(p, x[0]), l2_clip_norm=CLIPPING_NORM, batch_argnums=1)
        found["jax_privacy"] = of_rows
    return found


def counted(subject: Subject) -> dict[str, tuple[int, int, Any]]:
    """Returns (FLOPs, temporary bytes, the compiled program) of each way."""
    given = subject.params(), subject.batch()
    compiled = {name: jax.jit(run).lower(*given).compile() for name, run in ways(subject).items()}
    return {name: (matmul_flops(run, *given), compiled_temporaries(compiled[name]), compiled[name]) for name, run in ways(subject).items()}


def error(subject: Subject) -> float:
    """Returns the largest error of a clipped sum of two examples beside float64, relative to the largest number of the sum."""
    given = [jax.tree.map(jnp.asarray, subject.params()), jnp.asarray(subject.batch()[:2])]
    total = jax.jit(ways(subject)["dpx"])(*given)
    with jax.enable_x64(True):
        params, batch = subject.params(np.float64), subject.batch(np.float64)[:2]
        wanted = jax.tree.map(np.zeros_like, params)
        one = jax.jit(jax.grad(subject.loss))
        for row in batch:
            gradient = one(params, row)
            norm = np.sqrt(sum(np.square(leaf).sum() for leaf in map(np.asarray, jax.tree.leaves(gradient))))
            weight = min(1, CLIPPING_NORM * (1 - dpx.clipping.rounding.MARGINS["float32"]) / norm)
            wanted = jax.tree.map(lambda total, leaf, weight=weight: total + weight * np.asarray(leaf), wanted, gradient)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted))
    return max(np.abs(np.asarray(a) - b).max() for a, b in zip(*map(jax.tree.leaves, (total, wanted)), strict=True)) / scale


def seconds(compiled: dict[str, Any], given: Any, rounds: int) -> dict[str, float]:
    """Returns the median seconds of each program, all by turns."""
    taken: dict[str, list[float]] = {name: [] for name in compiled}
    for at in range(rounds + 1):
        for name, run in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*given))
            if at:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) if values else float("nan") for name, values in taken.items()}


def main(rounds: int = 5, *names: str) -> None:
    print("| model | way | FLOPs | temporaries | seconds | MFLOPs | MiB | ms | error |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in names or SUBJECTS:
        subject = SUBJECTS[name]()
        found = counted(subject)
        taken = seconds({way: one for way, (_, _, one) in found.items()}, (subject.params(), subject.batch()), rounds)
        base = (*found["vmap"][:2], taken["vmap"])
        for way, (flops, held, _) in found.items():
            own = (flops, held, taken[way])
            ratios = " | ".join(f"{have / of:.2f}" for have, of in zip(own, base, strict=True))
            off = f"{error(subject):.1e}" if way == "dpx" else ""
            print(f"| {name} | {way} | {ratios} | {flops / 1e6:.0f} | {held / 2**20:.1f} | {1e3 * taken[way]:.1f} | {off} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
