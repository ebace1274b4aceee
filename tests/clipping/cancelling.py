"""Inputs whose gradients cancel, found by gradient ascent, and what one example contributes there, in float64.

Each case is a loss that is linear in the output of an op, so that inputs `x` and cotangents `g` are free. Ascent makes the gradient
small beside them: sum_t |A_t| |G_t| over |g| grows until float32 ends.

N: iterates, T: tokens, p: inputs, d: outputs, V: table rows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpx
from dpx.clipping import ops
from dpx.clipping.norms import BY_ID_FROM
from dpx.clipping.op import ProbeSession, apply, session_of
from dpx.clipping.rounding import MARGINS, SMALLEST_CLIPPING_NORM
from dpx.models.fused_head import token_loss
from dpx.models.fused_layers import layer_stack
from tests.clipping.batches import QUICKLY, bert, objective

T, P, D, V = 8, 48, 40, 30
MODEL = bert(layers=2, width=16)
LAYERS = jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(objective(MODEL).init, jax.random.PRNGKey(0)))["layers"]


@dataclasses.dataclass(frozen=True)
class Case:
    """`shapes` are those of the parameters, `rows` those of one example's arrays. `is_exact`: the norm is of the inputs themselves, so that
    the float64 gradient is the true one; else of a gradient or of activations that float32 has rounded before."""

    losses: Callable[[Any, Any], Any]
    shapes: dict[str, Any]
    rows: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=lambda: {"x": (T, P), "g": (T, D)})
    options: dict[str, Any] = dataclasses.field(default_factory=lambda: {"kept_bytes": 0})
    frozen: tuple[str, ...] = ()
    is_exact: bool = True
    margin: float = MARGINS["float32"]

    @property
    def units(self) -> int:
        return self.options.get("rows_per_unit", 1)

    def params(self, is_frozen: bool = False) -> dict[str, Any]:
        drawn, is_shape = np.random.default_rng(5), lambda leaf: isinstance(leaf, tuple)
        values = jax.tree.map(lambda shape: jnp.asarray(drawn.normal(0, 0.3, shape), jnp.float32), self.shapes, is_leaf=is_shape)
        return {name: value for name, value in values.items() if (name in self.frozen) is is_frozen}


def dotted(y: Any, g: Any) -> Any:
    """The loss of each example that has cotangents `g` at `y`."""
    return (y * g).sum(tuple(range(1, y.ndim))), {}


def ids(b: Any) -> Any:
    """Ids that repeat."""
    return jnp.broadcast_to(jnp.arange(b["g"].shape[1]) % 3 + 1, b["g"].shape[:2])


def _labelled(p: Any, b: Any) -> Any:
    losses_B, _ = token_loss(ids(b), jnp.ones(b["g"].shape[:2], bool), b["x"], p["table"], p["bias"])
    return losses_B * b["g"].mean((1, 2)), {}


def _stacked(p: Any, b: Any) -> Any:
    return dotted(jax.lax.scan(lambda x, kernel: (ops.dense(x, kernel), None), b["x"], p["layers"])[0], b["g"])


def _again(p: Any, b: Any) -> Any:
    return dotted(jax.lax.scan(lambda x, _: (ops.dense(x, p["kernel"]), None), b["x"], None, 2)[0], b["g"])


def _biased_again(p: Any, b: Any) -> Any:
    y, _ = jax.lax.scan(lambda x, sign: (sign * ops.add_bias(x, p["bias"]), None), b["g"], jnp.asarray([1.0, -1.0, 1.0]))
    return dotted(y, b["g"])


def _decoded_and_looked_up(p: Any, b: Any) -> Any:
    x = ops.lookup(p["table"], ids(b))
    return dotted(jnp.concatenate([ops.decode(b["x"], p["table"]), -x], -1), jnp.concatenate([b["g"], b["h"]], -1))


def _layers(p: Any, b: Any) -> Any:
    session = session_of(p)
    if session is None:
        # Ascent and truth: bare parameters, and so the forward pass alone.
        session = ProbeSession({})
    op = layer_stack(MODEL, p["layers"], b["x"], session)
    y = apply(op, p["layers"], (b["x"], jnp.full(len(b["x"]), T), None))
    return dotted(y, b["g"])


def _narrow(p: Any, b: Any) -> Any:
    return dotted(ops.dense(b["x"].astype(jnp.bfloat16), p["kernel"]), b["g"].astype(jnp.bfloat16))


def _convolved(p: Any, b: Any) -> Any:
    y = jax.lax.conv_general_dilated(b["x"], p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return dotted(y, b["g"])


MATRIX = {"kernel": (P, D)}
SQUARE = {"x": (T, D), "g": (T, D)}
LONG = {"x": (64, 8), "g": (64, 8)}
TABLE = {"x": (T, D), "g": (T, V)}
TRACED = {"method": "traced", "kept_bytes": 0}
CASES = {
    "dense": Case(lambda p, b: dotted(ops.dense(b["x"], p["kernel"]), b["g"]), MATRIX),
    "dense_kept": Case(lambda p, b: dotted(ops.dense(b["x"], p["kernel"]), b["g"]), MATRIX, options={"kept_bytes": 2**30}, is_exact=False),
    "dense_by_vmap": Case(lambda p, b: dotted(ops.dense(b["x"], p["kernel"]), b["g"]), MATRIX, options={"method": "vmap"}, is_exact=False),
    "dense_bias": Case(lambda p, b: dotted(ops.dense(b["x"], p["kernel"], p["bias"]), b["g"]), MATRIX | {"bias": (D,)}),
    "dense_frozen_bias": Case(
        lambda p, b: dotted(ops.dense(b["x"], p["kernel"], p["bias"]), b["g"]), MATRIX | {"bias": (D,)}, frozen=("bias",)
    ),
    "dense_recomputed": Case(lambda p, b: dotted(ops.dense(b["x"], p["kernel"]), b["g"]), {"kernel": (8, 8)}, LONG),
    "dense_in_units": Case(
        lambda p, b: dotted(ops.dense(b["x"], p["kernel"]), b["g"]), MATRIX, options={"kept_bytes": 0, "rows_per_unit": 2}
    ),
    "dense_of_one_token": Case(lambda p, b: dotted(ops.dense(b["x"], p["kernel"]), b["g"]), MATRIX, {"x": (1, P), "g": (1, D)}),
    "dense_twice": Case(
        lambda p, b: dotted(ops.dense(b["x"], p["kernel"]) - ops.dense(b["y"], p["kernel"]), b["g"]),
        MATRIX,
        {"x": (T, P), "y": (T, P), "g": (T, D)},
    ),
    "dense_by_ghost": Case(
        lambda p, b: dotted(ops.dense(b["x"], p["kernel"]), b["g"]), MATRIX, options={"method": "ghost", "kept_bytes": 0}
    ),
    "dense_in_bfloat16": Case(_narrow, MATRIX, is_exact=False, margin=MARGINS["bfloat16"]),
    "layers": Case(_layers, {"layers": LAYERS}, {"x": (T, 16), "g": (T, 16)}, is_exact=False),
    "dense_again": Case(_again, {"kernel": (D, D)}, SQUARE, is_exact=False),
    "stacked": Case(_stacked, {"layers": (2, D, D)}, SQUARE, is_exact=False),
    "low_rank": Case(lambda p, b: dotted(ops.low_rank(b["x"], p["a"], p["b"]), b["g"]), {"a": (P, 2), "b": (2, D)}, is_exact=False),
    "lookup": Case(lambda p, b: dotted(ops.lookup(p["table"], ids(b)), b["g"]), {"table": (V, D)}, {"g": (3 * T, D)}),
    "small_lookup": Case(
        lambda p, b: dotted(ops.small_lookup(p["table"], ids(b)), b["g"]), {"table": (V, D)}, {"g": (3 * T, D)}, is_exact=False
    ),
    "decode": Case(lambda p, b: dotted(ops.decode(b["x"], p["table"]), b["g"]), {"table": (V, D)}, TABLE),
    "decode_bias": Case(lambda p, b: dotted(ops.decode(b["x"], p["table"], p["bias"]), b["g"]), {"table": (V, D), "bias": (V,)}, TABLE),
    "token_loss": Case(_labelled, {"table": (V, D), "bias": (V,)}, TABLE, is_exact=False),
    "decoded_and_looked_up": Case(_decoded_and_looked_up, {"table": (V, D)}, TABLE | {"h": (T, D)}),
    "layer_norm": Case(
        lambda p, b: dotted(ops.layer_norm(b["x"], p["scale"], p["bias"], 1e-6), b["g"]),
        {"scale": (D,), "bias": (D,)},
        SQUARE,
        is_exact=False,
    ),
    "add_bias": Case(lambda p, b: dotted(ops.add_bias(0 * b["g"], p["bias"]), b["g"]), {"bias": (D,)}, {"g": (64, D)}, is_exact=False),
    "bias_again": Case(_biased_again, {"bias": (D,)}, {"g": (64, D)}, is_exact=False),
    "scale": Case(lambda p, b: dotted(ops.scale(b["x"], p["scale"]), b["g"]), {"scale": (D,)}, SQUARE, is_exact=False),
    "add_rows": Case(
        lambda p, b: dotted(ops.add_rows(b["x"], p["table"]), b["g"]), {"table": (T, D)}, {"x": (3, T, D), "g": (3, T, D)}, is_exact=False
    ),
    "product": Case(lambda p, b: dotted(b["x"] @ p["kernel"], b["g"]), MATRIX, options=TRACED),
    "product_twice": Case(
        lambda p, b: dotted(b["x"] @ p["kernel"] - b["y"] @ p["kernel"], b["g"]),
        MATRIX,
        {"x": (T, P), "y": (T, P), "g": (T, D)},
        TRACED,
    ),
    "experts": Case(
        lambda p, b: dotted(jnp.einsum("btep,epd->bted", b["x"], p["kernel"]), b["g"]),
        {"kernel": (2, P, D)},
        {"x": (T, 2, P), "g": (T, 2, D)},
        TRACED,
    ),
    "gathered": Case(lambda p, b: dotted(p["table"][ids(b)], b["g"]), {"table": (V, D)}, {"g": (3 * T, D)}, TRACED),
    # Kept: the table has fewer rows than there are positions.
    "gathered_by_id": Case(
        lambda p, b: dotted(p["table"][ids(b)], b["g"]), {"table": (V, D)}, {"g": (BY_ID_FROM, D)}, TRACED, is_exact=False
    ),
    "gathered_by_number": Case(
        lambda p, b: dotted(p["table"][ids(b)], b["g"]), {"table": (2 * BY_ID_FROM, D)}, {"g": (BY_ID_FROM, D)}, TRACED
    ),
    "elementwise": Case(lambda p, b: dotted(b["x"] + p["bias"], b["g"]), {"bias": (D,)}, SQUARE, TRACED, is_exact=False),
    "convolved": Case(_convolved, {"kernel": (3, D, D)}, SQUARE, TRACED, is_exact=False),
}


def starts(case: Case, seed: int) -> list[dict[str, Any]]:
    """Inputs at random; with a mean over positions of nearly zero, under equal cotangents; flat, under cotangents of nearly no sum."""
    drawn = np.random.default_rng(seed)
    rows: dict[str, Any] = {name: drawn.normal(0, 1, (case.units, *shape)) for name, shape in case.rows.items()}
    near = lambda x, noise: x - x.mean((0, 1)) + noise * drawn.normal(0, 1, x.shape)  # noqa: E731
    flat = lambda x, noise: x.mean((0, 1)) + noise * x  # noqa: E731
    found = [rows]
    for noise in (1e-3, 1e-5):
        found.append({name: near(x, noise) if name != "g" else flat(x, noise) for name, x in rows.items()})
        found.append({name: flat(x, noise) if name != "g" else near(x, noise) for name, x in rows.items()})
        if "y" in rows:
            # The second input is nearly the first: two uses of one weight that cancel.
            found.append(rows | {"y": rows["x"] + noise * rows["y"]})
    return found


def searched(case: Case, seed: int, steps: int, scale: float = 1.0) -> dict[str, jax.Array]:
    """The iterates [N, units, ...] of ascent from each start, by steps of the inputs' own length, then ever smaller ones; times `scale`."""

    def cancels(rows: Any) -> jax.Array:
        gradient = jax.grad(lambda params: case.losses(params | case.params(True), rows)[0].sum())(case.params())
        size = sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(gradient))
        return sum(jnp.log(jnp.square(x).sum()) for x in rows.values()) - jnp.log(size + 1e-30)

    def step(rows: Any, size: Any) -> Any:
        slopes = jax.grad(cancels)(rows)
        length = lambda x: jnp.sqrt(jnp.square(x).sum())  # noqa: E731
        moved = {name: x + size * length(x) * slopes[name] / (length(slopes[name]) + 1e-20) for name, x in rows.items()}
        return {name: x * jnp.sqrt(x.size) / length(x) for name, x in moved.items()}, rows

    sizes = jnp.asarray(np.geomspace(0.5, 1e-7, steps), jnp.float32)
    search = jax.jit(lambda rows: jax.lax.scan(step, rows, sizes)[1], compiler_options=QUICKLY)
    found = [search(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), start)) for start in starts(case, seed)]
    return jax.tree.map(lambda *each: scale * jnp.concatenate(each), *found)


