"""Noise on the fixed grid: scale, keys, and equal bits however a parameter is sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dpx.cost.traced import compiled_temporaries
from dpx.mechanism import noise
from dpx.mechanism.noise import add_noise, gaussian, row_blocks, slice_keys
from dpx.models.shape import Bert
from dpx.randomness import RootSecret

SECRET = RootSecret.from_seed(11)


def _keys(params, step: int = 0):
    return jax.tree.map(jnp.asarray, slice_keys(SECRET, step, params))


def _noisy(total, keys, scale: float):
    """Uses a new jit each time: some tests change the slice size, and a compiled program is cached by its function and shapes."""
    return jax.jit(lambda total, keys: add_noise(total, keys, jnp.float32(scale)))(total, keys)


def _alone(keys, blocks):
    """What each key draws for its own rows, as one array of two axes."""
    drawn = jax.jit(lambda keys: [gaussian(key, *block) for key, block in zip(keys, blocks, strict=True)])(list(keys))
    return np.concatenate([np.asarray(block) for block in drawn])


def test_noise_has_the_stated_deviation_on_every_slice(monkeypatch):
    monkeypatch.setattr(noise, "SLICE_ELEMENTS", 4096)
    total = jnp.zeros((1000, 64))
    noisy, squares = _noisy(total, _keys({"w": total})["w"], 2.5)
    blocks = np.array_split(np.asarray(noisy), range(64, 1000, 64))
    for block in blocks:
        assert scipy.stats.kstest(block.ravel() / 2.5, "norm").pvalue > 1e-5
    assert float(squares) == pytest.approx(float(np.sum(np.square(np.asarray(noisy, np.float64)))), rel=1e-5)


@pytest.mark.parametrize(("shape", "counts"), [((11, 4), (3, 3, 3, 2)), pytest.param((5, 24), (1,) * 5, marks=pytest.mark.slow)])
def test_every_slice_has_the_noise_of_its_own_key(shape, counts, monkeypatch):
    monkeypatch.setattr(noise, "SLICE_ELEMENTS", 12)
    keys = _keys({"w": jnp.zeros(shape)})["w"]
    noisy, _ = _noisy(jnp.zeros(shape), keys, 2)
    np.testing.assert_allclose(noisy, 2 * _alone(keys, [(count, shape[1]) for count in counts]), rtol=1e-5)
    assert len(np.unique(noisy)) == noisy.size


def test_small_leaves_are_drawn_as_one_with_the_bits_of_their_own_keys(monkeypatch):
    monkeypatch.setattr(noise, "SLICE_ELEMENTS", 60)
    total = {
        name: jnp.zeros(shape) for name, shape in {"a": (3, 4), "b": (), "c": (2, 3, 5), "d": (7,), "e": (3, 4), "cut": (20, 6)}.items()
    }
    keys = _keys(total)
    noisy, squares = jax.jit(add_noise)(total, keys, jnp.float32(2))
    for name, leaf in total.items():
        alone = 2 * _alone(keys[name], list(row_blocks(leaf.shape)))
        np.testing.assert_array_equal(noisy[name], alone.reshape(leaf.shape))
        assert float(squares[name]) == pytest.approx(float(np.sum(np.square(alone))), rel=1e-5)


def test_noise_is_added_to_the_sum():
    total = jnp.arange(12.0).reshape(3, 4)
    keys = _keys({"w": total})["w"]
    (with_sum, _), (alone, _) = (_noisy(given, keys, 0.5) for given in (total, jnp.zeros((3, 4))))
    np.testing.assert_allclose(with_sum, total + alone, rtol=1e-6)


def test_equal_shaped_leaves_and_steps_get_other_noise():
    shape = jnp.zeros((16, 16))
    first = _keys({"a": shape, "b": shape}, step=0)
    second = _keys({"a": shape, "b": shape}, step=1)
    drawn = [np.asarray(_noisy(shape, key, 1)[0]).ravel() for key in (first["a"], first["b"], second["a"])]
    assert np.max(np.abs(np.corrcoef(drawn) - np.eye(3))) < 0.4


def test_no_two_keys_of_a_run_are_equal():
    shapes = Bert(name="t", layers=2, width=128, heads=2, feed_forward=512).parameter_shapes(30522, next_sentence=True)
    params = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}
    seen = [tuple(key) for step in range(300) for keys in slice_keys(SECRET, step, params).values() for key in keys]
    assert len(seen) == len(set(seen)) > 300 * len(shapes)


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
@pytest.mark.parametrize("shape", [*(pytest.param(shape, marks=pytest.mark.slow) for shape in ((30, 64), (24,))), (4, 6, 16), (37, 8)])
def test_bits_do_not_depend_on_the_mesh(shape, monkeypatch):
    monkeypatch.setattr(noise, "SLICE_ELEMENTS", 128)
    total = jnp.ones(shape)
    keys = _keys({"w": total})["w"]
    alone, _ = jax.jit(add_noise)(total, keys, jnp.float32(1))
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:8]).reshape(2, 4), ("data", "fsdp"))
    layout = NamedSharding(mesh, P(*([None] * (len(shape) - 1)), "fsdp"))
    sharded, _ = jax.jit(add_noise, out_shardings=(layout, NamedSharding(mesh, P())))(jax.device_put(total, layout), keys, jnp.float32(1))
    assert np.array_equal(np.asarray(alone), np.asarray(sharded))


def test_noise_of_a_base_model_needs_little_memory_of_its_own():
    """Compiled, not run: XLA would draw every leaf's bits at once if the loops did not limit it to one slice at a time."""
    shapes = Bert(name="base", layers=12, width=768, heads=12, feed_forward=3072).parameter_shapes(30_522, next_sentence=True)
    total = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}
    keys = {path: jax.ShapeDtypeStruct(key.shape, key.dtype) for path, key in slice_keys(SECRET, 0, total).items()}
    compiled = jax.jit(add_noise, donate_argnums=0).lower(total, keys, jax.ShapeDtypeStruct((), jnp.float32)).compile()
    assert compiled_temporaries(compiled) < 50 * 2**20
