"""Edges of `dpx.clipped_grad`: norms and parameters of narrow types, meshes with Explicit axes, what a loss may return beside its value.

B: examples, D: width.
"""

from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpx
from dpx.clipping import ops
from dpx.clipping.rounding import LARGEST_CLIPPING_NORM, MARGINS
from dpx.declaration import ConfigError

B, D = 8, 4
METHODS = pytest.mark.parametrize("method", ["book_keeping", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ghost", "vmap"))])
X = jnp.asarray(np.random.default_rng(0).normal(0, 10, (B, D)), jnp.float32)
K = jnp.asarray(np.random.default_rng(1).normal(0, 1, (D, D)), jnp.float32)


def products(k, x):
    return jnp.sin(x @ k).sum()


MARGINS_OF = [
    (jnp.bfloat16, False),
    (jnp.float16, True),
    (np.float64, False),
    (jnp.bfloat16, True),
    (jnp.float16, False),
    (np.float64, True),
]


@pytest.mark.parametrize(
    ("dtype", "is_traced"), [*MARGINS_OF[:3], *(pytest.param(*cell, marks=pytest.mark.slow) for cell in MARGINS_OF[3:])]
)
def test_the_margin_of_a_clipping_norm_in_a_narrow_type_does_not_round_away(dtype, is_traced):
    rows = jnp.asarray(np.random.default_rng(2).normal(0, 10, (40, 1, D)), jnp.float32)

    def contributions(norm):
        summed = lambda row: dpx.clipped_grad(jnp.dot, clipping_norm=norm)(jnp.zeros(D), row).total  # noqa: E731
        return jax.lax.map(summed, rows)

    norm = dtype(1.0)
    found = jax.jit(contributions)(norm) if is_traced else contributions(norm)
    lengths = np.linalg.norm(np.asarray(found, np.float64), axis=1)
    assert np.all(lengths <= 1) and np.all(lengths > 1 - 2 * MARGINS["float32"])


@pytest.mark.parametrize("norm", [3.5e38, 1e39, np.inf, np.nan])
def test_a_clipping_norm_that_float32_cannot_hold_is_refused_or_lets_nothing_through(norm):
    with pytest.raises(ConfigError, match=r"^clipping_norm=.*: must be at least 1e-06 and at most 3\.40282e\+38"):
        dpx.clipped_grad(jnp.dot, clipping_norm=norm)
    # Beyond the largest number of float32 lies infinity.
    traced = jnp.float32(norm if np.isnan(norm) else np.inf)
    found = jax.jit(lambda norm: dpx.clipped_grad(jnp.dot, clipping_norm=norm)(jnp.zeros(D), X))(traced)
    assert not found.is_counted.any()
    assert all(not jnp.any(field) for field in (found.total, found.norms, found.losses))


def test_the_largest_clipping_norm_clips_nothing():
    found = jax.jit(dpx.clipped_grad(jnp.dot, clipping_norm=LARGEST_CLIPPING_NORM))(jnp.zeros(D), X)
    np.testing.assert_allclose(found.total, X.sum(0), rtol=1e-5)
    assert found.is_counted.all()


@METHODS
def test_weights_in_float64_with_a_row_that_is_not_finite(method):
    with jax.enable_x64(True):
        weights = lambda norms: 1 / jnp.maximum(norms.astype(jnp.float64), 1)  # noqa: E731
        found = jax.jit(dpx.weighted_grad(products, weights=weights, method=method))(K, X.at[1].set(jnp.nan))
    np.testing.assert_array_equal(found.is_counted, np.arange(B) != 1)
    assert bool(jnp.isfinite(found.total).all())


@METHODS
def test_a_scalar_under_layers_is_clipped_with_the_others(method):
    def loss(p, x):
        return jnp.dot(p["w"], x) * p["layers"]["gain"] * p["layers"]["stack"].sum()

    params = {"layers": {"gain": jnp.float32(2.0), "stack": jnp.ones(3)}, "w": jnp.ones(D)}
    one = jax.jit(jax.grad(loss))
    gradients = [jax.device_get(one(params, x)) for x in np.asarray(X)]
    norms = [float(np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(one)))) for one in gradients]
    found = jax.jit(dpx.clipped_grad(loss, clipping_norm=1.0, method=method))(params, X)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    for found_leaf, *each in zip(*map(jax.tree.leaves, (found.total, *gradients)), strict=True):
        weights = [(1 - MARGINS["float32"]) / max(norm, 1) for norm in norms]
        terms = [w * np.asarray(one) for w, one in zip(weights, each, strict=True)]
        np.testing.assert_allclose(found_leaf, sum(terms), atol=1e-5)


def explicit(*axes):
    return jax.make_mesh((2, 2), axes, axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])


def on(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5), found, expected)


