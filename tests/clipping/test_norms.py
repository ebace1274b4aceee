"""Norm forms against the gradient itself, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpx.clipping import bounds, forms, norms


def direct(a, g):
    return np.square(np.einsum("btp,btd->bpd", np.float64(a), np.float64(g))).sum((1, 2))


@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.sampled_from([1, 2, 8, 65, 130, 300, 512]), st.integers(1, 9), st.integers(1, 9), st.floats(0, 30))
def test_gram_equals_the_gradients_norm(B, T, p, d, flat):
    drawn = np.random.default_rng(B * 1000 + T)
    a = np.float32(drawn.normal(flat, 1, (B, T, p)))
    g = np.float32(drawn.normal(0, 1, (B, T, d)))
    np.testing.assert_allclose(jax.jit(norms.gram)(a, g).square, direct(a, g), rtol=1e-5)


def test_flat_activations_with_a_zero_sum_cotangent_lose_nothing():
    """The key projection's case: without centring the Gram form is off by a percent here."""
    drawn = np.random.default_rng(0)
    a = np.float32(30 + 0.1 * drawn.normal(size=(4, 128, 16)))
    g = np.float64(drawn.normal(size=(4, 128, 16)))
    g = np.float32(g - g.mean(1, keepdims=True))
    truth = direct(a, g)
    np.testing.assert_allclose(norms.gram(jnp.asarray(a), jnp.asarray(g)).square, truth, rtol=1e-5)
    naive = np.asarray(norms.symmetric(jnp.asarray(a), jnp.asarray(g))[0].square)
    assert np.abs(naive / truth - 1).max() > 1e-3


def test_norms_are_never_negative():
    a, g = jnp.ones((2, 64, 8)), jnp.ones((2, 64, 8)) * jnp.where(jnp.arange(64) % 2 == 0, 1.0, -1.0)[:, None]
    assert np.all(np.asarray(bounds.upper(norms.gram(a, g))) >= 0)


@pytest.mark.parametrize("T", [7, 100, 300])
@pytest.mark.parametrize("V", [5, 1000])
def test_repeated_tokens_add_up_before_they_are_squared(T, V):
    drawn = np.random.default_rng(T)
    ids, g = drawn.integers(0, 5, (3, T)), drawn.normal(1, 1, (3, T, 4)).astype(np.float32)
    table = np.zeros((3, V, 4))
    for b in range(3):
        np.add.at(table[b], ids[b], g[b].astype(np.float64))
    np.testing.assert_allclose(jax.jit(norms.lookup, static_argnums=2)(ids, g, V).square, np.square(table).sum((1, 2)), rtol=1e-5)


def test_a_lookup_and_a_product_over_its_table_are_squared_without_a_table_an_example():
    B, T, V, d = 2, 3, 50, 16
    shapes = ((B, T, V), (B, T, d), (B, T, d))
    arrays = [jnp.array(np.random.default_rng(seed).normal(size=shape), jnp.float32) for seed, shape in enumerate(shapes)]
    id_BT = jnp.array([[4, 4, 7], [0, 49, 0]], jnp.float32)

    def uses(a_BTV, g_BTd, rows_BTd):
        return [forms.Use(forms.Outer(a_BTV, g_BTd)), forms.Use(forms.Rows(id_BT, rows_BTd))]

    traced = jax.make_jaxpr(lambda *arrays: forms.squares(uses(*arrays), (V, d)))(*arrays)
    assert max(out.aval.size for equation in traced.jaxpr.eqns for out in equation.outvars) < V * d
    whole_BVd = sum(forms.formed(use.form, (V, d)) for use in uses(*arrays))
    found_B = jax.jit(lambda *arrays: forms.squares(uses(*arrays), (V, d)))(*arrays)
    np.testing.assert_allclose(found_B, np.sum(np.square(whole_BVd), (1, 2)), rtol=1e-5)


def test_the_cheapest_form_that_fits_is_chosen():
    assert norms.choose(20, 768, 768, True) == "gram"  # a decoder's slots: Grams cost next to nothing
    assert norms.choose(128, 128, 512, True) == "kept"
    assert norms.choose(128, 768, 3072, False) == "gram"
    assert norms.choose(512, 64, 64, False) == "recomputed"


def test_bfloat16_inputs_are_accumulated_in_float32():
    drawn = np.random.default_rng(3)
    a = jnp.asarray(drawn.normal(5, 1, (2, 128, 16)), jnp.bfloat16)
    g = jnp.asarray(drawn.normal(0, 1, (2, 128, 16)), jnp.bfloat16)
    truth = direct(np.asarray(a, np.float64), np.asarray(g, np.float64))
    np.testing.assert_allclose(norms.gram(a, g).square, truth, rtol=1e-5)
    np.testing.assert_allclose(norms.squares(norms.per_example(a, g)), truth, rtol=1e-5)
    assert norms.gram(a, g).square.dtype == jax.numpy.float32
