"""What crosses devices, counted in the compiled programs: nothing while microbatches are summed, each leaf once afterwards."""

import re

import jax
import numpy as np
import pytest

from dpx.mechanism import noise
from dpx.mechanism.noise import slice_keys
from dpx.mesh import Mesh
from dpx.randomness import RootSecret
from dpx.training.step import as_chunk, make_step

from .conftest import declare, make_rows

COLLECTIVE = re.compile(r"= (.*?) (all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(?:-start)?\(")
ARRAY = re.compile(r"f32\[([\d,]*)\]")


def _computations(text: str) -> dict[str, str]:
    """The bodies of a compiled module's computations by name."""
    parts = re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \(.*\) -> .* \{\n)", text)
    return {match.group(1): part for part in parts if (match := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", part))}


def _inside_loops(text: str) -> list[str]:
    """Collectives of every computation that a loop's body or condition reaches."""
    bodies = _computations(text)
    reached, waiting = set(), re.findall(r"(?:body|condition)=%?([\w.\-]+)", text)
    while waiting:
        name = waiting.pop()
        if name in bodies and name not in reached:
            reached.add(name)
            waiting += re.findall(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)", bodies[name])
    return [kind for name in reached for _, kind in COLLECTIVE.findall(bodies[name])]


def _elements(shapes: str) -> int:
    return sum(int(np.prod([int(n) for n in dims.split(",") if n])) for dims in ARRAY.findall(shapes))


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
    assert COLLECTIVE.findall(compiled[0]) == []


def test_no_loop_holds_a_collective(compiled):
    assert "while(" in compiled[1]
    assert _inside_loops(compiled[1]) == []


def test_each_leaf_is_reduced_once(compiled):
    _, text, parameters, fsdp = compiled
    reduced = sum(_elements(shapes) for shapes, kind in COLLECTIVE.findall(text) if kind in ("all-reduce", "reduce-scatter"))
    # Once over all devices; with fsdp a leaf is scattered and its part then reduced over data. The rest are norms and counts.
    expected = parameters if fsdp == 1 else parameters / fsdp * 2
    assert expected <= reduced <= 1.05 * expected + 200
