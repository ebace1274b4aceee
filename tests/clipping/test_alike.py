"""Kernels that are computed from parameters and constants alone: exact beside float64, and read from one array by all examples.

T: rounds, D: width.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.cost.traced import matmul_flops
from tests.clipping.test_parts import LIMIT, ROWS, WAYS, D, assert_exact, loss_of, params_of
from tests.clipping.test_program_size import batched_in_loops
from tests.clipping.test_programs_cost import MOST, temporary_bytes

SQUARE, CELL = {"kernel": (D, D)}, {"into": (D, D), "across": (D, D)}


def cell_with(kernel):
    """A recurrent net whose kernel is `kernel(p, x)` of its parameters and of the round's input."""

    def run(p, x):
        def cell(h, x):
            h = jnp.tanh(x @ p["into"] + h @ kernel(p, x))
            return h, h

        return jax.lax.scan(cell, jnp.zeros(x.shape[1], x.dtype), x)[1]

    return run


def masked(kernel):
    return kernel * (np.arange(kernel.size).reshape(kernel.shape) % 3 > 0).astype(kernel.dtype)


def normalised(p, *_):
    return p["across"] / jnp.linalg.norm(p["across"], axis=0) * p["gain"]


def dropped(p, *_):
    # The same numbers in float64.
    keep = jax.random.bernoulli(jax.random.key(3), jnp.float32(0.8), p["across"].shape)
    return jnp.where(keep, p["across"] / 0.8, 0)


def of_round(p, x):
    """A number of each round, from an array and from the number of the round."""

    def cell(carried, given):
        (i, h), (scale, x) = carried, given
        h = jnp.tanh(h @ (p["across"] * scale) + x @ (p["into"] / (i + 1)))
        return (i + 1, h), h

    return jax.lax.scan(cell, (0, x[0]), (jnp.linspace(0.5, 1, len(x), dtype=x.dtype), x))[1]


def normalised_outside(p, x):
    kernel = normalised(p)
    return jax.lax.scan(lambda h, x: ((y := jnp.tanh(x @ p["into"] + h @ kernel)), y), x[0], x)[1]


def by_number(p, x):
    """A layer by the number of the round, times two, and one by a number of the example."""

    def layer(i, x):
        own = jax.lax.dynamic_index_in_dim(p["layers"] * 0.5, (x[0, 0] > 0).astype(jnp.int32), keepdims=False)
        return jnp.tanh(x @ (p["layers"][i % 3] * 2) + x @ own)

    return jax.lax.fori_loop(0, 4, layer, x)


def without_data(p, x):
    """A state that no example reaches, which is still read by each of them."""
    steady = jax.lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ (p["across"] * 0.9) + 0.1), jnp.ones(x.shape[1], x.dtype))
    return x @ p["into"] + steady @ p["across"]


def of_two(p, x):
    """A product of two parameters, plus the transposed kernel and a part of it that is set to zero."""
    kernel = p["across"].T + jnp.tril(p["across"], -1) + p["down"] @ p["up"]
    return jax.lax.scan(lambda h, x: ((y := jnp.tanh(x @ p["into"] + h @ kernel)), y), x[0], x)[1]


def again(p, x):
    """Within what is computed again, in branches, and in a loop within a loop."""

    @jax.checkpoint
    def inner(h, x):
        def twice(_, h):
            return jax.lax.cond(x[0] > 0, lambda h: jnp.tanh(h @ (p["across"] * 2)), lambda h: h @ (p["across"] * -1), h)

        return jnp.tanh(jax.lax.fori_loop(0, 2, twice, h) + x @ masked(p["into"]))

    return jax.lax.scan(lambda h, x: ((y := inner(h, x)), y), x[0], x)[1]


def along_a_stack(p, x):
    """A stack of layers times numbers, which a loop runs along, and whose first layer is read elsewhere too."""
    scaled = p["layers"] * jnp.arange(1, 4, dtype=x.dtype)[:, None, None]
    return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, scaled)[0] @ p["layers"][0]


