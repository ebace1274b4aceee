"""What clipping costs for models of many kinds (experiments/benchmarks/programs.py), by count: beside `vmap(grad)` with clipping."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.cost.traced import compiled_temporaries, matmul_flops

PATH = Path(__file__).parents[2] / "experiments" / "benchmarks" / "programs.py"
# The most that a clipped sum may cost beside `vmap(grad)` with clipping, in FLOPs and in temporaries.
MOST = 1.3
# The compiler's own options, which tests compile without: a user's program has them, and how it is fused decides on its temporaries.
AS_USERS_COMPILE = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True, "xla_cpu_parallel_codegen_split_count": 32}
spec = importlib.util.spec_from_file_location("programs", PATH)
assert spec is not None and spec.loader is not None
programs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(programs)


def temporary_bytes(function, *arguments):
    return compiled_temporaries(jax.jit(function).lower(*arguments).compile(AS_USERS_COMPILE))


def given(subject):
    return jax.eval_shape(subject.params), jax.eval_shape(subject.batch)


# Kernels of rounds are in test_loops_cost.py; what layers of a transformer cost is in test_cost.py.
QUICK = ("experts",)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in programs.SUBJECTS])
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


def drawn_program(seed):
    """A model nobody chose: a few layers of drawn kinds and widths on a text of drawn length, and a head that may be tied."""
    draw = np.random.default_rng(seed)
    one_of = lambda *values: values[int(draw.integers(len(values)))]  # noqa: E731
    T, V, width = one_of(16, 64, 256), one_of(64, 1024, 4096), one_of(16, 64, 256)
    shapes, steps, start = {"word": (V, width)}, [], width

    def add(kind, *of_shapes):
        names = [f"{kind}_{len(steps)}_{at}" for at in range(len(of_shapes))]
        shapes.update(zip(names, of_shapes, strict=True))
        steps.append((kind, names))

    for _ in range(draw.integers(1, 5)):
        kind, out = one_of("dense", "convolved", "recurrent", "experts", "gain", "twice", "pooled"), one_of(16, 64, 256)
        if kind in ("dense", "pooled"):
            add(kind, (width, out))
        elif kind == "convolved":
            add(kind, (one_of(3, 5), width, out))
        elif kind == "recurrent":
            add(kind, (width, out), (out, out))
        elif kind == "experts":
            add(kind, (width, 3), (3, width, out))
        else:
            add(kind, (width,) if kind == "gain" else (width, width))
        width = width if kind in ("gain", "twice") else out
    if width != start or draw.random() < 0.5:
        shapes["head"] = (width, V)

    def loss(p, id_T):
        x = p["word"][id_T]
        for kind, names in steps:
            x = LAYERS[kind](x, *(p[name] for name in names))
        head = p["head"] if "head" in p else p["word"].T
        return programs.cross_entropy((x @ head)[:-1], id_T[1:])

    return programs.Subject(loss, shapes, (T,), 8, ids=V)


def convolved(x, kernel):
    return jnp.tanh(jax.lax.conv_general_dilated(x[None], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))[0])


def recurrent(x, into, across):
    def cell(h, x):
        h = jnp.tanh(x @ into + h @ across)
        return h, h

    return jax.lax.scan(cell, jnp.zeros(across.shape[0]), x)[1]


LAYERS = {
    "dense": lambda x, kernel: jnp.tanh(x @ kernel),
    "pooled": lambda x, kernel: x @ kernel + jnp.tanh(x.mean(0) @ kernel),
    "convolved": convolved,
    "recurrent": recurrent,
    "experts": lambda x, router, up: jnp.einsum("te,etf->tf", jax.nn.softmax(x @ router), jnp.einsum("td,edf->etf", x, up)),
    "gain": programs.scaled,
    "twice": lambda x, kernel: jnp.tanh(jnp.tanh(x @ kernel) @ kernel),
}


def judged(count, seeds):
    """Returns which of the drawn programs cost more than they may by one count."""
    over = {}
    for seed in seeds:
        subject = drawn_program(seed)
        ways = programs.ways(subject)
        by_vmap, ours = (count(ways[way], *given(subject)) for way in ("vmap", "dpx"))
        if ours > MOST * by_vmap:
            over[seed] = round(ours / by_vmap, 2)
    return over


def test_flops_of_parameters_with_several_uses_and_in_loops():
    assert judged(matmul_flops, (39,)) == {}


@pytest.mark.slow
def test_flops_of_a_hundred_drawn_programs():
    assert judged(matmul_flops, range(100)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("tens", range(10))
def test_temporaries_of_a_hundred_drawn_programs(tens):
    assert judged(temporary_bytes, range(10 * tens, 10 * tens + 10)) == {}


def beaten(subject, kept_bytes):
    """The parameters that `vmap` computes at a lower cost, or with fewer FLOPs and no more bytes, as `explain` counts them."""
    found = {}
    for taken in dpx.clipped_grad(subject.loss, clipping_norm=1.0, kept_bytes=kept_bytes).explain(*given(subject)):
        (vmap,) = (cost for cost in taken.costs if cost.way == "vmap")
        ours = [cost for cost in taken.costs if cost.is_taken]
        flops, held, cost = (sum(getattr(way, count) for way in ours) for count in ("flops", "bytes", "cost"))
        if cost > vmap.cost or (flops > vmap.flops and held >= vmap.bytes):
            found[taken.path] = [way.way for way in ours]
    return found


# Each form of a reader is in test_route_costs.py.
@pytest.mark.slow
@pytest.mark.parametrize("kept_bytes", [0, 2**20, 72 * 2**20])
@pytest.mark.parametrize("fives", range(20))
def test_no_way_is_taken_that_costs_more_than_vmap_whatever_memory_there_is(fives, kept_bytes):
    assert {seed: found for seed in range(5 * fives, 5 * fives + 5) if (found := beaten(drawn_program(seed), kept_bytes))} == {}