@pytest.mark.parametrize(
    ("method", "rows_per_unit"),
    [
        *(("book_keeping", 1), ("ghost", 8)),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in (("book_keeping", 8), ("ghost", 1), ("vmap", 1), ("vmap", 8))),
    ],
)
def test_an_explicit_mesh_gives_the_same_and_leaves_arrays_where_they_were(method, rows_per_unit):
    loss = lambda k, x, gain: (products(k, x) * gain, {"x": x})  # noqa: E731
    options = {"clipping_norm": 1.0, "shared_argnums": (2,), "method": method, "rows_per_unit": rows_per_unit}
    gradient, mesh, gain = dpx.clipped_grad(loss, 0, True, **options), explicit("rows", "columns"), jnp.float32(0.5)
    found = jax.jit(gradient)(on(mesh, K, None, "columns"), on(mesh, X, "rows"), on(mesh, gain))
    close(found, jax.jit(gradient)(K, X, gain))
    assert found.total.sharding.spec == P(None, "columns")
    place = "rows" if rows_per_unit == 1 else None
    assert found.norms.sharding.spec == P(place) and found.aux["x"].sharding.spec == P(place, None)


@pytest.mark.slow
def test_an_explicit_mesh_without_jit_under_set_mesh_and_explained():
    gradient, mesh = dpx.clipped_grad(products, clipping_norm=1.0), explicit("rows", "columns")
    k, x, expected = on(mesh, K), on(mesh, X, "rows"), jax.jit(gradient)(K, X)
    close(gradient(k, x), expected)
    with jax.set_mesh(mesh):
        close(jax.jit(gradient)(k, x), expected)
        assert [taken.route for taken in gradient.explain(k, x)] == ["product"]
    assert [taken.route for taken in gradient.explain(k, x)] == ["product"]


@pytest.mark.parametrize(
    "method", ["book_keeping", "plain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ghost", "traced", "vmap"))]
)
def test_sums_of_batches_on_an_explicit_mesh(method):
    losses = lambda p, b: (jnp.sin(ops.dense(b["x"], p["k"])).sum(-1), {})  # noqa: E731

    def summed(k, x):
        if method == "plain":
            return dpx.plain_sum(losses, {"k": k}, {"x": x})
        return dpx.clipped_sum(losses, {"k": k}, {"x": x}, weights=lambda norms: 1 / jnp.maximum(norms, 1), method=method)

    mesh = explicit("rows", "columns")
    close(jax.jit(summed)(on(mesh, K, None, "columns"), on(mesh, X, "rows")), summed(K, X))


def test_an_array_of_an_explicit_mesh_that_the_loss_closes_over_is_named():
    mesh = explicit("rows", "columns")
    gain = on(mesh, jnp.ones(D))
    with pytest.raises(ConfigError, match="^the loss: closes over an array that lies on an Explicit mesh.*shared_argnums"):
        dpx.clipped_grad(lambda k, x: products(k * gain, x), clipping_norm=1.0)(K, on(mesh, X, "rows"))


def test_shapes_of_shared_arguments_are_enough_to_explain():
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in (K, X, jnp.ones(D))]
    gradient = dpx.clipped_grad(lambda k, x, gain: products(k, x * gain), clipping_norm=1.0, shared_argnums=(2,))
    assert [taken.route for taken in gradient.explain(*shapes)] == ["product"]


NARROW = jnp.float8_e4m3fn
# Each reads a parameter of eight bits; its gradient is that of the same number in float32.
IN_EIGHT_BITS = {
    "product": lambda k, x: jnp.sin(x @ k.astype(jnp.float32)).sum(),
    "product_of_a_layer": lambda k, x: jnp.sin(jnp.outer(x, x) @ k.astype(jnp.float32) / 8).sum(),
    "elementwise": lambda k, x: jnp.sin(x * k.astype(jnp.float32)).sum(),
    "several": lambda k, x: jnp.sin(jnp.sin(x @ k.astype(jnp.float32)) @ k.astype(jnp.float32)).sum(),
}


WAYS: dict[str, dict[str, Any]] = {"book_keeping": {}, "ghost": {"method": "ghost"}, "grams": {"kept_bytes": 0}}
# Each way, and each reader.
EIGHT_BIT_CELLS = {("product_of_a_layer", "grams"), ("elementwise", "ghost"), ("several", "book_keeping")}


@pytest.mark.parametrize(
    ("name", "way"),
    [pytest.param(name, way, marks=[pytest.mark.slow] * ((name, way) not in EIGHT_BIT_CELLS)) for name in IN_EIGHT_BITS for way in WAYS],
)
def test_parameters_of_eight_bits_have_sums_of_float32(name, way):
    loss, narrow, options = IN_EIGHT_BITS[name], K.astype(NARROW), WAYS[way]
    found = dpx.clipped_grad(loss, clipping_norm=1.0, **options)(narrow, X)
    expected = jax.jit(dpx.clipped_grad(loss, clipping_norm=1.0, method="vmap"))(narrow.astype(jnp.float32), X)
    assert found.total.dtype == jnp.float32
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-5)
    np.testing.assert_allclose(found.total, expected.total, rtol=1e-4, atol=1e-4)