def convolved(p, x):
    """Kernels of a convolution that are standardised in every round."""
    kernel = p["kernel"] - p["kernel"].mean((0, 1))

    def layer(x, _):
        return jnp.tanh(jax.lax.conv_general_dilated(x[None], kernel * 2, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))[0]), None

    return jax.lax.scan(layer, x, None, 2)[0]


def looked_up(p, x):
    """Rows of a table that is multiplied first, by ids of the example and by those of all, and the table as a kernel."""
    table, ids = p["kernel"] * 0.5, jnp.argmax(x, axis=1)
    return jax.lax.scan(lambda h, at: ((y := jnp.tanh(table[at] + h @ table + table[2])), y), x[0], ids)[1]


def stopped(p, x):
    """One reader stops the gradient, and another rounds."""
    fixed = jax.lax.stop_gradient(p["across"] * 2)
    return jax.lax.scan(lambda h, x: ((y := jnp.tanh(x @ p["into"] + h @ (p["across"] * fixed + jnp.round(fixed)))), y), x[0], x)[1]


KINDS = {
    "number": (cell_with(lambda p, _: p["across"] * 0.7), CELL),
    "mask": (cell_with(lambda p, _: masked(p["across"])), CELL),
    "normalised": (cell_with(normalised), CELL | {"gain": (D,)}),
    "normalised_outside": (normalised_outside, CELL | {"gain": (D,)}),
    "dropped": (cell_with(dropped), CELL),
    "of_round": (of_round, CELL),
    "of_the_example": (cell_with(lambda p, x: p["across"] * x[0] + p["across"] * 2), CELL),
    "by_number": (by_number, {"layers": (3, D, D)}),
    "without_data": (without_data, CELL),
    "of_two": (of_two, CELL | {"down": (D, 2), "up": (2, D)}),
    "again": (again, CELL),
    "along_a_stack": (along_a_stack, {"layers": (3, D, D)}),
    "convolved": (convolved, {"kernel": (3, D, D)}),
    "looked_up": (looked_up, SQUARE),
    "stopped": (stopped, CELL),
}
OF_A_LOOP = ("number", "mask", "normalised", "normalised_outside", "dropped", "of_round", "of_two", "stopped")
QUICK = {
    ("of_round", "grams"),
    ("without_data", "kept"),
    ("again", "ghost"),
    ("by_number", "units"),
    ("looked_up", "kept"),
}
EACH = [(name, way, () if (name, way) in QUICK else pytest.mark.slow) for name in KINDS for way in WAYS]


@pytest.mark.parametrize(("name", "way"), [pytest.param(name, way, marks=marks) for name, way, marks in EACH])
def test_kernels_computed_from_parameters_are_exact(name, way):
    run, shapes = KINDS[name]
    assert_exact(run, shapes, WAYS[way])


@pytest.mark.parametrize("name", [name if name == "of_round" else pytest.param(name, marks=pytest.mark.slow) for name in OF_A_LOOP])
def test_a_kernel_of_a_loop_that_a_number_multiplies_is_one_for_all_examples(name):
    run, shapes = KINDS[name]
    ways = [dpx.clipped_grad(loss_of(run), clipping_norm=LIMIT, method=method) for method in ("vmap", "book_keeping")]
    by_vmap, ours = (batched_in_loops(jax.make_jaxpr(way)(params_of(shapes), ROWS).jaxpr) for way in ways)
    assert ours <= by_vmap


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_counted_costs_beside_a_gradient_of_each_example(name):
    run, shapes = KINDS[name]
    wide = {path: tuple(32 if size == D else size for size in shape) for path, shape in shapes.items()}
    rows = np.random.default_rng(1).normal(0, 1, (8, 24, 32)).astype(np.float32)
    for count in (matmul_flops, temporary_bytes):
        by_vmap, ours = (
            count(dpx.clipped_grad(loss_of(run), clipping_norm=LIMIT, method=method), params_of(wide), rows)
            for method in ("vmap", "book_keeping")
        )
        assert ours <= MOST * by_vmap
