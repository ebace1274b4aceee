"""What clipping costs for models of many kinds (experiments/benchmarks/programs.py), by count: beside `vmap(grad)` with clipping."""

import importlib.util
from pathlib import Path

import jax
import pytest

from dpx.cost.traced import matmul_flops, temporary_bytes

PATH = Path(__file__).parents[2] / "experiments" / "benchmarks" / "programs.py"
# The most that a clipped sum may cost beside `vmap(grad)` with clipping, in FLOPs and in temporaries.
MOST = 1.3
spec = importlib.util.spec_from_file_location("programs", PATH)
assert spec is not None and spec.loader is not None
programs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(programs)


def given(subject):
    return jax.eval_shape(subject.params), jax.eval_shape(subject.batch)


@pytest.mark.parametrize("name", programs.SUBJECTS)
def test_flops_beside_a_gradient_of_each_example(name):
    subject = programs.SUBJECTS[name]()
    ways = programs.ways(subject)
    by_vmap, ours = (matmul_flops(ways[way], *given(subject)) for way in ("vmap", "dpx"))
    assert ours <= MOST * by_vmap


@pytest.mark.slow
@pytest.mark.parametrize("name", programs.SUBJECTS)
def test_temporaries_beside_a_gradient_of_each_example(name):
    subject = programs.SUBJECTS[name]()
    ways = programs.ways(subject)
    by_vmap, ours = (temporary_bytes(ways[way], *given(subject)) for way in ("vmap", "dpx"))
    assert ours <= MOST * by_vmap


@pytest.mark.slow
@pytest.mark.parametrize("name", programs.SUBJECTS)
def test_sums_are_those_of_float64(name):
    assert programs.error(programs.SUBJECTS[name]()) < 1e-5
