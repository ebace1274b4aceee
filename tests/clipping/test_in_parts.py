"""Products in bfloat16 parts: what they leave out, that compilers keep the parts, and that no norm or sum loses by them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.clipping import bounds, norms
from dpx.clipping.rounding import MARGINS
from tests.clipping.batches import squared_norm
from tests.clipping.compiled import clipped, run
from tests.clipping.test_rounding import hard_cases

TINY = float(jnp.finfo(jnp.float32).tiny)


@pytest.fixture
def on_accelerators(monkeypatch):
    """CPUs multiply as accelerators do, in norms that are traced anew."""
    norms.gram.clear_cache()
    monkeypatch.setattr(bounds, "_whole", bounds._in_parts)
    yield
    norms.gram.clear_cache()


def test_two_parts_are_a_number_within_what_is_stated_compiled_or_not():
    drawn = np.random.default_rng(0)
    x = (drawn.normal(size=20_000) * 2.0 ** drawn.integers(-140, 127, 20_000)).astype(np.float32)
    edges = np.float32([0, -0.0, 1, 1 + 2**-8, 1 + 2**-7, 1 + 2**-16, 1 - 2**-24, 255.5, 3.3e38, -1e-38, TINY, TINY / 2, 1e-42])
    x = np.concatenate([x, edges])
    for function in (bounds.cut, jax.jit(bounds.cut)):
        high, low = (np.float64(part) for part in function(jnp.asarray(x)))
        assert (np.abs(np.float64(x) - high - low) <= 2.0**-16 * np.abs(np.float64(x)) + TINY).all()
        assert (np.abs(low) <= 2.0**-8 * np.abs(np.float64(x)) + TINY).all() and np.count_nonzero(low) > 10_000


@pytest.mark.parametrize("both", [False, True])
def test_a_product_in_parts_leaves_out_less_than_is_stated(both):
    drawn, depth = np.random.default_rng(1), 384
    a, b = (jnp.asarray(drawn.normal(size=(3, depth, n)) * 10.0 ** drawn.integers(-3, 3, (3, depth, 1)), jnp.float32) for n in (5, 7))
    a = a if both else a.astype(jnp.bfloat16)
    found = np.float64(jax.jit(lambda a, b: bounds._in_parts("btp,btd->bpd", a, b))(a, b))
    truth, magnitude = (np.einsum("btp,btd->bpd", kind(np.float64(a)), kind(np.float64(b))) for kind in (np.asarray, np.abs))
    error = np.abs(found - truth) / magnitude
    assert 2.0**-24 < error.max() <= bounds.error(depth, 2 if both else 1)
    # One bfloat16 product of rounded numbers is much further off.
    rounded = np.einsum("btp,btd->bpd", np.float64(a.astype(jnp.bfloat16)), np.float64(b.astype(jnp.bfloat16)))
    assert (np.abs(rounded - truth) / magnitude).max() > 50 * error.max()


def test_only_bfloat16_activations_are_multiplied_in_parts():
    g = jnp.ones((1, 4, 3))
    for dtype, products in ((jnp.bfloat16, 3), (jnp.float16, 1), (jnp.float32, 1)):
        text = str(jax.make_jaxpr(norms.summed)(jnp.ones((1, 4, 2), dtype), g))
        assert text.count("dot_general[") == products, dtype


@pytest.mark.parametrize("flat", [1.0, 1e-3])
def test_a_gram_in_parts_is_within_its_bounds_where_rows_cancel(flat, on_accelerators):
    """Rows of equal activations under cotangents that add up to nearly zero."""
    drawn = np.random.default_rng(2)
    a = jnp.asarray(3 + flat * drawn.normal(size=(4, 96, 24)), jnp.bfloat16)
    g = drawn.normal(size=(4, 96, 16))
    g = jnp.asarray(g - g.mean(1, keepdims=True), jnp.bfloat16)
    truth = np.square(np.einsum("btp,btd->bpd", np.float64(a), np.float64(g))).sum((1, 2))
    found = jax.jit(norms.gram)(a, g)
    error = np.abs(np.float64(found.square) - truth)
    assert (error > 0).all() and (error <= np.float64(found.of_square) + 2 * np.float64(found.of_norm) * np.sqrt(truth)).all()
    assert (np.float64(bounds.upper(found)) >= (1 - 2.0**-10) * truth).all()


# The form of the norm that products in parts change is compared above with its bounds.
@pytest.mark.slow
@pytest.mark.parametrize("kept_bytes", [0, 2**30])
def test_no_example_adds_more_than_the_clipping_norm_in_parts(kept_bytes, on_accelerators):
    function = clipped.__wrapped__("book_keeping", dtype="bfloat16", kept_bytes=kept_bytes)
    cases, padding = hard_cases(), jnp.arange(5) != 1
    for name in ("far x 1", "flat x 1e+06", "loud x 1", "mixed x 1"):
        params, rows, factor = cases[name]
        size = float(run(function, params, rows, padding=padding, factor=jnp.full(5, factor), limit=1.0).norms_B[1])
        limit = np.float32(0.37 * size)
        target = float(limit * np.float32(1 - MARGINS["bfloat16"]))
        found = run(function, params, rows, padding=padding, factor=jnp.full(5, factor), limit=target)
        worst = np.sqrt(squared_norm(jax.tree.map(np.float64, found.total))) / np.float64(limit)
        assert bool(found.is_counted_B[1]) and 0.9 < worst <= 1 - MARGINS["bfloat16"] / 2, name
