"""Clipped sums, by every method, against float64 gradients of one example at a time."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import ops
from dpx.declaration import ConfigError
from dpx.mechanism.clip import flat_weights
from tests.clipping import compiled
from tests.clipping.batches import assert_trees_close, batch, bert, example, float64_gradients, objective, parameters, squared_norm
from tests.clipping.compiled import DROPOUT_KEY, run

# (method, options): each is another program with one result.
WAYS = {
    "vmap": ("vmap", {}),
    "ghost": ("ghost", {}),
    "book_keeping": ("book_keeping", {}),
    "book_keeping_grams": ("book_keeping", {"kept_bytes": 0}),
    "book_keeping_ops": ("book_keeping", {"fused": False}),
    "ghost_ops": ("ghost", {"fused": False, "kept_bytes": 0}),
}


def ways(*fast: str, slow: tuple[str, ...] = ()):
    """One parameter a way; every way is a program to compile, and only the first run in the default suite."""
    return pytest.mark.parametrize("way", [*fast, *(pytest.param(way, marks=pytest.mark.slow) for way in slow)])


# Of book-keeping the two ends: no gradient kept of fused layers, and all kept of single ops. The second pass of ghost clipping sums what
# its first one weighs, by the same norms.
each_way = ways("vmap", "book_keeping_grams", "book_keeping_ops", slow=("ghost", "book_keeping", "ghost_ops"))
CLIPS = {"flat": (3.0, -1.0), "normalised": (0.5, 0.01), "unclipped": (1e6, -1.0)}


def clipped(method: str, **options):
    """One layer: tests/clipping/test_matrix.py has two, by every method."""
    return compiled.clipped(method, **{"layers": 1} | options)


@cache
def case(layers: int = 1, next_sentence: bool = True, dropout: float = 0.0):
    subject = objective(bert(layers=layers, dropout=dropout), next_sentence=next_sentence)
    params, rows = parameters(subject), batch()
    return params, rows, *float64_gradients(lambda p, b: subject.losses(p, b, DROPOUT_KEY), params, rows)


def summed(factors, gradients):
    return jax.tree.map(lambda *leaves: sum(c * leaf for c, leaf in zip(factors, leaves, strict=True)), *gradients)


def assert_exact(function, case, clips=CLIPS):
    params, rows, gradients, losses = case
    norms = np.sqrt([squared_norm(gradient) for gradient in gradients])
    for limit, stability in clips.values():
        found = run(function, params, rows, limit=limit, stability=stability)
        factors = limit / np.maximum(norms, limit) if stability < 0 else limit / (norms + stability)
        np.testing.assert_allclose(np.square(found.norms_B), np.square(norms), rtol=1e-5, atol=1e-12)
        np.testing.assert_allclose(found.losses_B, losses, rtol=1e-5)
        terms = [jax.tree.map(lambda leaf, c=c: c * leaf, gradient) for c, gradient in zip(factors, gradients, strict=True)]
        assert_trees_close(found.total, summed(factors, gradients), terms=terms)
        assert {leaf.dtype for leaf in jax.tree.leaves(found.total)} == {jnp.dtype("float32")}
        assert bool(found.is_counted_B.all())


@each_way
def test_equals_float64_gradients_one_at_a_time(way):
    method, options = WAYS[way]
    assert_exact(clipped(method, **options), case())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["book_keeping", "vmap", "ghost"])
def test_without_next_sentence_an_example_without_slots_has_no_gradient(method):
    found = run(clipped(method, next_sentence=False), *case(next_sentence=False)[:2])
    assert float(found.norms_B[0]) == 0 and bool(found.is_counted_B[0])
    assert_exact(clipped(method, next_sentence=False), case(next_sentence=False))


@ways(slow=("vmap", "ghost", "book_keeping", "book_keeping_ops"))
def test_equal_dropout_masks_are_drawn_again(way):
    method, options = WAYS[way]
    assert_exact(clipped(method, dropout=0.1, **options), case(dropout=0.1), {"flat": CLIPS["flat"]})


# In tests/mechanism/test_rgp_clips.py carriers are clipped layer by layer, in the same stack of layers.
@ways(slow=("book_keeping", "vmap", "ghost", "book_keeping_ops"))
def test_per_layer_clips_each_group_by_itself(way):
    method, options = WAYS[way]
    params, rows, gradients, _ = case(layers=2)
    found = run(clipped(method, layers=2, per_layer=True, **options), params, rows)
    np.testing.assert_allclose(found.norms_B, np.sqrt([squared_norm(gradient) for gradient in gradients]), rtol=1e-5)
    groups = [name for name in params if name != "layers"]
    limit = 3.0 / np.sqrt(len(groups) + 2)
    expected = []
    for gradient in gradients:
        scaled = {name: _scaled(gradient[name], limit) for name in groups}
        factors = [_factor(jax.tree.map(lambda leaf, at=layer: leaf[at], gradient["layers"]), limit) for layer in range(2)]
        layers = jax.tree.map(lambda leaf, c=factors: np.stack([c[0] * leaf[0], c[1] * leaf[1]]), gradient["layers"])
        expected.append(scaled | {"layers": layers})
    assert_trees_close(found.total, summed(np.ones(5), expected))


def _scaled(gradient, limit: float):
    factor = _factor(gradient, limit)
    return jax.tree.map(lambda leaf: factor * leaf, gradient)


def _factor(gradient, limit: float) -> float:
    return limit / max(limit, np.sqrt(squared_norm(gradient)))


@each_way
def test_padding_rows_contribute_exactly_zero(way):
    """Whatever a padding row holds, a row of length 0 included, no bit of the result changes."""
    method, options = WAYS[way]
    params, rows, gradients, _ = case()
    padding = np.asarray([False, False, False, True, True])
    found = run(clipped(method, **options), params, rows, padding=padding, limit=1e6)
    cleared = jax.tree.map(lambda leaf: np.where(padding.reshape(-1, *[1] * (leaf.ndim - 1)), np.zeros((), leaf.dtype), leaf), rows)
    other = run(clipped(method, **options), params, cleared, padding=padding, limit=1e6)
    for leaf, same in zip(jax.tree.leaves(found), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(leaf, same)
    np.testing.assert_array_equal(found.is_counted_B, ~padding)
    assert np.all(np.asarray(found.norms_B[3:]) == 0) and np.all(np.asarray(found.losses_B[3:]) == 0)
    assert_trees_close(found.total, summed(np.ones(3), gradients[:3]))


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e25], ids=["nan", "inf", "overflow"])
@each_way
def test_a_non_finite_example_contributes_exactly_zero(way, poison):
    """Its loss is multiplied by the poison, and so is its gradient (1e25: finite, but its square is not)."""
    method, options = WAYS[way]
    params, rows, gradients, _ = case()
    found = run(clipped(method, **options), params, rows, factor=np.where(np.arange(5) == 1, np.float32(poison), np.float32(1)), limit=1e6)
    np.testing.assert_array_equal(found.is_counted_B, [True, False, True, True, True])
    assert float(found.norms_B[1]) == 0
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((found.total, found.norms_B, found.losses_B, found.counts)))
    assert_trees_close(found.total, summed([1, 0, 1, 1, 1], gradients))


@ways("vmap", "book_keeping_grams", slow=("ghost", "book_keeping"))
def test_non_finite_weights_drop_every_example(way):
    method, options = WAYS[way]
    params, rows, _, _ = case()
    broken = {**params, "mlm": {**params["mlm"], "output_bias": params["mlm"]["output_bias"].at[7].set(jnp.nan)}}
    found = run(clipped(method, **options), broken, rows)
    assert not bool(found.is_counted_B.any())
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(found.total))


@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fused", "autodiff"])
def test_plain_sum_adds_the_gradients_of_real_rows(fused):
    params, rows, gradients, losses = case()
    padding = jnp.asarray([False, True, False, False, True])
    found = jax.jit(lambda p, b: dpx.plain_sum(objective(bert(layers=1)).losses, p, b, padding, fused=fused))(params, rows)
    assert_trees_close(found.total, summed([1, 0, 1, 1, 0], gradients))
    np.testing.assert_allclose(found.losses_B, np.where(padding, 0, losses), rtol=1e-5)
    assert found.norms_B is None


@pytest.mark.slow
def test_dropout_masks_belong_to_the_record():
    subject = objective(bert(dropout=0.2))
    params, rows = parameters(subject), batch()
    losses = jax.jit(subject.losses)
    together, _ = losses(params, rows, DROPOUT_KEY)
    apart = [losses(params, example(rows, b), DROPOUT_KEY)[0][0] for b in range(5)]
    np.testing.assert_allclose(together, apart, rtol=1e-5)
    assert not np.allclose(together, losses(params, rows)[0], rtol=1e-3)
    assert not np.allclose(together, losses(params, rows, jax.random.PRNGKey(8))[0], rtol=1e-3)


def test_a_plain_sum_of_narrow_numbers_is_float32():
    params, rows = {"kernel": jnp.ones((3, 2), jnp.bfloat16)}, {"x": jnp.ones((4, 3), jnp.bfloat16)}
    losses = lambda p, b: (ops.dense(b["x"], p["kernel"]).sum(1), {})  # noqa: E731
    total = jax.eval_shape(lambda p, b: dpx.plain_sum(losses, p, b).total, params, rows)
    assert total["kernel"].dtype == jnp.float32


def test_unknown_method_is_refused_in_words():
    with pytest.raises(ConfigError, match="method='fast': no such method"):
        dpx.clipped_sum(objective().losses, {}, batch(), weights=flat_weights(1.0), method="fast")


@ways("book_keeping", slow=("vmap", "ghost", "book_keeping_ops"))
def test_bfloat16_is_close_to_float32_and_never_beyond_the_clipping_norm(way):
    """One real row at a time: what is added to the sum is that row's clipped gradient, whose norm is the sensitivity."""
    method, options = WAYS[way]
    params, rows, gradients, _ = case()
    narrow = clipped(method, dtype="bfloat16", **options)
    norms = np.sqrt([squared_norm(gradient) for gradient in gradients])
    for b in range(5):
        found = run(narrow, params, rows, padding=np.arange(5) != b, limit=0.01)
        assert np.sqrt(squared_norm(jax.tree.map(np.float64, found.total))) <= 0.01 * (1 + 1e-5)
        np.testing.assert_allclose(found.norms_B[b], norms[b], rtol=0.05)
        assert {leaf.dtype for leaf in jax.tree.leaves(found.total)} == {jnp.dtype("float32")}


