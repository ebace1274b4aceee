"""What crosses devices, counted in the compiled programs: nothing while microbatches are summed, each leaf once afterwards."""

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dpx.clipping import ClippingMethod
from dpx.cost.compiled import collectives
from dpx.mechanism import noise
from dpx.mechanism.noise import slice_keys
from dpx.processes.mesh import Mesh
from dpx.randomness import RootSecret, path_name
from dpx.training import sharding
from dpx.training.step import StepInputs, as_chunk, make_step

from .conftest import declare, make_rows


class Texts(NamedTuple):
    """The compiled programs of a step, and whose they are."""

    gather: str
    accumulate: str
    reduce: str
    finish: str
    params: Any
    mesh: Mesh


# Each axis that examples are split over alone, both, and a model axis beside them.
MESHES = [(8, 1, 1), (4, 2, 1), (2, 2, 2)]


@pytest.fixture(scope="module", params=MESHES, ids=["8", "4x2", "2x2x2"])
def compiled(request, micro):
    data, fsdp, tensor = request.param
    mesh = Mesh(name="m", data=data, fsdp=fsdp, tensor=tensor, flops_per_s=1e10, memory_bytes=1 << 30)
    experiment = declare(mesh=mesh, clipping_method=ClippingMethod(name="book_keeping"))
    with pytest.MonkeyPatch.context() as patch:
        # Small slices, so that the noise of most leaves is a loop as it is for a large model.
        patch.setattr(noise, "SLICE_ELEMENTS", 256)
        step = make_step(experiment.one_step, micro[1], experiment.mesh.make(), 1, 2)
        state = step.init(np.zeros(2, np.uint32), None)
        key, one = np.zeros(2, np.uint32), np.float32(1)
        inputs = StepInputs(step.gather(state.params), key, key)
        accumulate = step.accumulate.lower(step.zero(), as_chunk(make_rows(7), step), inputs)
        keys = slice_keys(RootSecret.from_seed(0), 0, state.params)
        reduce = step.reduce.lower(step.zero(), (one, one))
        finish = step.finish.lower(state, step.reduce(step.zero(), (one, one)), keys, one, one, one)
        gather = step.gather.lower(state.params)
        texts = [lowered.compile().as_text() or "" for lowered in (gather, accumulate, reduce, finish)]
        yield Texts(*texts, params=state.params, mesh=mesh)


pytestmark = [pytest.mark.slow, pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")]


def crosses_examples(found, mesh):
    """Whether devices that hold different examples meet: those of `tensor` stand next to each other."""
    return not found.groups or any(len({device // mesh.tensor for device in group}) > 1 for group in found.groups)


def test_nothing_crosses_examples_while_microbatches_are_summed(compiled):
    found = collectives(compiled.accumulate)
    assert not any(crosses_examples(one, compiled.mesh) for one in found)
    assert bool(found) == (compiled.mesh.tensor > 1)


def test_no_loop_crosses_examples(compiled):
    assert "while(" in compiled.finish
    for text in (compiled.gather, compiled.reduce, compiled.finish):
        assert not any(found.is_in_loop for found in collectives(text))


def test_parameters_are_gathered_once(compiled):
    gathered = sum(found.elements for found in collectives(compiled.gather) if found.kind == "all-gather")
    tensor, split = compiled.mesh.tensor, 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(compiled.params):
        layout = sharding.layout(path_name(path), leaf.shape, compiled.mesh.make())
        # Over fsdp to this device's part, and, of leaves that no layer splits, once more over tensor.
        split += leaf.size // (tensor if "tensor" in layout.shards else 1) if "fsdp" in layout.shards else 0
        split += leaf.size if "tensor" in layout.shards and layout.tensor_axis is None else 0
    assert gathered == split


def test_no_leaf_crosses_examples_once_it_is_reduced(compiled):
    found = [one for one in collectives(compiled.finish) if crosses_examples(one, compiled.mesh)]
    # Norms, one number a layer and parameter.
    assert sum(one.elements for one in found) < 200


def test_each_leaf_is_reduced_once(compiled):
    """Over all devices that hold examples; with fsdp a leaf is scattered and its part then reduced over data."""
    found = [one for one in collectives(compiled.reduce) if one.kind in ("all-reduce", "reduce-scatter")]
    reduced = sum(one.elements for one in found if crosses_examples(one, compiled.mesh))
    parameters, mesh = sum(leaf.size for leaf in jax.tree.leaves(compiled.params)), compiled.mesh
    expected = parameters if mesh.fsdp == 1 else parameters / mesh.fsdp * 2
    # The rest are counts and the checksum.
    assert expected / mesh.tensor <= reduced <= 1.05 * expected / mesh.tensor + 200


def test_a_collective_inside_a_loop_is_seen():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("data",))

    def summed(x):
        return jax.lax.fori_loop(0, 3, lambda _, total: jax.lax.psum(total, "data"), x)

    run = jax.shard_map(summed, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    (found,) = collectives(jax.jit(run).lower(np.ones((2, 5), np.float32)).compile().as_text() or "")
    assert (found.kind, found.elements, found.is_in_loop) == ("all-reduce", 5, True)


@pytest.mark.parametrize(
    "written",
    [
        "replica_groups={{0,1},{2,3},{4,5},{6,7}}",
        "replica_groups=[4,2]<=[8]",
        "replica_groups=[4,2]<=[2,4]T(0,1)",
        "replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_2'}",
        "source_target_pairs={{0,1},{2,3},{4,5},{6,7}}",
    ],
)
def test_who_meets_is_read_however_it_is_written(written):
    text = f"\nENTRY %main (x: f32[4]) -> f32[4] {{\n  %y = f32[4]{{0}} all-reduce(%x), channel_id=1, {written}, dimensions={{0}}\n}}\n"
    (found,) = collectives(text)
    assert found.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
