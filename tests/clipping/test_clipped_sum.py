"""Clipped sums against float64 gradients of one example at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping.weights import clip_weights
from dpx.declaration import Refused
from dpx.mechanism.declarations import Flat, Normalised
from tests.clipping.batches import assert_trees_close, batch, bert, example, float64_gradients, objective, parameters, squared_norm

METHODS = ("vmap", "ghost", "book_keeping")
CLIPS = (Flat(clipping_norm=3.0), Normalised(clipping_norm=0.5), Flat(clipping_norm=1e6))


def clip_factor(clip, norm: float) -> float:
    return clip.clipping_norm / max(clip.clipping_norm, norm) if isinstance(clip, Flat) else clip.clipping_norm / (norm + clip.stability)


@pytest.fixture(scope="module", params=[True, False], ids=["nsp", "mlm"])
def case(request):
    subject = objective(next_sentence=request.param)
    params, rows = parameters(subject), batch()
    return subject, params, rows, float64_gradients(subject.losses, params, rows)


@pytest.mark.parametrize("clip", CLIPS, ids=["flat", "normalised", "unclipped"])
@pytest.mark.parametrize("method", METHODS)
def test_clipped_sum_equals_float64_gradients_one_at_a_time(case, method, clip):
    subject, params, rows, (gradients, losses) = case
    norms = np.sqrt([squared_norm(gradient) for gradient in gradients])
    factors = [clip_factor(clip, norm) for norm in norms]
    expected = jax.tree.map(lambda *leaves: sum(c * leaf for c, leaf in zip(factors, leaves, strict=True)), *gradients)

    found = jax.jit(lambda p, b: dpx.clipped_sum(subject.losses, p, b, weights=clip_weights(clip), method=method))(params, rows)

    np.testing.assert_allclose(np.square(found.norms_B), np.square(norms), rtol=1e-5)
    np.testing.assert_allclose(found.losses_B, losses, rtol=1e-5)
    assert_trees_close(found.total, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(found.total)} == {jnp.dtype("float32")}
    assert bool(found.is_counted_B.all())


def test_plain_sum_adds_the_gradients_of_real_rows(case):
    subject, params, rows, (gradients, losses) = case
    is_padding = jnp.asarray([False, True, False, False, True])
    found = jax.jit(lambda p, b: dpx.plain_sum(subject.losses, p, b, is_padding))(params, rows)
    real = [gradient for gradient, padding in zip(gradients, is_padding, strict=True) if not padding]
    assert_trees_close(found.total, jax.tree.map(lambda *leaves: sum(leaves), *real))
    np.testing.assert_allclose(found.losses_B, np.where(is_padding, 0, losses), rtol=1e-5)
    assert found.norms_B is None


@pytest.mark.parametrize("method", METHODS)
def test_padding_rows_contribute_exactly_zero(method):
    subject = objective()
    params, rows = parameters(subject), batch()
    is_padding = jnp.asarray([False, False, False, True, True])

    @jax.jit
    def run(rows):
        return dpx.clipped_sum(subject.losses, params, rows, weights=clip_weights(CLIPS[0]), is_padding_B=is_padding, method=method)

    found = run(rows)
    # Whatever stands in a padding row, rows of length 0 included, not one bit of the sum changes.
    other = run(jax.tree.map(lambda leaf: leaf.at[3:].set(jnp.zeros((), leaf.dtype)), rows))
    for leaf, same in zip(jax.tree.leaves(found), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(leaf, same)
    assert np.all(np.asarray(found.norms_B[3:]) == 0) and np.all(np.asarray(found.losses_B[3:]) == 0)
    first = jax.tree.map(lambda leaf: leaf[:3], rows)
    alone = jax.jit(lambda rows: dpx.clipped_sum(subject.losses, params, rows, weights=clip_weights(CLIPS[0]), method=method))(first)
    assert_trees_close(found.total, jax.tree.map(np.asarray, alone.total))


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e25], ids=["nan", "inf", "overflow"])
@pytest.mark.parametrize("method", METHODS)
def test_a_non_finite_example_contributes_exactly_zero(method, poison):
    """The first example's loss is multiplied by the poison, and so is its gradient (1e25: finite, but its square is not)."""
    subject = objective()
    params, rows = parameters(subject), batch()
    total = _sum_with_scale(subject, method)
    found = total(params, rows, jnp.ones(5).at[0].set(poison))
    assert not bool(found.is_counted_B[0]) and float(found.norms_B[0]) == 0
    assert bool(found.is_counted_B[1:].all())
    rest = total(params, jax.tree.map(lambda leaf: leaf[1:], rows), jnp.ones(4))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((found.total, found.norms_B, found.losses_B, found.counts)))
    assert_trees_close(found.total, jax.tree.map(np.asarray, rest.total))


def _sum_with_scale(subject, method):
    """A clipped sum whose losses are multiplied, example by example, by a factor that travels with the batch."""

    def losses(params, pair):
        losses_B, counts = subject.losses(params, pair["rows"])
        return losses_B * pair["factor"], counts

    def run(params, rows, factor_B):
        return dpx.clipped_sum(losses, params, {"rows": rows, "factor": factor_B}, weights=clip_weights(CLIPS[0]), method=method)

    return jax.jit(run)


@pytest.mark.parametrize("method", METHODS)
def test_every_clipped_gradient_respects_the_norm(method):
    subject = objective()
    params, rows = parameters(subject), batch(examples=1)
    run = jax.jit(lambda norm: dpx.clipped_sum(subject.losses, params, rows, weights=lambda n: norm / jnp.maximum(n, norm), method=method))
    for norm in (1e-3, 0.1, 1.0):
        assert np.sqrt(squared_norm(run(norm).total)) == pytest.approx(norm, rel=1e-5)


def test_dropout_masks_belong_to_the_record():
    subject = objective(bert(dropout=0.2))
    params, rows = parameters(subject), batch()
    key = jax.random.PRNGKey(7)
    losses = jax.jit(subject.losses)
    together, _ = losses(params, rows, key)
    apart = [losses(params, example(rows, b), key)[0][0] for b in range(5)]
    np.testing.assert_allclose(together, apart, rtol=1e-5)
    assert not np.allclose(together, losses(params, rows)[0], rtol=1e-3)
    assert not np.allclose(together, losses(params, rows, jax.random.PRNGKey(8))[0], rtol=1e-3)


def test_unknown_method_is_refused_in_words():
    subject = objective()
    with pytest.raises(Refused, match="clipping=fast: no such method"):
        dpx.clipped_sum(subject.losses, parameters(subject), batch(), weights=clip_weights(CLIPS[0]), method="fast")


def test_bfloat16_computes_float32_gradients_close_to_float32_ones():
    params, rows = parameters(objective(), spread=0.1), batch()
    narrow, wide = (
        jax.jit(lambda p, b, s=subject: dpx.clipped_sum(s.losses, p, b, weights=clip_weights(CLIPS[0])))(params, rows)
        for subject in (objective(bert(dtype="bfloat16")), objective())
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow)} <= {jnp.dtype("float32"), jnp.dtype("bool")}
    np.testing.assert_allclose(narrow.norms_B, wide.norms_B, rtol=0.03)
