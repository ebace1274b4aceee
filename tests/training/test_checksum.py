"""The checksum of what noise is added to: the same on every mesh, another for every change that an accident could make."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dpx.files.array_checksums import as_text, checksum, checksums


def _tree():
    rng = np.random.default_rng(0)
    return {
        "kernel": rng.normal(size=(2, 12, 16)).astype(np.float32),
        "bias": rng.normal(size=(16,)).astype(np.float32),
        "grid": rng.integers(-9, 9, (8, 8)).astype(np.int32),
        "norm": np.float32(0.5),
    }


def _of(tree):
    return as_text(np.asarray(jax.jit(checksum)(tree)))


def test_it_is_sixteen_digits_that_repeat():
    assert _of(_tree()) == _of(_tree()) and len(_of(_tree())) == 16


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
@pytest.mark.parametrize("axes", [(8, 1), (4, 2), (1, 8)])
def test_it_is_the_same_on_every_mesh(axes):
    mesh = jax.make_mesh(axes, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"kernel": P(None, None, ("a", "b")), "bias": P("b"), "grid": P("a", "b"), "norm": P()}
    tree = _tree()
    spread = {name: jax.device_put(leaf, NamedSharding(mesh, specs[name])) for name, leaf in tree.items()}
    assert _of(spread) == _of(tree)


def _changed(change):
    tree = _tree()
    change(tree)
    return _of(tree)


def test_every_small_change_gives_another():
    def last_bit(tree):
        tree["kernel"][1, 3, 5] = np.nextafter(tree["kernel"][1, 3, 5], np.float32(9))

    def swapped(tree):
        tree["bias"][[0, 1]] = tree["bias"][[1, 0]]

    def swapped_layers(tree):
        tree["kernel"] = tree["kernel"][::-1].copy()

    def transposed(tree):
        tree["grid"] = tree["grid"].T.copy()

    def sign_of_zero(tree):
        tree["bias"][:] = np.where(np.arange(16) == 0, np.float32(-0.0), tree["bias"])

    def zero(tree):
        tree["bias"][:] = np.where(np.arange(16) == 0, np.float32(0.0), tree["bias"])

    def other_norm(tree):
        tree["norm"] = np.float32(0.25)

    def moved_between_leaves(tree):
        tree["bias"], tree["norm"] = np.full(16, 0.5, np.float32), tree["bias"][0]

    changes = (last_bit, swapped, swapped_layers, transposed, sign_of_zero, zero, other_norm, moved_between_leaves)
    found = {_of(_tree()), *map(_changed, changes)}
    assert len(found) == len(changes) + 1


def test_sums_that_differ_only_in_both_lanes_are_not_met_by_chance():
    base = np.zeros(64, np.float32)
    found = set()
    for place in range(64):
        for value in (1.0, -1.0, 0.5):
            leaf = base.copy()
            leaf[place] = value
            found.add(_of([leaf]))
    assert len(found) == 64 * 3


def test_an_unsigned_leaf_and_a_scalar_are_taken_as_they_are():
    assert _of([jnp.uint32(5)]) != _of([jnp.uint32(6)])


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "float8_e4m3fn", "int16", "float16", "bfloat16", "int32", "float32"])
def test_a_leaf_of_any_width_is_told_from_one_with_another_bit(dtype):
    draw, found = np.random.default_rng(0), set()
    base = jnp.asarray(draw.integers(0, 2, (3, 4)), dtype)
    bits = np.asarray(base).view(np.uint8)
    flips = [(place, bit) for place in range(bits.size) for bit in ([0] if dtype == "bool" else range(8))]
    for place, bit in flips:
        other = bits.copy()
        other.flat[place] ^= 1 << bit
        found.add(_of([other.view(base.dtype)]))
    assert len(found | {_of([base])}) == len(flips) + 1


def test_64_bits_are_two_words():
    with jax.enable_x64(True):
        found = {_of([np.asarray([value, 0])]) for value in (0, 1, 1 << 32, 1 << 63 - 1)}
        assert len(found | {_of([np.asarray([1.0, 0.0])])}) == 5


def test_parts_have_checksums_of_their_own_and_one_without_leaves_has_one_too():
    found = checksums({"params": _tree(), "moments": ()})
    assert found == {"params": _of(_tree()), "moments": "0" * 16}
