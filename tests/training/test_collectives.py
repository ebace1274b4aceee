"""What crosses devices, counted in the compiled programs: nothing while microbatches are summed, each leaf once afterwards."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dpx.mechanism import noise
from dpx.mechanism.noise import slice_keys
from dpx.mesh import Mesh
from dpx.randomness import RootSecret
from dpx.training.collectives import collectives
from dpx.training.step import as_chunk, make_step

from .conftest import declare, make_rows


@pytest.fixture(scope="module", params=[(8, 1), (4, 2)], ids=["8", "4x2"])
def compiled(request, micro):
    data, fsdp = request.param
    experiment = declare(mesh=Mesh(name="m", data=data, fsdp=fsdp, flops_per_s=1e10, memory_bytes=1 << 30))
    with pytest.MonkeyPatch.context() as patch:
        # Small slices, so that the noise of most leaves is a loop as it is for a large model.
        patch.setattr(noise, "SLICE_ELEMENTS", 256)
        step = make_step(experiment, micro[1], experiment.mesh.make(), 1, 2)
        state = step.init(np.zeros(2, np.uint32))
        rows, is_padding, count = as_chunk(make_rows(9), step)
        key, one = np.zeros(2, np.uint32), np.float32(1)
        accumulate = step.accumulate.lower(step.gather(state["params"]), step.zero(), rows, is_padding, np.int32(count), key, key)
        keys = slice_keys(RootSecret.from_seed(0), 0, state["params"])
        finish = step.finish.lower(state, step.zero(), keys, one, one, one)
        sizes = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
        yield accumulate.compile().as_text(), finish.compile().as_text(), sizes, fsdp


pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")


def test_nothing_crosses_devices_while_microbatches_are_summed(compiled):
    assert collectives(compiled[0]) == []


def test_no_loop_holds_a_collective(compiled):
    assert "while(" in compiled[1]
    assert not any(found.is_in_loop for found in collectives(compiled[1]))


def test_each_leaf_is_reduced_once(compiled):
    _, text, parameters, fsdp = compiled
    reduced = sum(found.elements for found in collectives(text) if found.kind in ("all-reduce", "reduce-scatter"))
    # Once over all devices; with fsdp a leaf is scattered and its part then reduced over data. The rest are norms and counts.
    expected = parameters if fsdp == 1 else parameters / fsdp * 2
    assert expected <= reduced <= 1.05 * expected + 200


def test_a_collective_inside_a_loop_is_seen():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("data",))

    def summed(x):
        return jax.lax.fori_loop(0, 3, lambda _, total: jax.lax.psum(total, "data"), x)

    run = jax.shard_map(summed, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    (found,) = collectives(jax.jit(run).lower(np.ones((2, 5), np.float32)).compile().as_text() or "")
    assert (found.kind, found.elements, found.is_in_loop) == ("all-reduce", 5, True)
