"""What clipping costs for nets with loops over rounds and for gathered experts (loops.py), by count: beside `vmap(grad)` with clipping."""

import jax
import pytest
from jax.interpreters import partial_eval

from dpx.clipping.readers import scan_parts
from dpx.cost.traced import matmul_flops
from tests.clipping.loops import LOOPS, ROWS
from tests.clipping.test_program_size import batched_in_loops, bodies
from tests.clipping.test_programs_cost import MOST, given, programs, temporary_bytes

# The cells of libraries are products and elementwise, as `by_hand` is.
QUICK = ("by_hand", "mamba", "experts_taken")
EACH = pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LOOPS])
# Every parameter of these is a kernel of a product, or is added where all rounds read it.
RECURRENT = [name for name in LOOPS if name.startswith(("linen", "haiku", "nnx_gru", "by_hand"))]


def both(name, count):
    subject = LOOPS[name]()
    return [count(programs.ways(subject)[way], *given(subject)) for way in ("vmap", "dpx")]


@EACH
def test_flops_beside_a_gradient_of_each_example(name):
    by_vmap, ours = both(name, matmul_flops)
    assert ours <= MOST * by_vmap


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_temporaries_beside_a_gradient_of_each_example(name):
    by_vmap, ours = both(name, temporary_bytes)
    assert ours <= MOST * by_vmap


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_rounds_of_cells_of_libraries_multiply_all_examples_by_one_kernel(name):
    subject = LOOPS[name]()
    assert batched_in_loops(jax.make_jaxpr(programs.ways(subject)["dpx"])(*given(subject)).jaxpr) == 0


def constants_of_loops(jaxpr):
    """The shapes of what every round of a loop is given."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield from (var.aval.shape for var in eqn.invars[: scan_parts(eqn)[0]])
        for body in bodies(eqn):
            yield from constants_of_loops(body)


def test_kernels_of_which_a_round_reads_one_are_not_copied_for_all_rounds():
    subject = LOOPS["experts_in_turn"]()
    jaxpr = jax.make_jaxpr(programs.ways(subject)["dpx"])(*given(subject)).jaxpr
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    found = set(constants_of_loops(live))
    assert subject.shapes["up"] in found and (ROWS, *subject.shapes["up"]) not in found


# Kernels by number are compared with float64 in test_parts.py, cells in test_drawn_loops.py.
@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_sums_are_those_of_float64(name):
    assert programs.error(LOOPS[name]()) < 1e-5