# Parameters of eight bits are in test_edges.py.
@ways(slow=("book_keeping", "vmap", "ghost", "book_keeping_ops", "ghost_ops"))
def test_narrow_parameters_give_float32_sums(way):
    """Parameters gathered in bfloat16 and the same numbers in float32 give one result, though cotangents have their primals' type."""
    method, options = WAYS[way]
    params, rows = case()[:2]
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim > 1 else leaf, params)
    function = clipped(method, dtype="bfloat16", **options)
    found, wide = run(function, narrow, rows), run(function, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow), rows)
    assert {leaf.dtype for leaf in jax.tree.leaves(found.total)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(found.norms_B, wide.norms_B, rtol=1e-2)
    assert_trees_close(found.total, jax.tree.map(np.float64, wide.total), 2e-2)


@pytest.mark.slow
def test_plain_sums_of_narrow_parameters_are_float32():
    subject, (params, rows) = objective(bert(layers=1, dtype="bfloat16")), case()[:2]
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim > 1 else leaf, params)
    found = jax.jit(lambda p, b: dpx.plain_sum(subject.losses, p, b))(narrow, rows)
    total = run(clipped("book_keeping", dtype="bfloat16"), narrow, rows, limit=1e9).total
    assert {leaf.dtype for leaf in jax.tree.leaves(found.total)} == {jnp.dtype("float32")}
    assert_trees_close(found.total, jax.tree.map(np.float64, total), 2e-2)
