"""Kernels read in parts: gates, heads, layers by number, parts that overlap; exact beside float64, and not copied.

T: rounds, D: width.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping.rounding import MARGINS
from dpx.cost.traced import matmul_flops
from tests.clipping.batches import QUICKLY

B, T, D, LIMIT = 4, 5, 6, 0.3


def gated(p, x):
    """A GRU whose kernels hold the three gates side by side."""

    def cell(h, x):
        (xz, xr, xn), (hz, hr, hn) = (jnp.split(p[name], 3, 1) for name in ("into", "across"))
        z, r = jax.nn.sigmoid(x @ xz + h @ hz), jax.nn.sigmoid(x @ xr + h @ hr)
        h = z * h + (1 - z) * jnp.tanh(x @ xn + r * (h @ hn))
        return h, h

    return jax.lax.scan(cell, jnp.zeros(D, x.dtype), x)[1]


def by_number(p, x):
    """Layers of a stack by number, one of them twice."""
    for layer in (0, 2, 1, 2):
        x = jnp.tanh(x @ p["stack"][layer])
    return x


def heads(p, x):
    """Queries, keys and values side by side on an axis of their own; the values' kernel is read the other way round too."""
    q, k, v = (jnp.einsum("td,dhe->the", x, p["qkv"][:, at]) for at in range(3))
    y = jnp.einsum("ths,she->the", jax.nn.softmax(jnp.einsum("the,she->ths", q, k)), v)
    return jnp.einsum("the,dhe->td", y, p["qkv"][:, 2])


def strided(p, x):
    """Every second column, and rows of the others."""
    y = x @ p["kernel"][:, ::2]
    return jnp.concatenate([y, x[:, :2] @ p["kernel"][:2, 1::2], x[:, 2:] @ p["kernel"][2:, 1::2]], -1)


def scanned(p, x):
    """Layers of a loop that each have three parts, of which one is not read."""

    def layer(x, kernel):
        first, _, last = jnp.split(kernel, 3, 1)
        return jnp.tanh(jnp.tanh(x @ first) @ last) @ first, None

    return jax.lax.scan(layer, x, p["layers"])[0]


def nested(p, x):
    left, right = p["kernel"][:, : D // 2], p["kernel"][:, D // 2 :]

    def inner(h, x):
        return jnp.tanh(jnp.concatenate([h @ left, x @ right])), None

    return jax.lax.map(lambda row: jax.lax.scan(inner, row, x)[0], x)


def overlapping(p, x):
    return jnp.tanh(x[:, :4] @ p["kernel"][:4]) + jnp.tanh(x[:, 2:] @ p["kernel"][2:])


def with_a_bias(p, x):
    return jnp.tanh(x[:, :-1] @ p["kernel"][:-1] + p["kernel"][-1])


def cast(p, x):
    left, right = jnp.split(p["kernel"].astype(x.dtype).T, 2)
    return jnp.concatenate([x @ left.T, jnp.tanh(x @ right.T)], -1)


def again(p, x):
    """Parts within a branch and within a part that is computed again."""
    top, bottom = p["kernel"][:2], p["kernel"][2:]
    run = jax.checkpoint(lambda x: jnp.tanh(x[:, :2] @ top + x[:, 2:] @ bottom))
    return jax.lax.fori_loop(0, 3, lambda i, x: jax.lax.cond(i > 0, run, lambda x: x, x), x)


def by_number_and_in_a_loop(p, x):
    x = jnp.tanh(x @ p["layers"][0])
    return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, p["layers"])[0]


def by_computed_number(p, x):
    """Layers by a number that the loop computes, in another order."""
    return jax.lax.fori_loop(0, 5, lambda i, x: jnp.tanh(x @ p["layers"][(2 * i) % 3]), x)


def number_of_the_example(p, x):
    """The number of the layer depends on the example, and on the round."""

    def layer(carried, _):
        at, x = carried
        x = jnp.tanh(x @ jax.lax.dynamic_index_in_dim(p["layers"], at % 3, keepdims=False))
        return (at + (x[0, 0] > 0).astype(jnp.int32) + 1, x), None

    return jax.lax.scan(layer, ((x[0, 1] > 0).astype(jnp.int32), x), None, 4)[0][1]