def test_one_gradient_for_each_example_in_eight_bits_is_refused():
    with pytest.raises(ConfigError, match="^k: is of type float8_e4m3fn, .*Give it in float32, or use method='book_keeping'.$"):
        dpx.clipped_grad(lambda p, x: IN_EIGHT_BITS["product"](p["k"], x), clipping_norm=1.0, method="vmap")({"k": K.astype(NARROW)}, X)


@pytest.mark.parametrize(
    "options",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in ({}, {"method": "ghost"})), {"kept_bytes": 0}],
    ids=["book_keeping", "ghost", "grams"],
)
def test_a_product_of_eight_bits_counts_its_factors_as_they_are_stored(options):
    rows = jnp.asarray(np.random.default_rng(3).normal(0, 1, (B, 6, D)), jnp.float32)

    def loss(k, x):
        return (jax.lax.dot(x.astype(NARROW), k.astype(NARROW), preferred_element_type=jnp.float32) ** 2).sum()

    found = dpx.clipped_grad(loss, clipping_norm=1.0, **options)(K, rows)
    a, k = np.asarray(rows.astype(NARROW), np.float64), np.asarray(K.astype(NARROW), np.float64)
    gradients = np.einsum("btp,btd->bpd", a, 2 * a @ k)
    norms = np.sqrt(np.square(gradients).sum((1, 2)))
    np.testing.assert_allclose(found.norms, norms, rtol=1e-4)
    weights = (1 - MARGINS["bfloat16"]) / np.maximum(norms, 1)
    np.testing.assert_allclose(found.total, np.einsum("b,bpd->pd", weights, gradients), rtol=1e-4, atol=1e-4)


