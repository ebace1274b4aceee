"""Units of several rows: the norm clipped is that of the sum of a unit's row gradients, products between its rows included."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import norms, op, ops
from dpx.clipping.groups import PerLayerWeights
from dpx.declaration import ConfigError
from dpx.mechanism.clip import flat_weights
from tests.clipping.batches import assert_trees_close, batch, bert, float64_gradients, objective, parameters, squared_norm
from tests.clipping.compiled import DROPOUT_KEY

ROWS = 3
# Full, with padding behind, with padding before its one row, and none at all.
PADDING = np.array([False] * 3 + [False, False, True] + [True, False, True] + [True] * 3)
UNITS = len(PADDING) // ROWS
SUBJECT = objective(bert(layers=1, dropout=0.1))
WAYS = {
    "vmap": {"method": "vmap"},
    "ghost": {"method": "ghost"},
    "ghost_ops": {"method": "ghost", "fused": False, "kept_bytes": 0},
    "book_keeping": {"method": "book_keeping"},
    "book_keeping_grams": {"method": "book_keeping", "kept_bytes": 0},
    "book_keeping_ops": {"method": "book_keeping", "fused": False},
}
# What `vmap` does with a unit is below, on a smaller loss.
FAST = ("book_keeping_grams",)


@cache
def case():
    """Parameters, rows, and each unit's gradient and loss in float64: the sums of those of its rows, one row at a time."""
    params, rows = parameters(SUBJECT), batch(examples=len(PADDING))
    gradients, losses = float64_gradients(lambda p, b: SUBJECT.losses(p, b, DROPOUT_KEY), params, rows)
    weights = np.where(PADDING, 0.0, 1.0).reshape(UNITS, ROWS)
    units = [summed(weights[unit], gradients[unit * ROWS : (unit + 1) * ROWS]) for unit in range(UNITS)]
    return params, rows, units, (weights * losses.reshape(UNITS, ROWS)).sum(1)


def summed(factors, gradients):
    return jax.tree.map(lambda *leaves: sum(c * leaf for c, leaf in zip(factors, leaves, strict=True)), *gradients)


@cache
def compiled(way: str):
    def run(params, rows, limit, factor_B):
        def losses(params, rows):
            losses_B, counts = SUBJECT.losses(params, rows["row"], DROPOUT_KEY)
            return losses_B * rows["factor"], counts

        weights = lambda norms_U: limit / jnp.maximum(norms_U, limit)  # noqa: E731
        both, options = {"row": rows, "factor": factor_B}, WAYS[way] | {"checked": False}
        return dpx.clipped_sum(losses, params, both, weights=weights, is_padding_B=jnp.asarray(PADDING), rows_per_unit=ROWS, **options)

    return jax.jit(run)


def found(way, params, rows, limit=1e6, factor=None):
    return compiled(way)(params, rows, limit, np.ones(len(PADDING), np.float32) if factor is None else factor)


each_way = pytest.mark.parametrize("way", [way if way in FAST else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])


@each_way
def test_equals_the_float64_gradient_of_each_unit(way):
    params, rows, gradients, losses = case()
    norms = np.sqrt([squared_norm(gradient) for gradient in gradients])
    for limit in (1.5, 1e6):
        result = found(way, params, rows, limit)
        np.testing.assert_allclose(np.square(result.norms_B), np.square(norms), rtol=1e-5, atol=1e-12)
        np.testing.assert_allclose(result.losses_B, losses, rtol=1e-5)
        np.testing.assert_array_equal(result.is_counted_B, [True, True, True, False])
        assert_trees_close(result.total, summed(limit / np.maximum(norms, limit), gradients))
    assert norms[:3].max() > 1.5, "a limit that nothing meets tests nothing"


def test_the_grams_of_fused_layers_hold_products_between_rows(monkeypatch):
    """Rows this short and weights this narrow would never take the form by themselves."""
    monkeypatch.setattr(norms, "choose", lambda *_: "gram")
    params, rows, gradients, _ = case()
    weights = lambda norms_U: jnp.ones_like(norms_U)  # noqa: E731
    run = jax.jit(
        lambda p, b: dpx.clipped_sum(
            lambda p, b: SUBJECT.losses(p, b, DROPOUT_KEY),
            p,
            b,
            weights=weights,
            is_padding_B=jnp.asarray(PADDING),
            rows_per_unit=ROWS,
            checked=False,
        )
    )
    np.testing.assert_allclose(
        np.square(run(params, rows).norms_B), [squared_norm(gradient) for gradient in gradients], rtol=1e-5, atol=1e-12
    )


@each_way
def test_a_padding_row_changes_not_one_bit(way):
    params, rows, _, _ = case()
    cleared = jax.tree.map(lambda leaf: np.where(PADDING.reshape(-1, *[1] * (leaf.ndim - 1)), np.zeros((), leaf.dtype), leaf), rows)
    poison, plain = np.where(PADDING, np.float32(np.nan), np.float32(1)), found(way, params, rows)
    for other in (found(way, params, cleared), found(way, params, rows, factor=poison)):
        jax.tree.map(np.testing.assert_array_equal, plain, other)


@each_way
@pytest.mark.parametrize("poison", [np.nan, 1e25])
def test_one_non_finite_row_drops_its_whole_unit(way, poison):
    params, rows, gradients, _ = case()
    result = found(way, params, rows, factor=np.where(np.arange(len(PADDING)) == 4, np.float32(poison), np.float32(1)))
    np.testing.assert_array_equal(result.is_counted_B, [True, False, True, False])
    assert_trees_close(result.total, summed([1, 0, 1, 0], gradients))