def part_of_a_stack(p, x):
    """Some layers of a stack in a loop, transposed and backwards, and the last one by number."""
    x = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, jnp.swapaxes(p["layers"][:-1], 1, 2), reverse=True)[0]
    return jnp.tanh(x @ p["layers"][-1])


def window(p, x):
    """A window of rows that moves by two in each round, past the end, where its place is clamped."""

    def part(carried, i):
        kernel = jax.lax.dynamic_slice(p["kernel"], (2 * i, 0), (3, D))
        return jnp.tanh(carried.at[:, :3].add(x[:, :3]) @ jnp.concatenate([kernel, kernel])), None

    return jax.lax.scan(part, x, jnp.arange(3))[0]


def overlapping_in_rounds(p, x):
    """Parts that overlap, the whole backwards, and one row as a bias, in every round."""

    def cell(h, x):
        h = h[:4] @ p["kernel"][:4] + x[2:] @ p["kernel"][2:] + jnp.flip(h) @ p["kernel"][::-1]
        return jnp.tanh(h), jnp.tanh(h)

    return jax.lax.scan(cell, x[0], x)[1]


def bias_in_rounds(p, x):
    cell = lambda h, x: ((y := jnp.tanh(x @ p["kernel"][:-1] + h @ p["kernel"][:-1] + p["kernel"][-1])), y)  # noqa: E731
    return jax.lax.scan(cell, x[0], x[:3])[1]


def joined(p, x):
    """Kernels side by side and one above the other, as the contracted axis, the other axis and the batch axis of products."""

    def cell(h, x):
        both, pair = jnp.concatenate([p["into"], p["across"]]), jnp.stack([p["into"], p["across"]])
        h = jnp.tanh(jnp.concatenate([x, h]) @ both + jnp.einsum("ki,kij->kj", jnp.stack([h, x]), pair).sum(0))
        return h, (h @ jnp.concatenate([p["across"], p["into"]], 1))[:D]

    return jax.lax.scan(cell, jnp.zeros(D, x.dtype), x)[1]


def several_axes(p, x):
    """A kernel for each head, and one whose contracted axes are not side by side."""

    def cell(h, x):
        h = jnp.tanh(jnp.einsum("hd,hde->he", (h + x).reshape(2, 3), p["heads"])).reshape(-1)
        return h, h + jnp.einsum("de,dfe->f", x.reshape(2, 3), p["mixed"].reshape(2, D, 3))

    return jax.lax.scan(cell, jnp.zeros(D, x.dtype), x)[1]


def looked_up_and_multiplied(p, x):
    """A table of which a round reads a row by its number and a part as a kernel."""

    def cell(h, given):
        i, x = given
        h = jnp.tanh(h[:2] @ p["table"][:2] + x @ p["table"][2:] + jnp.take(p["table"], i, axis=0))
        return h, h

    return jax.lax.scan(cell, jnp.zeros(D, x.dtype), (jnp.arange(2), x[:2]))[1]


def no_rounds(p, x):
    """A loop of no rounds, and one along a part of no layers."""
    x = jax.lax.scan(lambda x, _: (jnp.tanh(x @ p["layers"][1]), None), x, None, 0)[0]
    return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, p["layers"][:0])[0] @ p["layers"][1]


