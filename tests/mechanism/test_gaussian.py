"""The Gaussian draws: moments, tail, and independence of the slice they fall in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from dpx.mechanism.mechanism_protocol import REACH
from dpx.mechanism.noise import _minus_log_uniform, gaussian

# Optimised, which the tests' other programs are not: millions of draws take longer than that.
_COMPILED = jax.jit(gaussian, static_argnums=(1, 2), compiler_options={"xla_backend_optimization_level": 3})


def _draws(key: tuple[int, int], rows: int, columns: int) -> np.ndarray:
    return np.asarray(_COMPILED(jnp.asarray(key, jnp.uint32), rows, columns), np.float64)


def test_draws_are_standard_normal():
    values = _draws((1, 2), 1024, 1024).ravel()
    assert scipy.stats.kstest(values, "norm").pvalue > 1e-4
    assert abs(values.mean()) < 5 / np.sqrt(values.size)
    assert abs(values.var() - 1) < 5 * np.sqrt(2 / values.size)


def test_tail_mass_beyond_four_sigma():
    values = _draws((3, 4), 2048, 4096)
    expected = 2 * scipy.stats.norm.sf(4.0) * values.size
    assert abs(np.sum(np.abs(values) > 4.0) - expected) < 5 * np.sqrt(expected)


@pytest.mark.parametrize(
    ("high", "low", "uniform"),
    [(0, 0, 0.5 / 2**64), (0, 1, 1.5 / 2**64), (1, 0, (2**32 + 0.5) / 2**64), (2**31 - 1, 2**32 - 1, 0.5), (2**31, 0, 0.5)],
)
def test_radius_is_exact_where_float32_uniforms_give_up(high: int, low: int, uniform: float):
    got = float(_minus_log_uniform(jnp.full((1, 1), high, jnp.uint32), jnp.full((1, 1), low, jnp.uint32))[0, 0])
    assert got == pytest.approx(-np.log(uniform), rel=3e-6)


def test_the_largest_uniform_gives_the_smallest_radius():
    words = jnp.full((1, 1), 2**32 - 1, jnp.uint32)
    assert 0 < float(_minus_log_uniform(words, words)[0, 0]) == pytest.approx(0.5 / 2**64, rel=1e-5, abs=0)


def test_draws_reach_past_eight_sigma():
    zero = jnp.zeros((1, 1), jnp.uint32)
    assert np.sqrt(2 * float(_minus_log_uniform(zero, zero)[0, 0])) > REACH > 8


def test_same_key_same_bits_other_key_other_bits():
    first, again, other = _draws((5, 6), 7, 33), _draws((5, 6), 7, 33), _draws((5, 7), 7, 33)
    assert np.array_equal(first, again)
    assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.35


def test_the_two_halves_of_a_pair_are_uncorrelated():
    values = _draws((8, 9), 1024, 1024)
    first, second = values[:512].ravel(), values[512:].ravel()
    assert abs(np.mean(first * second)) < 5 / np.sqrt(first.size)
    assert abs(np.mean(first**2 * second**2) - 1) < 20 / np.sqrt(first.size)


def test_an_odd_number_of_rows_is_cut_not_padded():
    assert jax.eval_shape(lambda k: gaussian(k, 5, 3), jax.ShapeDtypeStruct((2,), jnp.uint32)).shape == (5, 3)
