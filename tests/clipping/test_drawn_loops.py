"""Drawn programs with loops: recurrent cells, stacks of layers, tied and joined kernels, indexed carries; exact beside float64.

B: examples, T: rounds, D: width.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping.rounding import MARGINS
from tests.clipping.batches import QUICKLY

B, LIMIT = 3, 0.5


def drawn_program(seed, only=None):
    """(shapes, loss of one example, T, D): one to three loops of drawn kinds, or of `only` one, whose kernels several of them may read."""
    draw = np.random.default_rng(seed)
    one_of = lambda *values: values[int(draw.integers(len(values)))]  # noqa: E731
    T, D, shapes, steps = one_of(2, 3, 5), one_of(3, 4), {}, []

    def kernel(*shape):
        """The name of a kernel of this shape: a new one, or one that is there."""
        known = [name for name, own in shapes.items() if own == shape]
        if known and draw.random() < 0.4:
            return one_of(*known)
        shapes[f"kernel_{len(shapes)}"] = shape
        return f"kernel_{len(shapes) - 1}"

    for _ in range(draw.integers(1, 4)):
        kind = only or one_of(*KINDS)
        names = [kernel(*(D if size == "D" else T if size == "T" else size for size in shape)) for shape in KINDS[kind][0]]
        steps.append((kind, names, bool(draw.integers(2))))

    def loss(p, x):
        for kind, names, is_again in steps:
            run = lambda x, *own, kind=kind: KINDS[kind][1](x, *own)  # noqa: E731
            x = (jax.checkpoint(run) if is_again else run)(x, *(p[name] for name in names))
        return jnp.sum(x * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape))

    return shapes, loss, T, D


def simple(x, into, across, bias):
    def cell(h, x):
        h = jnp.tanh(x @ into + h @ across + bias)
        return h, h

    return jax.lax.scan(cell, x[0], x)[1]


def gated(x, update, reset, across, bias):
    def cell(h, x):
        joined = jnp.concatenate([update, reset], 1)
        z, r = jnp.split(jax.nn.sigmoid(x @ joined + h @ joined), 2)
        h = (1 - z) * h + z * jnp.tanh(x + (r * h) @ across + bias)
        return h, h

    return jax.lax.scan(cell, jnp.zeros_like(x[0]), x, reverse=True)[1]


def layers(x, stack, across):
    layer = lambda x, own: (x + jnp.tanh(x @ own @ across), None)  # noqa: E731
    return jax.lax.scan(layer, x, stack)[0]


def transposed(x, kernel):
    return jax.lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x @ kernel) @ kernel.T, x)


def indexed(x, stack, across):
    """Each round reads the layer of its number, and carries the kernel along."""

    def body(i, carried):
        x, across = carried
        return x + jnp.tanh(x @ stack[i] @ across), across

    return jax.lax.fori_loop(0, stack.shape[0], body, (x, across))[0]


def state_space(x, decay, into, out):
    """A diagonal recurrence, as in S4D."""

    def cell(h, x):
        h = jax.nn.sigmoid(decay) * h + x @ into
        return h, jnp.sin(h) @ out

    return x + jax.lax.scan(cell, jnp.zeros_like(decay), x)[1]


def nested(x, kernel):
    inner = lambda h, x: (jnp.tanh(h @ kernel + x), None)  # noqa: E731
    return jax.lax.map(lambda row: jax.lax.scan(inner, row, x)[0], x)


def in_parts(x, kernel):
    """Rounds read columns and rows of a kernel, neighbours and every second one."""

    def cell(h, x):
        left, right = jnp.split(kernel, [1], 1)
        h = jnp.tanh(jnp.concatenate([h @ left, x @ right]))
        return h, h

    def by_rows(_, x):
        x = jnp.concatenate([x @ kernel[:, ::2], x @ kernel[:, 1::2]], -1)
        return jnp.sin(x[:, :1] @ kernel[:1] + x[:, 1:] @ kernel[1:])

    return jax.lax.fori_loop(0, 2, by_rows, jax.lax.scan(cell, x[0], x)[1])


def chosen(x, stack):
    """Each round reads the layer that its data choose."""
    cell = lambda h, x: (jnp.tanh((h + x) @ stack[(x[0] > 0).astype(int)]), h)  # noqa: E731
    return jax.lax.scan(cell, x[0], x)[1]


KINDS = {
    "simple": ((("D", "D"), ("D", "D"), ("D",)), simple),
    "gated": ((("D", "D"), ("D", "D"), ("D", "D"), ("D",)), gated),
    "layers": (((2, "D", "D"), ("D", "D")), layers),
    "transposed": ((("D", "D"),), transposed),
    "indexed": (((2, "D", "D"), ("D", "D")), indexed),
    "state_space": ((("D",), ("D", "D"), ("D", "D")), state_space),
    "nested": ((("D", "D"),), nested),
    "in_parts": ((("D", "D"),), in_parts),
    "chosen": (((2, "D", "D"),), chosen),
}


def assert_exact(seed, only=None, **options):
    shapes, loss, T, D = drawn_program(seed, only)
    draw = np.random.default_rng(1000 + seed)
    params = {name: draw.normal(0, 0.6, shape).astype(np.float32) for name, shape in shapes.items()}
    rows = draw.normal(0, 1, (B, T, D)).astype(np.float32)
    with jax.enable_x64(True):
        wide, one = jax.tree.map(np.float64, params), jax.jit(jax.grad(loss), compiler_options=QUICKLY)
        gradients = [jax.tree.map(np.asarray, one(wide, np.float64(row))) for row in rows]
    norms = np.sqrt([sum(np.square(leaf).sum() for leaf in gradient.values()) for gradient in gradients])
    run = jax.jit(dpx.clipped_grad(loss, clipping_norm=LIMIT, **options), compiler_options=QUICKLY)
    if seed % 2:
        # Padding takes the sums' other branch, and may hold anything.
        found = run(params, np.concatenate([rows, np.full_like(rows[:1], np.nan)]), is_padding=np.arange(B + 1) == B)
        found = found._replace(norms=found.norms[:B])
    else:
        found = run(params, rows)
    # Never less than the norm, and more only where float32 cannot give it.
    np.testing.assert_allclose(found.norms, norms, rtol=1e-3)
    assert np.all(np.asarray(found.norms, np.float64) >= norms * (1 - 1e-5))
    held = LIMIT * (1 - MARGINS["float32"])
    for name in shapes:
        wanted = sum(held / max(norm, held) * gradient[name] for norm, gradient in zip(norms, gradients, strict=True))
        np.testing.assert_allclose(found.total[name], wanted, rtol=0, atol=1e-3 * LIMIT)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_drawn_loops_are_exact(seed):
    assert_exact(seed)


@pytest.mark.parametrize("kept_bytes", [0, 2**30], ids=["grams", "kept"])
# Rounds that read parts of a kernel, and the one that data choose, are in test_parts.py too.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["in_parts", "chosen"])
def test_parts_of_a_kernel_are_exact(kind, kept_bytes):
    assert_exact(1, kind, kept_bytes=kept_bytes)


def test_parts_of_a_kernel_are_not_copied():
    shapes, loss, T, D = drawn_program(0, "in_parts")
    given = [{name: jnp.zeros(shape) for name, shape in shapes.items()}, jnp.zeros((B, T, D))]
    assert {taken.route for taken in dpx.clipped_grad(loss, clipping_norm=LIMIT).explain(*given)} == {"product"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"method": "ghost"}, {"kept_bytes": 0}], ids=["book_keeping", "ghost", "grams"])
@pytest.mark.parametrize("seed", range(60))
def test_sixty_drawn_loops_are_exact(seed, options):
    assert_exact(seed, **options)
