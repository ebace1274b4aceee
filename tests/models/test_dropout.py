"""Dropout keeps the mean, drops the rate it is given, and depends on record, layer and place alone."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.models.dropout import ATTENTION, dropout, of_tokens, record_keys

KEY = jnp.asarray([0, 1], jnp.uint32)
RECORD_B = jnp.asarray([3, 8])
X = jnp.ones((2, 100, 100))


@pytest.mark.parametrize("rate", [0.1, *(pytest.param(rate, marks=pytest.mark.slow) for rate in (0.5, 0.9))])
def test_what_is_kept_is_scaled_so_that_the_mean_stays(rate):
    found = np.asarray(dropout(X, record_keys(KEY, RECORD_B), 0, 0, rate))
    kept = found != 0
    np.testing.assert_allclose(found[kept], 1 / (1 - rate), rtol=1e-6)
    # Five deviations of a share of 20,000 draws.
    assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / kept.size)


def test_nothing_is_dropped_without_a_key_or_at_rate_0():
    assert dropout(X, None, 0, 0, 0.5) is X and dropout(X, record_keys(KEY, RECORD_B), 0, 0, 0.0) is X


def test_a_record_drops_the_same_whatever_is_beside_it_and_another_elsewhere():
    def dropped(records, layer=0, site=0):
        return np.asarray(dropout(X[: len(records)], record_keys(KEY, jnp.asarray(records)), layer, site, 0.5))

    both = dropped([3, 8])
    assert np.array_equal(both[1], dropped([8])[0]) and not np.array_equal(both[0], both[1])
    for layer, site in ((1, 0), (0, 1)):
        assert not np.array_equal(both, dropped([3, 8], layer, site))


def test_a_layer_that_is_traced_drops_as_one_that_is_not():
    keys = record_keys(KEY, RECORD_B)
    found = jax.jit(lambda layer: dropout(X, keys, layer, 2, 0.5))(3)
    assert np.array_equal(found, dropout(X, keys, 3, 2, 0.5))


@pytest.mark.parametrize(
    "length_B", [pytest.param(jnp.asarray([4, 6]), marks=pytest.mark.slow), jnp.asarray([[4, 3], [6, 2]])], ids=["a text", "choices"]
)
def test_a_token_drops_the_same_whatever_its_text_is_padded_to(length_B):
    keys, texts = record_keys(KEY, RECORD_B), length_B.shape[1:]

    @functools.partial(jax.jit, static_argnums=0)
    def dropped(tokens):
        hidden = of_tokens(jnp.ones((2, tokens * math.prod(texts), 5)), keys, 0, 1, 0.5, length_B)
        probs = jnp.ones((*length_B.shape, 3, tokens, tokens))
        return hidden.reshape(*length_B.shape, tokens, 5), dropout(probs, keys, 0, ATTENTION, 0.5, probs.ndim - 2)

    (hidden, probabilities), (longer_hidden, longer_probabilities) = dropped(6), dropped(9)
    np.testing.assert_array_equal(hidden, longer_hidden[..., :6, :])
    np.testing.assert_array_equal(probabilities, longer_probabilities[..., :6, :6])
    # No two texts, heads or queries have one mask.
    rows = np.asarray(longer_probabilities).reshape(-1, 9)
    assert len(np.unique(rows, axis=0)) > 0.8 * len(rows)
    assert not texts or not np.array_equal(hidden[:, 0], hidden[:, 1])
