"""The forward pass of DP-FP: norms, the exact derivative of the clip, and padding that contributes exactly zero."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx_papers.du2021.forward import clipped_rows, head_losses, mean_over_rows, noisy_rows

H_BH = np.array([[3.0, 4.0, 0.0], [0.1, 0.2, -0.2], [0.0, 0.0, 0.0]])


def test_long_rows_get_the_norm_and_short_ones_stay() -> None:
    found_BH = np.asarray(clipped_rows(jnp.asarray(H_BH), 1.0))
    assert found_BH[0] == pytest.approx([0.6, 0.8, 0.0], rel=1e-6)
    assert np.array_equal(found_BH[1:], H_BH[1:].astype(np.float32))


def test_the_derivative_of_the_clip_is_exact() -> None:
    with jax.enable_x64(True):
        jacobian_BHBH = np.asarray(jax.jacobian(lambda h_BH: clipped_rows(h_BH, 2.0))(jnp.asarray(H_BH)))
        unit_H = H_BH[0] / 5
        expected = {0: 2.0 / 5 * (np.eye(3) - np.outer(unit_H, unit_H)), 1: np.eye(3), 2: np.eye(3)}
        for row, jacobian_HH in expected.items():
            assert jacobian_BHBH[row, :, row] == pytest.approx(jacobian_HH, abs=1e-12)


def test_noise_is_scaled_by_the_clipping_norm() -> None:
    noise_BH = np.ones_like(H_BH)
    found_BH = np.asarray(noisy_rows(jnp.asarray(H_BH), jnp.asarray(noise_BH), 0.5, 3.0) - clipped_rows(jnp.asarray(H_BH), 0.5))
    assert found_BH == pytest.approx(np.full_like(H_BH, 1.5), rel=1e-6)


def test_padding_contributes_exactly_zero() -> None:
    kernel_HK, bias_K, is_row_B = jnp.ones((3, 2)).at[0, 0].set(2.0), jnp.zeros(2), jnp.array([True, True, False])

    def loss(h_BH: Any) -> Any:
        return mean_over_rows(head_losses(kernel_HK, bias_K, clipped_rows(h_BH, 1.0), jnp.array([0, 1, 1])), is_row_B)

    other_BH = H_BH.copy()
    other_BH[2] = 7.0
    one, two = (jax.value_and_grad(loss)(jnp.asarray(rows)) for rows in (H_BH, other_BH))
    assert one[0] == two[0] and np.all(np.asarray(two[1])[2] == 0) and np.array_equal(one[1][:2], two[1][:2])
    assert float(mean_over_rows(jnp.ones(3), jnp.zeros(3, bool))) == 0.0
