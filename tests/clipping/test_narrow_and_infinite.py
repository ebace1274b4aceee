"""Numbers that do not fit: ids past what bfloat16 counts, records that are rounded, logits and losses without a value.

B: examples, T: tokens, M: positions decoded, D: width, V: rows of a table.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import ops
from dpx.clipping.groups import PerLayerWeights
from dpx.models.fused_head import token_loss

B, T, M, D, V = 3, 4, 2, 4, 600


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 0.5, shape), jnp.float32)


def clip(norms_B):
    return 0.3 / jnp.maximum(norms_B, 0.3)


def both(losses, params, batch, **options):
    """What is found, and what one example at a time says."""
    ways = (options, {"method": "vmap"})
    return jax.jit(lambda p, b: [dpx.clipped_sum(losses, p, b, weights=clip, checked=False, **given) for given in ways])(params, batch)


@pytest.mark.parametrize("method", ["book_keeping", pytest.param("ghost", marks=pytest.mark.slow)])
def test_ids_past_256_are_told_apart_in_bfloat16(method):
    """257 and 258 are one number in bfloat16: their gradients would be added up."""
    batch = {"id": jnp.array([[257, 258, 257, 1], [512, 513, 514, 515], [0, 599, 598, 300]]), "x": drawn(B, T, D, seed=1)}

    def losses(params, batch):
        x_BTD = ops.lookup(params["table"], batch["id"], jnp.bfloat16)
        return (x_BTD.astype(jnp.float32) * batch["x"]).sum((1, 2)), {}

    found, truth = both(losses, {"table": drawn(V, D)}, batch, method=method)
    np.testing.assert_allclose(found.norms_B, truth.norms_B, rtol=1e-2)
    np.testing.assert_allclose(found.total["table"], truth.total["table"], atol=2e-3)


def test_what_is_rounded_is_read_after_it_was_stored():
    """Norm and sum of one narrow record may otherwise be of two roundings of it."""

    def losses(params, batch):
        return ops.dense(batch["x"].astype(jnp.bfloat16), params["kernel"]).astype(jnp.float32).sum((1, 2)), {}

    def barriers(x):
        run = lambda p, b: dpx.clipped_sum(losses, p, b, weights=clip, kept_bytes=0, checked=False)  # noqa: E731
        return str(jax.make_jaxpr(run)({"kernel": drawn(64, 64)}, {"x": x})).count("optimization_barrier")

    assert barriers(drawn(B, T, 64)) == 2


@pytest.mark.parametrize(
    ("poison", "method"),
    [
        *((np.nan, "book_keeping"), (np.inf, "ghost")),
        *(pytest.param(-np.inf, method, marks=pytest.mark.slow) for method in ("book_keeping", "ghost")),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((np.nan, "ghost"), (np.inf, "book_keeping"))),
    ],
)
def test_an_example_without_logits_counts_for_nothing_in_the_fused_head(method, poison):
    batch = {"h": drawn(B, M, D).at[1].set(poison), "label": jnp.ones((B, M), jnp.int32), "has_label": jnp.ones((B, M), bool)}

    def losses(params, batch):
        return token_loss(batch["label"], batch["has_label"], batch["h"], params["table"], params["bias"])[0], {}

    found, truth = both(losses, {"table": drawn(7, D), "bias": drawn(7)}, batch, method=method)
    np.testing.assert_array_equal(found.is_counted_B, [True, False, True])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found.total, truth.total)


@pytest.mark.parametrize("method", ["book_keeping", "ghost", "vmap"])
def test_an_infinite_loss_of_a_finite_gradient_counts_for_nothing(method):
    batch = {"x": drawn(B, T, D), "shift": jnp.array([0.0, jnp.inf, 0.0])}
    losses = lambda p, b: (ops.dense(b["x"], p["kernel"]).sum((1, 2)) + b["shift"], {})  # noqa: E731
    run = jax.jit(lambda p, b: dpx.clipped_sum(losses, p, b, weights=clip, method=method, checked=False))
    found = run({"kernel": drawn(D, D)}, batch)
    np.testing.assert_array_equal(found.is_counted_B, [True, False, True])
    assert bool(jnp.isfinite(found.total["kernel"]).all())


@pytest.mark.parametrize("method", ["book_keeping", "ghost"])
def test_groups_are_weighed_apart_by_every_method(method):
    """A second pass with one weight for all would clip the small group with the large one's."""
    batch = {"x": drawn(B, T, D)}

    def losses(params, batch):
        return 50 * ops.dense(batch["x"], params["large"]).sum((1, 2)) + 0.1 * ops.dense(batch["x"], params["small"]).sum((1, 2)), {}

    params, weights = {"large": drawn(D, D), "small": drawn(D, D)}, PerLayerWeights(1.0)
    given = [{"weights": weights, "method": way, "checked": False} for way in (method, "vmap")]
    found, truth = jax.jit(lambda p, b: [dpx.clipped_sum(losses, p, b, **options) for options in given])(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found.total, truth.total)


def test_norms_that_round_below_zero_are_zero_and_not_nan():
    """Two uses that cancel: the products between them may be larger than both squares, by float32's rounding."""
    batch = {"id": jnp.array([[0, 1, 2, 3]] * B), "x": 100 * drawn(B, T, D)}

    def losses(params, batch):
        x_BTD = ops.lookup(params["table"], batch["id"])
        positions_BMD = batch["x"] - jax.lax.stop_gradient(0 * x_BTD)
        return (x_BTD * batch["x"]).sum((1, 2)) - ops.decode(positions_BMD, params["table"])[:, jnp.arange(T), jnp.arange(T)].sum(1), {}

    found = jax.jit(lambda p, b: dpx.clipped_sum(losses, p, b, weights=clip, checked=False))({"table": drawn(9, D)}, batch)
    assert np.all(np.asarray(found.norms_B) >= 0) and np.all(np.asarray(found.norms_B) < 1) and bool(found.is_counted_B.all())
    assert float(jnp.abs(found.total["table"]).max()) < 1e-3


def test_a_loss_that_divides_by_a_length_can_be_tried_out():
    """Random lengths of 0 leave it without a value; that says nothing of whether its examples are apart."""
    batch = {"x": drawn(B, T, D), "length": jnp.array([1, 2, 4])}

    def losses(params, batch):
        is_in_BT = jnp.arange(T) < batch["length"][:, None]
        y_BT = ops.dense(batch["x"], params["kernel"])[:, :, 0]
        return jnp.where(is_in_BT, y_BT, 0).sum(1) / batch["length"]

    found = jax.jit(lambda p, b: dpx.clipped_sum(losses, p, b, weights=clip))({"kernel": drawn(D, 1)}, batch)
    assert bool(found.is_counted_B.all())
