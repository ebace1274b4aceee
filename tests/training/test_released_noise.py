"""Chi-square of the noise each parameter receives in a noise-only step: too little and too much both show, leaf by leaf."""

import jax
import numpy as np
import pytest

from dpx.audit.dirac import variance_p_value
from dpx.mechanism.noise import path_name, slice_keys
from dpx.mesh import Mesh
from dpx.optimizer import Adam
from dpx.randomness import RootSecret
from dpx.training.step import make_step

from .conftest import declare

EXPECTED, DEVIATION = 10, 0.05
# Two-sided, for all leaves together.
ERROR = 1e-6


def p_values(objective, mesh, seed=0, expected=float(EXPECTED)):
    """{parameter: p-value} of what reaches the optimiser from an empty draw, as noise of deviation DEVIATION on the sum."""
    # Without memory the first moment is the noisy mean itself.
    experiment = declare(optimizer=Adam(beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0), mesh=mesh)
    step, secret = make_step(experiment, objective, mesh.make(), 2, 2), RootSecret.from_seed(seed)
    state = step.init(np.zeros(2, np.uint32))
    keys = slice_keys(secret, 0, state["params"])
    state, _ = step.finish(state, step.zero(), keys, np.float32(DEVIATION), np.float32(EXPECTED), np.float32(0))
    found = jax.tree_util.tree_leaves_with_path(state["moments"][0].mu)
    squares = {path_name(path): float(np.sum(np.square(np.asarray(leaf, np.float64)))) for path, leaf in found}
    sizes = {path_name(path): leaf.size for path, leaf in found}
    return {name: variance_p_value(value * (expected / DEVIATION) ** 2, sizes[name]) for name, value in squares.items()}


def mesh_of(data, fsdp):
    return Mesh(name="test", data=data, fsdp=fsdp, simulated_devices=8, flops_per_s=1e10, memory_bytes=1 << 30)


@pytest.mark.parametrize("mesh", [(1, 1), pytest.param((4, 2), marks=pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8"))])
def test_every_leaf_has_the_stated_variance_once_whatever_the_mesh(micro, mesh):
    found = p_values(micro[1], mesh_of(*mesh))
    assert len(found) > 15
    assert min(found.values()) > ERROR / len(found)


def test_a_tenth_too_much_is_seen_on_every_large_leaf(micro):
    found = p_values(micro[1], mesh_of(1, 1), expected=EXPECTED * 1.1)
    assert found["embeddings/word"] < ERROR and found["layers/qkv/kernel"] < ERROR