@pytest.mark.parametrize("method", ["vmap", *(pytest.param(name, marks=pytest.mark.slow) for name in ("book_keeping", "ghost"))])
def test_rows_that_cancel_and_rows_that_agree_are_told_apart(method):
    """Row by row both units have the same norms; together one has twice them and the other none."""
    x = jnp.asarray([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [1.0, 2.0]])
    sign = jnp.asarray([1.0, 1.0, 1.0, -1.0])

    def losses(params, rows):
        return rows["sign"] * ops.dense(rows["x"], params["kernel"])[:, 0], {}

    params = {"kernel": jnp.ones((2, 1))}
    run = jax.jit(lambda p, b: dpx.clipped_sum(losses, p, b, weights=jnp.ones_like, method=method, rows_per_unit=2))
    np.testing.assert_allclose(run(params, {"x": x, "sign": sign}).norms_B, [2 * np.sqrt(5), 0.0], rtol=1e-6)


def test_the_plain_sum_of_units_is_that_of_their_rows():
    x = np.random.default_rng(0).normal(size=(len(PADDING), 2)).astype(np.float32)
    losses = lambda params, rows: (ops.dense(jnp.square(rows["x"]), params["kernel"])[:, 0], {})  # noqa: E731
    result = dpx.plain_sum(losses, {"kernel": jnp.ones((2, 1))}, {"x": x}, jnp.asarray(PADDING), rows_per_unit=ROWS)
    real = np.where(PADDING[:, None], 0, np.square(x))
    np.testing.assert_allclose(result.total["kernel"][:, 0], real.sum(0), rtol=1e-5)
    np.testing.assert_allclose(result.losses_B, real.sum(1).reshape(UNITS, ROWS).sum(1), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["vmap", "ghost", "book_keeping"])
def test_clipped_per_layer_a_unit_stays_within_the_norm(method):
    params, rows, _, _ = case()
    weights = PerLayerWeights(0.5)
    run = jax.jit(
        lambda p, b, pad: dpx.clipped_sum(
            SUBJECT.losses, p, b, weights=weights, is_padding_B=pad, method=method, rows_per_unit=ROWS, checked=False
        )
    )
    for unit in range(3):
        alone = jnp.asarray(PADDING | (np.arange(len(PADDING)) // ROWS != unit))
        assert np.sqrt(squared_norm(jax.tree.map(np.float64, run(params, rows, alone).total))) <= 0.5 * (1 + 1e-5)


@dataclasses.dataclass(frozen=True)
class RowByRow(op.Op):
    """An op of somebody's own that knows nothing of units."""

    name: str = "row_by_row"

    def forward(self, leaves, inputs):
        return inputs[0] * leaves["gain"], inputs[0]

    def input_cotangent(self, leaves, residuals, cotangent):
        return (cotangent * leaves["gain"],), cotangent * residuals

    def squared_norm(self, leaves, record):
        return (jnp.square(record).sum(1),)

    def weighted_sum(self, leaves, record, weights):
        return {"gain": weights[0] @ record}


@pytest.mark.parametrize("method", ["book_keeping", pytest.param("ghost", marks=pytest.mark.slow)])
def test_an_op_without_a_rule_for_units_is_refused_by_name(method):
    def losses(params, rows):
        return op.apply(RowByRow(), params, (rows["x"],)).sum(1), {}

    params, rows, weights = {"gain": jnp.ones(2)}, {"x": jnp.ones((4, 2))}, flat_weights(1.0)
    with pytest.raises(ConfigError, match="^op=row_by_row: clips each row separately"):
        dpx.clipped_sum(losses, params, rows, weights=weights, method=method, rows_per_unit=2)
    run = jax.jit(lambda params, rows: dpx.clipped_sum(losses, params, rows, weights=weights, method="vmap", rows_per_unit=2))
    assert run(params, rows).norms_B.shape == (2,)


def test_units_that_do_not_fill_the_batch_are_refused():
    with pytest.raises(ConfigError, match="^rows_per_unit=5: does not divide"):
        dpx.clipped_sum(SUBJECT.losses, {}, batch(examples=12), weights=flat_weights(1.0), rows_per_unit=5)
    unit = dpx.clipped_grad(lambda w, x: jnp.dot(w, x), clipping_norm=1.0, rows_per_unit=2, kept_bytes=0)
    for run in (unit, unit.explain):
        with pytest.raises(ConfigError, match="^rows_per_unit=2: does not divide"):
            run(jnp.zeros(2), jnp.ones((3, 2)))


@pytest.mark.parametrize("method", ["ghost", *(pytest.param(name, marks=pytest.mark.slow) for name in ("book_keeping", "vmap"))])
def test_units_of_rows_may_have_empty_arrays(method):
    loss = lambda p, x, empty: (jnp.dot(p["w"], x) + p["none"].sum() + empty.sum(), {"none": empty})  # noqa: E731
    run = dpx.clipped_grad(loss, has_aux=True, clipping_norm=10.0, rows_per_unit=2, method=method)
    found = jax.jit(run)({"w": jnp.zeros(2), "none": jnp.zeros((0, 3))}, jnp.asarray([[3.0, 0], [0, 4.0]]), jnp.zeros((2, 0)))
    np.testing.assert_allclose(found.norms, [5.0], rtol=1e-5)
    assert found.total["none"].shape == (0, 3) and found.aux["none"].shape == (1, 0)
