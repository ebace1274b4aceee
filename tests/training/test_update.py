"""Algorithm 1 of Anil et al. 2021 against the same lines written in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.optimizer import Adam
from dpx.training import update


def _numpy_algorithm(params, gradients, rates, beta1, beta2, xi, decay):
    theta = {name: value.astype(np.float64) for name, value in params.items()}
    m = {name: np.zeros_like(value) for name, value in theta.items()}
    v = {name: np.zeros_like(value) for name, value in theta.items()}
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        for name in theta:
            m[name] = beta1 * m[name] + (1 - beta1) * gradient[name]
            v[name] = beta2 * v[name] + (1 - beta2) * gradient[name] ** 2
            m_hat, v_hat = m[name] / (1 - beta1**t), v[name] / (1 - beta2**t)
            theta[name] = theta[name] - rate * (m_hat / (np.sqrt(v_hat) + xi) + decay[name] * theta[name])
    return theta


@pytest.mark.parametrize("mask", ["bert", "none"])
def test_update_is_algorithm_one(mask):
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(4, 3)), "bias": rng.normal(size=3), "scale": np.ones(3)}
    # Gradients of the size a clipping norm of 3e-3 leaves: a large xi would swallow them.
    gradients = [{name: 1e-8 * rng.normal(size=value.shape) for name, value in params.items()} for _ in range(5)]
    rates = [1e-3, 2e-3, 3e-3, 2e-3, 1e-3]
    optimizer = Adam(beta1=0.75, beta2=0.9, eps=1e-11, weight_decay=1.0, decay_mask=mask)
    decay = {"kernel": 1.0, "bias": float(mask == "none"), "scale": float(mask == "none")}

    transform = update.transformation(optimizer)
    got = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)
    moments = transform.init(got)
    for gradient, rate in zip(gradients, rates, strict=True):
        direction, moments = transform.update(jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), gradient), moments, got)
        got = update.apply(got, direction, jnp.float32(rate))

    wanted = _numpy_algorithm(params, gradients, rates, 0.75, 0.9, 1e-11, decay)
    for name in params:
        np.testing.assert_allclose(got[name], wanted[name], rtol=2e-5, atol=1e-6)


def test_one_step_moves_by_the_rate_times_the_sign_less_decay():
    optimizer = Adam(beta1=0.9, beta2=0.99, eps=1e-11, weight_decay=0.5, decay_mask="none")
    transform = update.transformation(optimizer)
    params = {"kernel": jnp.full((2,), 2.0)}
    direction, _ = transform.update({"kernel": jnp.asarray([3e-4, -3e-4])}, transform.init(params), params)
    np.testing.assert_allclose(
        update.apply(params, direction, jnp.float32(0.1))["kernel"], [2.0 - 0.1 * (1 + 1), 2.0 - 0.1 * (-1 + 1)], rtol=1e-5
    )
