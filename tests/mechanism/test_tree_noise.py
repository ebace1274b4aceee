"""`dpx.add_noise`: independent draws of the stated deviation in every number, and nothing but one key, one sum and one deviation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.declaration import ConfigError
from dpx.mechanism import noise

KEY = jax.random.key(3)
# One leaf of several slices, small ones drawn as one, and one number.
SUM = {"large": jnp.zeros((3, noise.SLICE_ELEMENTS // 2 + 1)), "small": [jnp.ones((40, 50)), jnp.ones(7)], "one": jnp.float32(2)}


def test_every_number_gets_noise_of_that_deviation_and_no_two_the_same():
    noisy = jax.jit(lambda key, stddev: dpx.add_noise(key, SUM, stddev=stddev))(KEY, 0.5)
    assert jax.tree.structure(noisy) == jax.tree.structure(SUM)
    drawn = np.concatenate([np.ravel(a - b) for a, b in zip(jax.tree.leaves(noisy), jax.tree.leaves(SUM), strict=True)])
    assert np.std(drawn) == pytest.approx(0.5, rel=0.01) and abs(np.mean(drawn)) < 0.005
    rows = np.asarray(noisy["large"])
    correlations = np.corrcoef(rows) - np.eye(3)
    assert np.abs(correlations).max() < 0.02
    assert 4.0 < np.abs(drawn / 0.5).max() < 9.5


def test_the_draws_follow_the_key_and_nothing_else():
    total = {"a": jnp.zeros((5, 5)), "b": jnp.zeros((5, 5))}
    first, raw = dpx.add_noise(KEY, total, stddev=1), dpx.add_noise(jax.random.key_data(KEY), total, stddev=np.float32(1))
    other = dpx.add_noise(jax.random.fold_in(KEY, 1), total, stddev=1.0)
    np.testing.assert_array_equal(first["a"], raw["a"])
    assert not np.isin(other["a"], first["a"]).any() and not np.isin(first["b"], first["a"]).any()


GRADIENTS = dpx.ClippedGradients(SUM, jnp.ones(2), jnp.ones(2), {}, jnp.ones(2, bool))
REFUSED = {
    "the_whole_result": ((KEY, GRADIENTS, 1.0), "^the sum: is the whole result of a clipped gradient"),
    "nothing": ((KEY, {}, 1.0), "^the sum: contains no array"),
    "a_number": ((KEY, {"a": 1.0}, 1.0), "^a: is a float and not an array"),
    "a_narrow_sum": ((KEY, {"a": jnp.zeros(3, jnp.bfloat16)}, 1.0), "^a: is of type bfloat16"),
    "a_seed": ((3, SUM, 1.0), "^the key: is of type int and not a random key"),
    "several_keys": ((jax.random.split(KEY), SUM, 1.0), r"^keys of shape \(2,\): are several keys, but one key is needed"),
    "another_generator": ((jax.random.key(0, impl="rbg"), SUM, 1.0), "^the key: is a key of the generator rbg"),
    "floats_for_a_key": ((jnp.zeros(2), SUM, 1.0), "^the key: is an array .* of type float32"),
    "no_noise": ((KEY, SUM, 0.0), "^stddev=0.0: must be finite and above zero"),
    "negative_noise": ((KEY, SUM, -1.0), "^stddev=-1.0: must be finite and above zero"),
    "nan": ((KEY, SUM, math.nan), "^stddev=nan: must be finite and above zero"),
    "a_word": ((KEY, SUM, "1"), "^stddev='1': is not one real number"),
    "a_tree": ((KEY, SUM, jnp.ones(2)), "is not one real number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_in_one_line(name):
    (key, total, stddev), message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        dpx.add_noise(key, total, stddev=stddev)