@METHODS
def test_what_a_loss_returns_beside_its_value_is_refused_by_name(method):
    gradient = lambda aux, **options: dpx.clipped_grad(  # noqa: E731
        lambda k, x, key: (products(k, x), aux(key)), has_aux=True, clipping_norm=1.0, method=method, **options
    )
    keys = jax.random.split(jax.random.key(0), B)
    with pytest.raises(ConfigError, match="^aux/name: is a str and not an array"):
        gradient(lambda key: {"name": "text"})(K, X, keys)
    with pytest.raises(ConfigError, match="^aux: is a random key, which cannot be added up over the 2 rows of a unit"):
        gradient(lambda key: key, rows_per_unit=2)(K, X, keys)
    assert gradient(lambda key: key)(K, X, keys).aux.shape == (B,)
    found = jax.jit(gradient(lambda key: {"count": 3, "nothing": None}, rows_per_unit=2))(K, X, keys).aux
    np.testing.assert_array_equal(found["count"], [6] * (B // 2))


def test_a_module_with_values_that_are_no_arrays_is_refused_with_the_line_that_works():
    module = equinox.nn.MLP(D, 1, 3, 1, key=jax.random.key(0))
    with pytest.raises(ConfigError, match=r"^activation: is a .* not an array. .*eqx.partition\(model, eqx.is_inexact_array\)"):
        dpx.clipped_grad(lambda module, x: module(x)[0], clipping_norm=1.0)(module, X)
    arrays, others = equinox.partition(module, equinox.is_inexact_array)
    found = jax.jit(dpx.clipped_grad(lambda arrays, x: equinox.combine(arrays, others)(x)[0], clipping_norm=1.0))(arrays, X)
    assert jax.tree.structure(found.total) == jax.tree.structure(arrays)


TYPES = [np.ones(3, np.int32), np.ones(3, bool), jnp.ones(3, jnp.int4), np.ones(3, np.complex64), np.zeros(3, jax.dtypes.float0)]


@pytest.mark.parametrize("method", ["book_keeping", "ghost", "vmap", "traced", "plain"])
@pytest.mark.parametrize("leaf", [*TYPES, jax.random.split(jax.random.key(0), 3)], ids=lambda leaf: str(leaf.dtype))
def test_a_parameter_that_has_no_gradient_is_refused_by_every_way(leaf, method):
    params, line = (
        {"k": K, "n": leaf},
        "^n: is of type .*, which has no gradient. Do not differentiate by it: pass it as another argument.$",
    )
    losses = lambda p, b: (jnp.sin(ops.dense(b["x"], p["k"])).sum(-1), {})  # noqa: E731
    with pytest.raises(ConfigError, match=line):
        if method == "plain":
            dpx.plain_sum(losses, params, {"x": X})
        else:
            dpx.clipped_sum(losses, params, {"x": X}, weights=lambda norms: 1 / jnp.maximum(norms, 1), method=method)
    if method in ("book_keeping", "ghost", "vmap"):
        gradient = dpx.clipped_grad(lambda p, x: products(p["k"], x), clipping_norm=1.0, method=method)
        for run in (gradient, gradient.explain):
            with pytest.raises(ConfigError, match=line):
                run(params, X)


@jax.custom_vjp
def chosen(k, i, is_on):
    return jnp.where(is_on, 2 * k[i], 0)


def _chosen_backward(saved, g):
    k, i, is_on = saved
    none = lambda x: np.zeros(x.shape, jax.dtypes.float0)  # noqa: E731
    return jnp.zeros_like(k).at[i].add(jnp.where(is_on, 2 * g, 0)), none(i), none(is_on)


chosen.defvjp(lambda k, i, is_on: (chosen(k, i, is_on), (k, i, is_on)), _chosen_backward)


def rounded(x, dtype):
    return jnp.round(4 * x).astype(dtype)


def carried(k, x, ids, _):
    def step(t, state):
        at = (state[0] + ids[t]) % D
        return at, jnp.tanh(state[1] @ k + k[at])

    return jax.lax.fori_loop(0, 2, step, (jnp.int32(0), x))[1].sum()


# Losses of whole numbers and truth values beside a parameter, and computed from it.
WHOLE = {
    "float0": lambda k, x, ids, flags: (jnp.tanh(x @ k) * chosen(k[0], ids[0], flags[0])).sum(),
    "float0_in_a_loop": lambda k, x, ids, flags: jax.lax.scan(lambda h, i: (jnp.tanh(h @ k + chosen(2 * k, i, flags[0])), None), x, ids)[
        0
    ].sum(),
    "numbers_of_rounds": lambda k, x, ids, flags: jax.lax.scan(lambda h, n: (jnp.tanh(h @ (k * n)), None), x, ids)[0].sum(),
    "masks_of_rounds": lambda k, x, ids, flags: jax.lax.scan(lambda h, on: (jnp.tanh(h @ jnp.where(on, k, 0)), None), x, flags)[0].sum(),
    "carried": carried,
    "branches": lambda k, x, ids, flags: jax.lax.cond(ids[0] > 1, lambda i: (x @ k)[i] ** 2, lambda i: (x * k[i]).sum(), ids[1]),
    "rounded": lambda k, x, ids, flags: jnp.tanh(x @ (rounded(k, jnp.int8).astype(k.dtype) + k)).sum(),
    "straight_through": lambda k, x, ids, flags: jnp.tanh(x @ (k + jax.lax.stop_gradient(rounded(k, k.dtype) / 4 - k))).sum(),
    "product_of_integers": lambda k, x, ids, flags: (
        jax.lax.dot(rounded(x, jnp.int8), rounded(k, jnp.int8), preferred_element_type=jnp.int32) * jnp.sin(x @ k)
    ).sum(),
    "largest": lambda k, x, ids, flags: (x @ k)[jnp.argmax(k[0])] ** 2 + jnp.where(k > 0, k, 0).sum(),
    "bits": lambda k, x, ids, flags: (jax.lax.bitcast_convert_type(k, jnp.int32) % 3).sum() * jnp.sin(x @ k).sum(),
}


# By one way each, in turn: numbers beside a parameter, of rounds, as masks, carried, in a branch, and computed from a parameter.
QUICK = ("float0", "numbers_of_rounds", "masks_of_rounds", "carried", "branches", "bits")
TURNS = {name: number % len(WAYS) for number, name in enumerate(QUICK)}
WHOLE_CELLS = [(name, way, TURNS.get(name) == place) for name in WHOLE for place, way in enumerate(WAYS)]


@pytest.mark.parametrize(
    ("name", "way"),
    [pytest.param(name, way, marks=[pytest.mark.slow] * (not is_its_turn)) for name, way, is_its_turn in WHOLE_CELLS],
)
def test_whole_numbers_beside_a_parameter_and_computed_from_it(name, way):
    drawn = np.random.default_rng(4)
    batch = X / 10, jnp.asarray(drawn.integers(0, D, (B, 3)), jnp.int32), jnp.asarray(drawn.random((B, 3)) < 0.5)
    one = jax.jit(jax.grad(WHOLE[name]))
    gradients = [np.asarray(one(K, *(leaf[at] for leaf in batch)), np.float64) for at in range(B)]
    norms = [np.linalg.norm(gradient) for gradient in gradients]
    held = 0.3 * (1 - MARGINS["float32"])
    expected = sum(gradient * min(1, held / max(norm, 1e-30)) for gradient, norm in zip(gradients, norms, strict=True))
    found = jax.jit(dpx.clipped_grad(WHOLE[name], clipping_norm=0.3, **WAYS[way]))(K, *batch)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.total, expected, atol=1e-5)
