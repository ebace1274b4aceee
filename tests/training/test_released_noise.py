"""Chi-square of the noise each parameter receives in a noise-only step: too little and too much both show, leaf by leaf."""

import functools

import jax
import numpy as np
import pytest

from dpx.mechanism.noise import slice_keys
from dpx.optimizer import Adam
from dpx.processes.mesh import Mesh
from dpx.randomness import RootSecret, path_name
from dpx.training.dirac import variance_p_value
from dpx.training.step import make_step

from .conftest import declare

EXPECTED, DEVIATION = 10, 0.05
# Two-sided, for all leaves together.
ERROR = 1e-6


@functools.cache
def released(objective, mesh, seed=0):
    """{parameter: what reaches the optimiser from an empty draw, with noise of deviation DEVIATION on the sum}."""
    # Without memory the first moment is the noisy mean itself.
    experiment = declare(optimizer=Adam(beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0), mesh=mesh)
    step, secret = make_step(experiment.one_step, objective, mesh.make(), 2, 2), RootSecret.from_seed(seed)
    state = step.init(np.zeros(2, np.uint32), None)
    keys = slice_keys(secret, 0, state.params)
    state, _ = step.finish(state, step.reduce(step.zero(), ()), keys, np.float32(DEVIATION), np.float32(EXPECTED), np.float32(0))
    return {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state.moments[0].mu)}


def p_values(objective, mesh, expected=float(EXPECTED)):
    """{parameter: p-value} of the noise that was released."""
    squares = {name: float(np.sum(np.square(np.float64(leaf)))) for name, leaf in released(objective, mesh).items()}
    return {
        name: variance_p_value(value * (expected / DEVIATION) ** 2, released(objective, mesh)[name].size) for name, value in squares.items()
    }


def mesh_of(data, fsdp, tensor):
    return Mesh(name="test", data=data, fsdp=fsdp, tensor=tensor, simulated_devices=8, flops_per_s=1e10, memory_bytes=1 << 30)


needs_8 = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
ON_EIGHT = [pytest.param((4, 2, 1), marks=[needs_8, pytest.mark.slow]), pytest.param((2, 2, 2), marks=needs_8)]


@pytest.mark.parametrize("mesh", [(1, 1, 1), *ON_EIGHT])
def test_every_leaf_has_the_stated_variance_once_whatever_the_mesh(micro, mesh):
    found = p_values(micro[1], mesh_of(*mesh))
    assert len(found) > 15
    assert min(found.values()) > ERROR / len(found)


def test_a_tenth_too_much_is_seen_on_every_large_leaf(micro):
    found = p_values(micro[1], mesh_of(1, 1, 1), expected=EXPECTED * 1.1)
    assert found["embeddings/word"] < ERROR and found["layers/qkv/kernel"] < ERROR


@pytest.mark.parametrize("mesh", ON_EIGHT)
def test_released_noise_has_the_same_bits_on_every_mesh(micro, mesh):
    found, alone = released(micro[1], mesh_of(*mesh)), released(micro[1], mesh_of(1, 1, 1))
    assert all(np.array_equal(found[name], alone[name]) for name in alone)
