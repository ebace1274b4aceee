"""Gradients of parameters with several uses that are formed once, for the norm and for the sum, against float64 and without them."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping.rounding import MARGINS

B, T, D, V, LIMIT = 6, 24, 8, 12, 0.7
DRAWN = np.random.default_rng(3)
PARAMS = {
    name: jnp.asarray(DRAWN.normal(0, 0.5, shape), jnp.float32)
    for name, shape in {"across": (D, D), "twice": (D, D), "table": (V, D)}.items()
}
ROWS = {"x": jnp.asarray(DRAWN.normal(size=(B, T, D)), jnp.float32), "id": jnp.asarray(DRAWN.integers(0, V, (B, T)), jnp.int32)}


def loss(p, e):
    """A recurrence, a matrix used at two depths, and a table that is looked up and decoded."""
    h_TD = p["table"][e["id"]] + jnp.tanh(jnp.tanh(e["x"] @ p["twice"]) @ p["twice"])
    h_TD = jax.lax.scan(lambda h, x: (jnp.tanh(x + h @ p["across"]),) * 2, jnp.zeros(D, h_TD.dtype), h_TD)[1]
    logits_TV = h_TD @ p["table"].T
    return (jax.nn.logsumexp(logits_TV, -1) - jnp.take_along_axis(logits_TV, e["id"][:, None], -1)[:, 0]).mean()


@cache
def true_norms(rows_per_unit=1):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64) if x.dtype == np.float32 else np.asarray(x), (PARAMS, ROWS))
        gradients = jax.device_get(jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(*wide))
        units = jax.tree.map(lambda leaf: leaf.reshape(-1, rows_per_unit, *leaf.shape[1:]).sum(1), gradients)
        squares = sum(np.square(leaf).reshape(leaf.shape[0], -1).sum(1) for leaf in jax.tree.leaves(units))
        return np.sqrt(squares), units


@pytest.mark.parametrize("rows_per_unit", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sums_and_norms_are_those_of_float64(rows_per_unit):
    gradient = dpx.clipped_grad(loss, clipping_norm=LIMIT, rows_per_unit=rows_per_unit)
    assert {cost.way for taken in gradient.explain(PARAMS, ROWS) for cost in taken.costs if cost.is_taken} == {"kept"}
    norms_U, units = true_norms(rows_per_unit)
    found = jax.jit(gradient)(PARAMS, ROWS)
    np.testing.assert_allclose(found.norms, norms_U, rtol=1e-5)
    factor_U = np.minimum(1, LIMIT * (1 - MARGINS["float32"]) / norms_U)
    assert factor_U.min() < 1
    for path, leaf in units.items():
        np.testing.assert_allclose(found.total[path], np.tensordot(factor_U, leaf, 1), rtol=0, atol=1e-5 * np.abs(leaf).max())


def test_padding_and_rows_that_are_not_finite_contribute_nothing():
    poisoned = ROWS | {"x": ROWS["x"].at[1].set(jnp.nan).at[4, 3].set(jnp.inf)}
    is_padding, counts = jnp.arange(B) == 4, [True, False, True, True, False, True]
    norms_B, gradients = true_norms()
    factor_B = np.minimum(1, LIMIT * (1 - MARGINS["float32"]) / norms_B) * counts
    for kept_bytes in (1 << 20, 0):
        gradient = jax.jit(dpx.clipped_grad(loss, clipping_norm=LIMIT, kept_bytes=kept_bytes))
        found = gradient(PARAMS, poisoned, is_padding=is_padding)
        assert np.asarray(found.is_counted).tolist() == counts
        for path, leaf in gradients.items():
            np.testing.assert_allclose(found.total[path], np.tensordot(factor_B, leaf, 1), rtol=0, atol=2e-6)


def test_the_first_gradients_that_fit_are_kept():
    def kept(kept_bytes):
        # Without turns, in which they all fit.
        gradient = dpx.weighted_grad(loss, weights=jnp.ones_like, kept_bytes=kept_bytes)
        return {taken.path for taken in gradient.explain(PARAMS, ROWS) if any(cost.way == "kept" and cost.is_taken for cost in taken.costs)}

    one = 4 * B * D * D
    assert [len(kept(bytes_)) for bytes_ in (0, one - 1, one, 2 * one + 4 * B * V * D)] == [0, 0, 1, 3]