SQUARE, LAYERS = {"kernel": (D, D)}, {"layers": (3, D, D)}
PARTED = {
    "gated": (gated, {"into": (D, 3 * D), "across": (D, 3 * D)}),
    "by_number": (by_number, {"stack": (4, D, D)}),
    "heads": (heads, {"qkv": (D, 3, 2, D // 2)}),
    "strided": (strided, SQUARE),
    "scanned": (scanned, {"layers": (2, D, 3 * D)}),
    "nested": (nested, SQUARE),
    "cast": (cast, SQUARE),
    "again": (again, SQUARE),
    "overlapping": (overlapping, SQUARE),
    "with_a_bias": (with_a_bias, SQUARE),
    "by_number_and_in_a_loop": (by_number_and_in_a_loop, {"layers": (2, D, D)}),
    "by_computed_number": (by_computed_number, LAYERS),
    "number_of_the_example": (number_of_the_example, LAYERS),
    "part_of_a_stack": (part_of_a_stack, LAYERS),
    "overlapping_in_rounds": (overlapping_in_rounds, SQUARE),
    "bias_in_rounds": (bias_in_rounds, {"kernel": (D + 1, D)}),
    "joined": (joined, {"into": (D, D), "across": (D, D)}),
    "several_axes": (several_axes, {"heads": (2, 3, 3), "mixed": (2, D, 3)}),
    "window": (window, SQUARE),
    "no_rounds": (no_rounds, LAYERS),
    "looked_up_and_multiplied": (looked_up_and_multiplied, {"table": (2 + D, D)}),
}
WAYS = {
    "kept": {},
    "turns": {"kept_bytes": 0},
    "ghost": {"method": "ghost"},
    "units": {"rows_per_unit": 2},
    "grams": {"kept_bytes": 0, "weights": lambda norms: LIMIT / jnp.maximum(norms, LIMIT)},
}


def loss_of(run):
    return lambda p, x: jnp.sum((y := run(p, x)) * jnp.cos(jnp.arange(y.shape[0], dtype=x.dtype))[:, None])


def params_of(shapes):
    drawn = np.random.default_rng(5)
    return {name: drawn.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


ROWS = np.random.default_rng(6).normal(0, 1, (B, T, D)).astype(np.float32)


# Each kind of part: by slices that overlap, by a number, by a number of the example, of a stack, in rounds, joined, and none.
QUICK = {("overlapping", "kept"), ("by_computed_number", "kept"), ("number_of_the_example", "units"), ("part_of_a_stack", "kept")}
QUICK |= {("overlapping_in_rounds", "grams"), ("joined", "ghost"), ("no_rounds", "turns")}
EACH = [(name, way, () if (name, way) in QUICK else pytest.mark.slow) for name in PARTED for way in WAYS]


@pytest.mark.parametrize(("name", "way"), [pytest.param(name, way, marks=marks) for name, way, marks in EACH])
def test_parts_are_exact(name, way):
    run, shapes = PARTED[name]
    assert_exact(run, shapes, WAYS[way])


def assert_exact(run, shapes, options):
    """Beside float64, one example at a time: norms are not too small, and the sum is of what they give."""
    loss, params = loss_of(run), params_of(shapes)
    with jax.enable_x64(True):
        one = jax.jit(jax.grad(loss), compiler_options=QUICKLY)
        each = [jax.tree.map(np.asarray, one(jax.tree.map(np.float64, params), np.float64(row))) for row in ROWS]
    R = options.get("rows_per_unit", 1)
    units = [jax.tree.map(lambda *leaves: sum(leaves), *each[at : at + R]) for at in range(0, B, R)]
    norms = np.sqrt([sum(np.square(leaf).sum() for leaf in unit.values()) for unit in units])
    transform = dpx.weighted_grad(loss, **options) if "weights" in options else dpx.clipped_grad(loss, clipping_norm=LIMIT, **options)
    found = jax.jit(transform, compiler_options=QUICKLY)(params, ROWS)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-3)
    assert np.all(np.asarray(found.norms, np.float64) >= norms * (1 - 1e-5)) and norms.max() > LIMIT
    held = LIMIT if "weights" in options else LIMIT * (1 - MARGINS["float32"])
    for path in shapes:
        wanted = sum(min(1, held / norm) * unit[path] for norm, unit in zip(norms, units, strict=True))
        np.testing.assert_allclose(found.total[path], wanted, rtol=0, atol=1e-3 * LIMIT)


COUNTED = {"by_computed_number", "overlapping_in_rounds", "looked_up_and_multiplied"}
# A part of no layers has nothing to copy.
ROUTES = {"looked_up_and_multiplied": {"lookup"}, "no_rounds": {"copies"}}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in COUNTED)) for name in PARTED])
def test_parts_are_not_copied_and_cost_no_more_flops_than_by_vmap(name):
    run, shapes = PARTED[name]
    loss, given = loss_of(run), (params_of(shapes), ROWS)
    gradient = dpx.clipped_grad(loss, clipping_norm=LIMIT)
    by_vmap, ours = (
        matmul_flops(dpx.clipped_grad(loss, clipping_norm=LIMIT, method=method), *given) for method in ("vmap", gradient.method)
    )
    assert ours <= 1.05 * by_vmap
    explained = gradient.explain(*given)
    assert max(taken.beside_vmap for taken in explained) <= 1
    assert {taken.route for taken in explained} == ROUTES.get(name, {"product"})
