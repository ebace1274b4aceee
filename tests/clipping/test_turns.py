"""Clipped sums whose units are computed in turns, because their gradients do not fit in memory: against all units at once by `vmap`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import groups

T, D, V, LIMIT = 48, 12, 20, 0.05
DRAWN = np.random.default_rng(8)
SHAPES = {"table": (V, D), "layers": (2, D, D), "across": (D, D), "bias": (D,)}
PARAMS = {name: jnp.asarray(DRAWN.normal(0, 0.4, shape), jnp.float32) for name, shape in SHAPES.items()}


def loss(p, id_T, key):
    h_TD = p["table"][id_T] + 0.1 * jax.random.normal(key, (T, D))
    # Each layer is read twice in its round.
    h_TD, _ = jax.lax.scan(lambda h, kernel: (jnp.tanh(jnp.tanh(h @ kernel) @ kernel + p["bias"]), None), h_TD, p["layers"])
    h_D, _ = jax.lax.scan(lambda h, x: (jnp.tanh(x + h @ p["across"]), None), jnp.zeros(D), h_TD)
    return jnp.square(h_D).sum(), {"hidden": h_D, "first": id_T[0]}


def batch(rows):
    return jnp.asarray(np.random.default_rng(rows).integers(0, V, (rows, T)), jnp.int32), jax.random.split(jax.random.key(1), rows)


def assert_alike(found, known):
    for leaf, other in zip(jax.tree.leaves(found.total), jax.tree.leaves(known.total), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-5 * np.abs(other).max())
    for leaf, other in zip(jax.tree.leaves(found[1:]), jax.tree.leaves(known[1:]), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=1e-6)


# The gradients of one unit that are better kept if they fit; the table is always kept.
OF_ONE = 4 * 3 * D * D


@pytest.mark.parametrize(
    ("rows", "rows_per_unit", "of_units", "at_once"),
    [
        pytest.param(6, 1, 0, 1, marks=pytest.mark.slow),
        pytest.param(6, 1, 4.5, 3, marks=pytest.mark.slow),
        pytest.param(12, 2, 3.5, 3, marks=pytest.mark.slow),
        pytest.param(5, 1, 3, 1, marks=pytest.mark.slow),
        pytest.param(101, 1, 20, 17, marks=pytest.mark.slow),
        (202, 2, 20, 17),
    ],
)
def test_turns_change_nothing(rows, rows_per_unit, of_units, at_once):
    is_padding = jnp.arange(rows) >= rows - 1
    options = {"has_aux": True, "clipping_norm": LIMIT, "rows_per_unit": rows_per_unit}
    gradient = dpx.clipped_grad(loss, kept_bytes=int(of_units * OF_ONE), **options)
    assert {taken.units_at_once for taken in gradient.explain(PARAMS, *batch(rows))} == {at_once}
    known = jax.jit(dpx.clipped_grad(loss, method="vmap", **options))(PARAMS, *batch(rows), is_padding=is_padding)
    assert_alike(jax.jit(gradient)(PARAMS, *batch(rows), is_padding=is_padding), known)


# Turns of one row, of which some are not finite, are in test_kept_uses.py.
@pytest.mark.slow
def test_a_row_that_is_not_finite_leaves_the_others_of_its_turn():
    def spoiled(p, id_T, key):
        value, aux = loss(p, id_T, key)
        return value / (id_T[0] != V - 1), aux

    ids, keys = batch(6)
    ids = ids.at[:, 0].set(0).at[4, 0].set(V - 1)
    options = {"has_aux": True, "clipping_norm": LIMIT}
    found = jax.jit(dpx.clipped_grad(spoiled, kept_bytes=int(3 * OF_ONE), **options))(PARAMS, ids, keys)
    assert np.asarray(found.is_counted).tolist() == [True] * 4 + [False, True]
    assert_alike(found, jax.jit(dpx.clipped_grad(spoiled, method="vmap", **options))(PARAMS, ids, keys))


def test_turns_need_at_most_two_percent_of_padding():
    for units in range(1, 300):
        for most in (1, 2, 7, 64, 299):
            count = groups.units_at_once(units, most)
            assert 1 <= count <= min(units, most) and -(-units // count) * count <= 1.02 * units
    assert [groups.units_at_once(*given) for given in ((16, 16), (16, 15), (17, 16), (127, 64), (6, 4))] == [16, 8, 1, 64, 3]
