"""Gradient ascent on the norm of one unit's contribution, over its data and over the parameters: the norm is never above C.

T: tokens or rounds, D: width, V: rows of a table.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from tests.clipping.batches import QUICKLY

T, D, V, STEPS, C = 5, 4, 6, 40, 0.7


def dense(p, x):
    return jnp.square(jnp.tanh(x @ p["first"]) @ p["second"]).sum()


def tied(p, x):
    """A kernel that is read twice, once transposed, and a token's mean that may cancel."""
    return jnp.square(jnp.tanh(jnp.tanh((x - x.mean(0)) @ p["first"]) @ p["first"].T)).sum()


def recurrent(p, x):
    cell = lambda h, x: (jnp.tanh(x @ p["first"] + h @ p["second"] + p["bias"]), None)  # noqa: E731
    return 0.3 * jnp.square(jax.lax.scan(cell, x[0], x)[0]).sum()


def stacked(p, x):
    layer = lambda x, own: (x + jnp.tanh(x @ own @ p["first"]), None)  # noqa: E731
    return 0.3 * jnp.square(jax.lax.scan(layer, x, p["layers"])[0]).sum()


def looked_up(p, x):
    id_T = jnp.array([1, 3, 1, 1, 0])
    return (p["table"][id_T] * x).sum() + jnp.square(jnp.tanh(x @ p["table"].T)).sum()


def convolved(p, x):
    y = jax.lax.conv_general_dilated(x[None], p["filter"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return jnp.square(jnp.tanh(y)).sum()


def gathered(p, x):
    """A kernel for each token, by its largest number."""
    return jnp.square(jnp.einsum("td,tde->te", x, p["layers"][jnp.argmax(x, -1) % 3])).sum()


def narrow(p, x):
    as_narrow = lambda leaf: leaf.astype(jnp.bfloat16)  # noqa: E731
    return jnp.square((as_narrow(x) @ as_narrow(p["first"])).astype(jnp.float32)).sum()


SQUARE = (D, D)
LOSSES = {
    dense: {"first": SQUARE, "second": SQUARE},
    tied: {"first": SQUARE},
    recurrent: {"first": SQUARE, "second": SQUARE, "bias": (D,)},
    stacked: {"first": SQUARE, "layers": (3, D, D)},
    looked_up: {"table": (V, D)},
    convolved: {"filter": (3, D, D)},
    gathered: {"layers": (3, D, D)},
    narrow: {"first": SQUARE},
}


def climbed(loss, **options):
    """The contribution's norm in float64 at each step of the ascent."""
    draw = np.random.default_rng(0)
    at = {name: jnp.asarray(draw.normal(0, 0.2, shape), jnp.float32) for name, shape in LOSSES[loss].items()}
    at = at, jnp.asarray(draw.normal(0, 0.05, (T, D)), jnp.float32)

    def height(p, x):
        total = dpx.clipped_grad(loss, clipping_norm=C, **options)(p, x[None]).total
        return jnp.log(sum(jnp.square(leaf).sum() for leaf in total.values())), total

    run, found = jax.jit(jax.value_and_grad(height, (0, 1), has_aux=True), compiler_options=QUICKLY), []
    for step in range(STEPS):
        (_, total), up = run(*at)
        found.append(np.sqrt(sum(np.square(np.asarray(leaf, np.float64)).sum() for leaf in total.values())))
        # The length of a row of zeros has no derivative.
        up = jax.tree.map(jnp.nan_to_num, up)
        length = np.sqrt(sum(float(jnp.square(leaf).sum()) for leaf in jax.tree.leaves(up)))
        # Long steps reach C; steps of one rounding look for what is above it.
        rate = (0.5, 0.1, 1e-3, 1e-6)[step % 4] / max(length, 1e-30)
        at = jax.tree.map(lambda leaf, own, rate=rate: leaf + rate * own, at, up)
    return found


def assert_never_above(loss, **options):
    found = climbed(loss, **options)
    assert max(found) <= C
    assert found[0] < 0.9 * C and max(found) > 0.99 * C


@pytest.mark.parametrize("loss", [recurrent], ids=lambda loss: loss.__name__)
def test_ascent_reaches_the_clipping_norm_and_never_more(loss):
    assert_never_above(loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"kept_bytes": 0}, {"method": "ghost"}, {"method": "vmap"}], ids=["kept", "grams", "ghost", "vmap"]
)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_ascent_by_every_method(loss, options):
    assert_never_above(loss, **options)