def worst(case: Case, rows: Any) -> tuple[float, float]:
    """(the largest true norm over the computed one, the largest |v| / C), over iterates [N, units, ...].

    Where float32 has rounded a gradient or activations before, the true norm is that of the sum without clipping. C is .37 of the
    computed norm, so that the example is clipped, or the smallest there is.
    """
    frozen = {"frozen": case.params(True)} if case.frozen else {}

    def clipped(pair: Any) -> Any:
        weights = lambda norms: pair[1] / jnp.maximum(norms, pair[1])  # noqa: E731
        options = {"checked": False} | case.options | frozen
        return dpx.clipped_sum(case.losses, case.params(), pair[0], weights=weights, **options)

    run = jax.jit(lambda rows, limit_N: jax.lax.map(clipped, (rows, limit_N)))
    whole = jax.device_get(run(rows, jnp.full(len(next(iter(rows.values()))), 1e30)))
    limit_N = np.maximum(np.float32(0.37) * whole.norms_B[:, 0], np.float32(SMALLEST_CLIPPING_NORM))
    result = jax.device_get(run(rows, jnp.asarray(limit_N) * (1 - case.margin)))
    assert result.is_counted_B.all()
    gradient = true(case, rows) if case.is_exact else whole.total
    of_norm = _norms(gradient) / np.maximum(np.float64(whole.norms_B[:, 0]), 1e-300)
    return float(np.max(of_norm)), float(np.max(_norms(result.total) / np.float64(limit_N)))


def true(case: Case, rows: Any) -> Any:
    """The gradient of each iterate, in float64."""
    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)  # noqa: E731
        params, rest = wide(case.params()), wide(case.params(True))
        one = jax.grad(lambda params, rows: case.losses(params | rest, rows)[0].sum())
        by_map = jax.jit(lambda rows: jax.lax.map(lambda each: one(params, each), rows), compiler_options=QUICKLY)
        return jax.device_get(by_map(wide(rows)))


def _norms(tree: Any) -> np.ndarray:
    squares = [np.square(np.float64(leaf)).reshape(len(leaf), -1).sum(1) for leaf in jax.tree.leaves(tree)]
    return np.sqrt(sum(squares[1:], squares[0]))
