"""How the programs of `dpx.clipped_grad` grow with depth, by lines and equations and not by seconds.

T: positions, D: width, F: width between.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core

import dpx
from tests.clipping.test_programs_cost import programs

T, D, F = 64, 128, 256
# The default memory keeps the gradients of this many rows for about seven layers of a Llama; the norms of the others take other ways.
ROWS = 16
MOST_BESIDE_GRAD, MOST_FOR_THREE_TIMES_THE_DEPTH = 3.0, 3.3


def llama(layers, **options):
    return programs.llama(T=T, V=512, H=D, A=4, F=F, layers=layers, **options)


def residual(layers):
    """Two products and a gain a layer: little to trace."""
    shapes = {f"{name}_{at}": shape for at in range(layers) for name, shape in {"up": (D, F), "down": (F, D), "gain": (D,)}.items()}

    def loss(p, x):
        for at in range(layers):
            x = x + jnp.tanh(programs.scaled(x, p[f"gain_{at}"]) @ p[f"up_{at}"]) @ p[f"down_{at}"]
        return jnp.square(x).sum()

    return programs.Subject(loss, shapes, (T, D), ROWS)


def scanned(layers):
    shapes = {"up": (layers, D, F), "down": (layers, F, D), "gain": (layers, D), "shared": (D, D)}

    def loss(p, x):
        layer = lambda x, q: (x + jnp.tanh(programs.scaled(x, q["gain"]) @ q["up"]) @ q["down"] + jnp.sin(x @ p["shared"]), None)  # noqa: E731
        return jnp.square(jax.lax.scan(layer, x, {name: p[name] for name in ("up", "down", "gain")})[0]).sum()

    return programs.Subject(loss, shapes, (T, D), ROWS)


def equations(jaxpr, seen):
    """Those of a program, with a body that several equations call counted once."""
    if id(jaxpr) in seen:
        return 0
    seen[id(jaxpr)] = jaxpr
    return len(jaxpr.eqns) + sum(equations(body, seen) for eqn in jaxpr.eqns for body in bodies(eqn))


def bodies(eqn):
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: isinstance(leaf, core.ClosedJaxpr | core.Jaxpr)):
        if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
            yield value.jaxpr if isinstance(value, core.ClosedJaxpr) else value


def size(subject, way, **options):
    """(lines, equations) of the traced program."""
    given = jax.eval_shape(subject.params), jax.eval_shape(subject.batch)
    ours = lambda p, b: dpx.clipped_grad(subject.loss, clipping_norm=1.0, **options)(p, b).total  # noqa: E731
    traced = jax.jit(ours if way == "dpx" else programs.ways(subject)[way]).trace(*given)
    return traced.lower().as_text().count("\n"), equations(traced.jaxpr.jaxpr, {})


def of_two_more_layers(**options):
    """Lines and equations that they add."""
    few, many = (size(residual(layers), "dpx", **options) for layers in (2, 4))
    return [b - a for a, b in zip(few, many, strict=True)]


# What a layer adds here, and a loop over layers below, are what the lines of a whole model, which are slow, grow by.
def test_layers_past_what_memory_keeps_add_hardly_more_than_layers_before_it():
    """Each layer whose norm is of products between positions is a call of a program that is written down once."""
    kept = of_two_more_layers(kept_bytes=2**40)
    of_products = of_two_more_layers(kept_bytes=0)
    assert all(b <= 1.25 * a for a, b in zip(kept, of_products, strict=True))


@pytest.mark.slow
def test_lines_of_a_llama_beside_a_gradient():
    ours, plain = (size(llama(4), way) for way in ("dpx", "plain"))
    assert ours[0] <= MOST_BESIDE_GRAD * plain[0]


@pytest.mark.slow
def test_lines_of_a_scanned_llama_beside_a_gradient():
    """With 48 layers most gradients no longer fit into the default memory."""
    few, many = (size(llama(layers, is_scanned=True), "dpx")[0] for layers in (8, 48))
    plain = size(llama(8, is_scanned=True), "plain")[0]
    assert max(few, many) <= MOST_BESIDE_GRAD * plain and many <= 1.2 * few


@pytest.mark.parametrize("kept_bytes", [0, pytest.param(2**40, marks=pytest.mark.slow)], ids=["of_products", "kept"])
def test_a_loop_over_layers_is_as_long_for_any_number_of_them(kept_bytes):
    few, many = (size(scanned(layers), "dpx", kept_bytes=kept_bytes) for layers in (8, 48))
    assert few == many


def batched_in_loops(jaxpr, is_inside=False):
    """The number of products in loops that have a factor of its own for each example."""
    found = 0
    for eqn in jaxpr.eqns:
        found += is_inside and eqn.primitive.name == "dot_general" and any(eqn.params["dimension_numbers"][1])
        found += sum(batched_in_loops(body, is_inside or eqn.primitive.name == "scan") for body in bodies(eqn))
    return found


@pytest.mark.parametrize("name", ["lstm", pytest.param("gates", marks=pytest.mark.slow)])
def test_the_rounds_of_a_recurrent_net_multiply_all_examples_by_one_kernel(name):
    subject = programs.SUBJECTS[name]()
    given = jax.eval_shape(subject.params), jax.eval_shape(subject.batch)
    counts = {way: batched_in_loops(jax.make_jaxpr(programs.ways(subject)[way])(*given).jaxpr) for way in ("plain", "dpx")}
    assert counts == {"plain": 0, "dpx": 0}


@pytest.mark.slow
def test_lines_of_a_llama_of_many_layers_beside_a_gradient():
    ours = {layers: size(llama(layers), "dpx") for layers in (8, 16, 24, 48)}
    plain = {layers: size(llama(layers), "plain") for layers in ours}
    assert all(ours[layers][0] <= MOST_BESIDE_GRAD * plain[layers][0] for layers in ours)
    for few, many in ((8, 24), (16, 48)):
        assert all(b <= MOST_FOR_THREE_TIMES_THE_DEPTH * a for a, b in zip(ours[few], ours[many], strict=True))


@pytest.mark.slow
def test_lines_of_a_residual_net_of_many_layers_beside_a_gradient():
    ours = {layers: size(residual(layers), "dpx")[0] for layers in (8, 24, 48)}
    assert all(ours[layers] <= MOST_BESIDE_GRAD * size(residual(layers), "plain")[0] for layers in ours)
    assert ours[24] <= MOST_FOR_THREE_TIMES_THE_DEPTH * ours[8]
