"""Clip weights against their closed forms."""

import jax.numpy as jnp
import numpy as np
import pytest

from dpx.mechanism.clip import Flat, Normalised, flat_weights

NORMS = jnp.asarray([0.0, 1e-20, 0.5, 2.0, 3.0, 1e19], jnp.float32)


def test_flat_scales_only_what_is_longer():
    np.testing.assert_allclose(flat_weights(2.0)(NORMS), [1, 1, 1, 1, 2 / 3, 2e-19], rtol=1e-6)


def test_normalised_brings_all_near_the_norm_and_keeps_zero_finite():
    np.testing.assert_allclose(Normalised(clipping_norm=2.0, stability=0.5).weights(2.0)(NORMS), [4, 4, 2, 0.8, 2 / 3.5, 2e-19], rtol=1e-6)


@pytest.mark.parametrize("clip", [Flat(clipping_norm=1e-3), Normalised(clipping_norm=7.0)])
def test_no_weighted_norm_exceeds_the_clipping_norm(clip):
    norms = jnp.asarray(np.random.default_rng(0).lognormal(0, 10, 10_000), jnp.float32)
    assert float(jnp.max(norms * clip.weights(clip.clipping_norm)(norms))) <= clip.clipping_norm * (1 + 3e-7)
