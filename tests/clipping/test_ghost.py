"""Ghost clipping's second pass: whatever the backward pass does with a cotangent, and whatever the weights are.

B: examples, D: width.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import ops

B, D = 3, 4
PARAMS = {"k": jnp.asarray(np.random.default_rng(0).normal(0, 1, (D, D)), jnp.float32)}
X = jnp.asarray(np.random.default_rng(1).normal(0, 1, (B, D)), jnp.float32)


def backwards(rule):
    """The identity, with this backward pass."""
    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, None), lambda _, g: (rule(g),))
    return function


RULES = {
    "sign": backwards(jnp.sign),
    "clipped": backwards(lambda g: jnp.clip(g, -0.01, 0.01)),
    "normalised": backwards(lambda g: 20 * g / jnp.maximum(jnp.abs(g).max(-1, keepdims=True), 1e-9)),
    "a_constant": backwards(jnp.ones_like),
}


# A second pass is ghost clipping's own: one rule says that the other methods have none.
CELLS = [(name, method) for name in RULES for method in ("ghost", "book_keeping", "vmap")]


@pytest.mark.parametrize(
    ("name", "method"),
    [pytest.param(*cell, marks=[pytest.mark.slow] * (cell[1] != "ghost" and cell != ("sign", "book_keeping"))) for cell in CELLS],
)
def test_a_backward_pass_that_is_not_linear_is_clipped(name, method):
    """20 at C = 1 where the clip weights were the second pass's cotangent."""
    losses = lambda p, b: jnp.sin(10 * RULES[name](ops.dense(b["x"], p["k"]))).sum(1)  # noqa: E731
    gradient = jax.jit(jax.grad(lambda p, x: losses(p, {"x": x[None]})[0]))
    own = [np.asarray(gradient(PARAMS, x)["k"], np.float64) for x in X]
    norms = [np.linalg.norm(one) for one in own]
    limit = 0.1 * float(min(norms))
    weights = lambda norms_B: limit / jnp.maximum(norms_B, limit)  # noqa: E731
    # What is a constant even of no cotangent leaves something in every row, and is refused where it is tried.
    options = {"weights": weights, "method": method, "checked": name != "a_constant"}
    found = jax.jit(lambda p, x: dpx.clipped_sum(losses, p, {"x": x}, **options))(PARAMS, X)
    np.testing.assert_allclose(found.norms_B, norms, rtol=1e-5)
    np.testing.assert_allclose(found.total["k"], sum(limit / n * one for n, one in zip(norms, own, strict=True)), atol=1e-5 * limit)


@pytest.mark.parametrize("method", ["ghost", *(pytest.param(name, marks=pytest.mark.slow) for name in ("book_keeping", "vmap"))])
def test_negative_weights_stay_beside_a_row_that_is_not_finite(method):
    x = X.at[1].set(jnp.nan)
    losses = lambda p, b: jnp.sin(ops.dense(b["x"], p["k"])).sum(1)  # noqa: E731
    weights = lambda norms_B: jnp.asarray([-1.0, 1.0, 0.5])  # noqa: E731
    found = jax.jit(lambda p, x: dpx.clipped_sum(losses, p, {"x": x}, weights=weights, method=method))(PARAMS, x)
    gradient = jax.jit(jax.grad(lambda p, x: losses(p, {"x": x[None]})[0]))
    expected = 0.5 * gradient(PARAMS, X[2])["k"] - gradient(PARAMS, X[0])["k"]
    np.testing.assert_allclose(found.total["k"], expected, atol=1e-6)
