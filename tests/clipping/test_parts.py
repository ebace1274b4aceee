"""Kernels that are read in parts: gates of a cell, heads, layers of a stack by number; exact beside float64, and not copied.

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


SQUARE = {"kernel": (D, D)}
PARTED = {
    "gated": (gated, {"into": (D, 3 * D), "across": (D, 3 * D)}),
    "by_number": (by_number, {"stack": (4, D, D)}),
    "heads": (heads, {"qkv": (D, 3, 2, D // 2)}),
    "strided": (strided, SQUARE),
    "scanned": (scanned, {"layers": (2, D, 3 * D)}),
    "nested": (nested, SQUARE),
    "cast": (cast, SQUARE),
    "again": (again, SQUARE),
}
COPIED = {
    "overlapping": (overlapping, SQUARE),
    "with_a_bias": (with_a_bias, SQUARE),
    "by_number_and_in_a_loop": (by_number_and_in_a_loop, {"layers": (2, D, D)}),
}
WAYS = {
    "kept": {},
    "turns": {"kept_bytes": 0},
    "ghost": {"method": "ghost"},
    "units": {"rows_per_unit": 2},
    "grams": {"kept_bytes": 0, "weights": lambda norms: LIMIT / jnp.maximum(norms, LIMIT)},
}


def loss_of(run):
    return lambda p, x: jnp.sum(run(p, x) * jnp.cos(jnp.arange(x.shape[0], dtype=x.dtype))[:, None])


def params_of(shapes):
    drawn = np.random.default_rng(5)
    return {name: drawn.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


ROWS = np.random.default_rng(6).normal(0, 1, (B, T, D)).astype(np.float32)


QUICK = {("gated", "kept"), ("gated", "grams"), ("heads", "kept"), ("scanned", "grams"), ("strided", "units")}
QUICK |= {("overlapping", "kept"), ("by_number_and_in_a_loop", "kept")}
EACH = [(name, way, () if (name, way) in QUICK else pytest.mark.slow) for name in PARTED | COPIED for way in WAYS]


@pytest.mark.parametrize(("name", "way"), [pytest.param(name, way, marks=marks) for name, way, marks in EACH])
def test_parts_are_exact(name, way):
    run, shapes = (PARTED | COPIED)[name]
    loss, params, options = loss_of(run), params_of(shapes), WAYS[way]
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


def test_separate_parts_are_not_copied_and_cost_no_more_flops_than_by_vmap():
    found = {}
    for name, (run, shapes) in (PARTED | COPIED).items():
        loss, given = loss_of(run), (params_of(shapes), ROWS)
        gradient = dpx.clipped_grad(loss, clipping_norm=LIMIT)
        by_vmap, ours = (
            matmul_flops(dpx.clipped_grad(loss, clipping_norm=LIMIT, method=method), *given) for method in ("vmap", gradient.method)
        )
        if name in PARTED:
            assert ours <= 1.01 * by_vmap, name
        found[name] = {taken.route for taken in gradient.explain(*given)}
    assert found == dict.fromkeys(PARTED, {"product"}) | dict.fromkeys(COPIED, {"copies"})
