"""The weights of every clip against their closed forms, and what holds for any of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.mechanism.clip import AdaptiveClip, Flat, Normalised, PerLayer

NORMS = jnp.asarray([0.0, 1e-20, 1.0, 2.0, 3.0, 1e19])
CLIPS = [
    Flat(clipping_norm=2.0),
    AdaptiveClip(clipping_norm=2.0),
    Normalised(clipping_norm=2.0, stability=0.5),
    PerLayer(clipping_norm=2.0),
]


@pytest.mark.parametrize("clip", CLIPS[:2], ids=lambda clip: clip.kind)
def test_what_is_within_the_norm_stays_and_what_is_beyond_is_shortened_to_it(clip):
    np.testing.assert_allclose(clip.weights(2.0)(NORMS), [1, 1, 1, 1, 2 / 3, 2e-19], rtol=1e-6)


def test_normalised_examples_weigh_nearly_the_norm():
    np.testing.assert_allclose(CLIPS[2].weights(2.0)(NORMS), [4, 4, 4 / 3, 0.8, 2 / 3.5, 2e-19], rtol=1e-6)


def test_groups_share_the_norm():
    norms_KB = jnp.asarray([[0.5, 4.0], [2.0, 4.0], [0.0, 1.0], [1.0, 9.0]])
    np.testing.assert_allclose(CLIPS[3].weights(2.0)(norms_KB), [[1, 1 / 4], [1 / 2, 1 / 4], [1, 1], [1, 1 / 9]], rtol=1e-6)


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip.kind)
def test_no_example_is_longer_than_a_norm_that_is_known_only_when_it_runs(clip):
    norms = jnp.asarray(np.random.default_rng(0).lognormal(0, 3, (3, 200)), jnp.float32)
    norms = norms if clip.kind == "per_layer" else norms[0]

    @jax.jit
    def lengths(limit):
        clipped = norms * clip.weights(limit)(norms)
        return jnp.sqrt(jnp.sum(jnp.square(clipped), 0)) if clip.kind == "per_layer" else clipped

    assert float(jnp.max(lengths(jnp.float32(0.3)))) <= 0.3 * (1 + 3e-7)
