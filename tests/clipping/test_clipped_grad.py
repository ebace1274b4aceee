"""Losses of one example, in other people's words: exact, whatever they are made of, and cheap where dpx knows how."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import dpx
from dpx.clipping.rounding import MARGINS
from dpx.declaration import ConfigError
from tests.clipping import stock
from tests.clipping.batches import QUICKLY

LIMIT = 0.5
# What is left for rounding.
HELD = LIMIT * (1 - MARGINS["float32"])


def one_at_a_time(loss, params, rows):
    """Norms and gradients of each example alone, by autodiff."""
    one = jax.jit(jax.value_and_grad(lambda p, e: loss(p, e)), compiler_options=QUICKLY)
    pairs = [one(params, jax.tree.map(lambda leaf, b=b: leaf[b], rows)) for b in range(jax.tree.leaves(rows)[0].shape[0])]
    leaves = [[np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(gradient)] for _, gradient in pairs]
    return np.sqrt([sum(np.square(leaf).sum() for leaf in each) for each in leaves]), leaves, [float(value) for value, _ in pairs]


def assert_exact(loss, params, rows, **options):
    norms, gradients, losses = one_at_a_time(loss, params, rows)
    run = jax.jit(dpx.clipped_grad(loss, clipping_norm=LIMIT, **options), compiler_options=QUICKLY)
    found = run(params, rows)
    np.testing.assert_allclose(found.norms, norms, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(found.losses, losses, rtol=2e-5)
    for number, leaf in enumerate(jax.tree.leaves(found.total)):
        terms = [HELD / max(norm, HELD) * each[number] for norm, each in zip(norms, gradients, strict=True)]
        scale = max(np.abs(term).max() for term in terms)
        np.testing.assert_allclose(leaf, sum(terms), rtol=0, atol=2e-5 * scale + 1e-7)


# Made of the layers of others: of `gpt2_tied` (a tied head, a causal mask), in a loop and out of one, by another library's names; cells
# and convolutions are in test_drawn_loops.py and test_convolution.py.
LIKE_OTHERS = ("gpt2", "bert", "bert_tied", "linen_scanned", "nnx", "haiku", "equinox", "haiku_lstm", "convolution")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LIKE_OTHERS)) for name in stock.MODELS])
def test_stock_models_are_exact_and_take_the_routes_said(name):
    loss, params, routes = stock.MODELS[name]()
    assert_exact(loss, params, stock.batch())
    taken = dpx.clipped_grad(loss, clipping_norm=LIMIT).explain(params, stock.batch())
    assert {entry.route for entry in taken} == routes
    assert all(entry.readers and entry.bytes_per_example > 0 for entry in taken)


@pytest.mark.slow
@pytest.mark.parametrize("name", stock.MODELS)
@pytest.mark.parametrize("options", [{"method": "ghost"}, {"kept_bytes": 0}], ids=["ghost", "grams"])
def test_stock_models_are_exact_by_other_ways(name, options):
    loss, params, _ = stock.MODELS[name]()
    assert_exact(loss, params, stock.batch(), **options)


def drawn(**shapes):
    generator = np.random.default_rng(0)
    return {name: jnp.asarray(generator.normal(0, 0.5, shape), jnp.float32) for name, shape in shapes.items()}


D = stock.D
ODD = {
    "cast_and_transposed": (
        drawn(kernel=(D, D)),
        lambda p, e: jnp.square(e["x"].astype(jnp.bfloat16) @ p["kernel"].T.astype(jnp.bfloat16)).mean().astype(jnp.float32),
    ),
    "first_in_a_product": (drawn(kernel=(4, D)), lambda p, e: jnp.sin(p["kernel"] @ e["x"].T).sum()),
    "a_slice_and_the_whole": (drawn(kernel=(D, D)), lambda p, e: jnp.sin(e["x"] @ p["kernel"] + e["x"] @ p["kernel"][:, ::-1]).sum()),
    "a_slice": (drawn(kernel=(2 * D, D)), lambda p, e: jnp.sin(e["x"] @ p["kernel"][D:]).sum()),
    "a_reshape": (drawn(kernel=(D * 4,)), lambda p, e: jnp.sin(e["x"] @ p["kernel"].reshape(D, 4)).sum()),
    "two_of_one": (drawn(kernel=(D, D)), lambda p, e: jnp.sin(jnp.tanh(e["x"] @ p["kernel"]) @ p["kernel"]).sum()),
    "and_transposed": (drawn(kernel=(D, D)), lambda p, e: jnp.sin(jnp.tanh(e["x"] @ p["kernel"]) @ p["kernel"].T).sum()),
    "a_product_and_its_norm": (drawn(kernel=(D, D)), lambda p, e: jnp.sin(e["x"] @ p["kernel"]).sum() + jnp.square(p["kernel"]).sum()),
    "two_parameters_multiplied": (drawn(a=(D, 2), b=(2, D)), lambda p, e: jnp.sin(e["x"] @ (p["a"] @ p["b"])).sum()),
    "the_same_for_all": (drawn(kernel=(D, D)), lambda p, e: jnp.sin(jnp.ones((3, D)) @ p["kernel"]).sum() * e["x"].sum()),
    "in_one_branch": (
        drawn(kernel=(D, D)),
        lambda p, e: jax.lax.cond(e["x"].sum() > 0, lambda x: jnp.sin(x @ p["kernel"]), jnp.cos, e["x"]).sum(),
    ),
    "in_rounds_and_cast": (
        drawn(kernel=(D, D), bias=(D,)),
        lambda p, e: jax.lax.scan(lambda c, x: (jnp.tanh(x @ p["kernel"] + c @ p["kernel"] + p["bias"]), None), e["x"][0], e["x"])[0].sum(),
    ),
    "carried": (
        drawn(kernel=(D, D)),
        lambda p, e: jax.lax.fori_loop(0, 3, lambda _, c: (c[0], jnp.tanh(c[1] @ c[0])), (p["kernel"], e["x"]))[1].sum(),
    ),
    "stopped": (drawn(kernel=(D, D)), lambda p, e: (jnp.sin(e["x"] @ p["kernel"]) * jax.lax.stop_gradient(p["kernel"]).sum()).sum()),
    "not_read": (drawn(kernel=(D, D), other=(3,)), lambda p, e: jnp.sin(e["x"] @ p["kernel"]).sum()),
    "by_a_rule_of_its_own": (drawn(bias=(D,)), lambda p, e: (e["x"] * jax.nn.relu(p["bias"])).sum()),
    "joined": (
        drawn(a=(D, 2), b=(D, 3), bias=(5,)),
        lambda p, e: jnp.sin(
            e["x"] @ jnp.concatenate([p["a"], p["b"], jnp.zeros((D, 0))], 1) + jnp.concatenate([p["bias"][:2], p["bias"][2:]])
        ).sum(),
    ),
    "joined_first_and_twice": (
        drawn(a=(2, D), b=(3, D)),
        lambda p, e: jnp.exp(
            jnp.sin(jnp.concatenate([p["a"], p["b"], p["a"], jnp.ones((1, D))]) @ e["x"].T * jnp.arange(8.0)[:, None])
        ).sum(),
    ),
    "joined_along_what_is_contracted": (
        drawn(a=(3, D), b=(D - 3, D)),
        lambda p, e: jnp.sin(e["x"] @ jnp.concatenate([p["a"], p["b"]])).sum() + jnp.sin(e["x"] @ p["a"].T).sum(),
    ),
    "joined_outside_a_loop": (
        drawn(a=(D, 3), b=(D, D - 3), bias=(3,)),
        lambda p, e: (
            lambda kernel, bias: jax.lax.scan(
                jax.checkpoint(lambda c, x: (jnp.tanh(c @ kernel + x @ kernel + bias), None)), jnp.ones(D), e["x"]
            )[0].sum()
        )(jnp.concatenate([p["a"], p["b"]], 1), jnp.concatenate([p["bias"], jnp.ones(D - 3)])),
    ),
    "joined_in_one_branch_and_stopped": (
        drawn(a=(D, 3), b=(D, D - 3)),
        lambda p, e: (
            lambda kernel: (
                jax.lax.cond(e["x"].sum() > 0, lambda x: jnp.sin(x @ kernel), jnp.cos, e["x"]) * jax.lax.stop_gradient(kernel).sum()
            ).sum()
        )(jnp.concatenate([p["a"], p["b"]], 1)),
    ),
    "looked_up_past_the_end": (drawn(table=(5, D)), lambda p, e: jnp.sin(jnp.take(p["table"], e["id"], axis=0, mode="clip")).sum()),
    "looked_up_one_by_one": (drawn(table=(stock.V, D)), lambda p, e: jax.lax.map(lambda id: jnp.sin(p["table"][id]), e["id"]).sum()),
    "looked_up_on_another_axis": (drawn(table=(D, stock.V)), lambda p, e: jnp.sin(jnp.take(p["table"], e["id"], axis=1)).sum()),
}


# Parts of a kernel and joined kernels are in test_parts.py, several uses in test_kept_uses.py, branches and loops among the attacks.
LIKE_PARTS = ("a_slice", "a_slice_and_the_whole", "two_of_one", "in_one_branch", "carried", "stopped", "not_read", "first_in_a_product")
SLOW_READERS = (*LIKE_PARTS, *(name for name in ODD if name.startswith("joined") and name != "joined_outside_a_loop"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_READERS)) for name in ODD])
def test_odd_readers_are_exact(name):
    params, loss = ODD[name]
    rows = {name: leaf for name, leaf in stock.batch().items() if name != "label"}
    if name == "cast_and_transposed":
        with jax.numpy_dtype_promotion("standard"):
            found = jax.jit(dpx.clipped_grad(loss, clipping_norm=LIMIT))(params, rows)
        np.testing.assert_allclose(found.norms, one_at_a_time(loss, params, rows)[0], rtol=2e-2)
    else:
        assert_exact(loss, params, rows)


@pytest.mark.slow
def test_gates_of_a_cell_that_are_joined_in_each_round_are_not_copied():
    cell = linen.RNN(linen.OptimizedLSTMCell(D))
    rows = {"x": stock.batch()["x"]}
    params = cell.init(jax.random.key(0), rows["x"][0])
    loss = lambda p, e: sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(cell.apply(p, e["x"])))  # noqa: E731
    assert_exact(loss, params, rows)
    taken = dpx.clipped_grad(loss, clipping_norm=LIMIT).explain(params, rows)
    assert {one.path.split("/")[-1]: one.route for one in taken} == {"kernel": "product", "bias": "elementwise"}


def test_units_of_rows_padding_and_counts():
    params, rows = (
        drawn(kernel=(D, D), table=(stock.V, D)),
        jax.tree.map(lambda leaf: jnp.tile(leaf, (2,) + (1,) * (leaf.ndim - 1)), stock.batch()),
    )
    is_padding_B = jnp.array([False, False, False, True, False, False])
    rows["x"] = rows["x"].at[3].set(jnp.nan)

    def loss(p, e):
        y = jnp.sin((e["x"] + p["table"][e["id"]]) @ p["kernel"])
        return y.sum(), {"positive": (y > 0).sum()}

    found = jax.jit(dpx.clipped_grad(loss, has_aux=True, clipping_norm=LIMIT, rows_per_unit=2))(params, rows, is_padding=is_padding_B)
    _, gradients, losses = one_at_a_time(lambda p, e: loss(p, e)[0], params, rows)
    units = [[sum(leaves) for leaves in zip(*(gradients[row] for row in unit), strict=True)] for unit in ((0, 1), (2,), (4, 5))]
    norms = np.sqrt([sum(np.square(leaf).sum() for leaf in unit) for unit in units])
    np.testing.assert_allclose(found.norms, norms, rtol=2e-5)
    np.testing.assert_allclose(found.losses, [losses[0] + losses[1], losses[2], losses[4] + losses[5]], rtol=2e-5)
    assert found.aux["positive"].shape == (3,)


def test_strict_refuses_copies_by_name_and_reader():
    loss = lambda p, e: (e["x"] * jnp.cumsum(p["kernel"])).sum()  # noqa: E731
    with pytest.raises(ConfigError, match="kernel: is read by cumsum"):
        dpx.clipped_grad(loss, clipping_norm=LIMIT, strict=True)({"kernel": jnp.ones(stock.D)}, stock.batch())
    loss, params, _ = stock.MODELS["haiku_lstm"]()
    jax.eval_shape(dpx.clipped_grad(loss, clipping_norm=LIMIT, strict=True), params, stock.batch())


@pytest.mark.parametrize(
    "loss, message",
    [
        (lambda p, e: e["x"] @ p["kernel"], "is not one floating-point number"),
        (lambda p, e: (p["kernel"] > 0).sum(), "is not one floating-point number"),
        (lambda p, e: [p["kernel"].sum()], "a list from the loss: is not one number"),
        (lambda p, e: (p["kernel"].sum(), {}), "a tuple from the loss: is not one number"),
    ],
)
def test_a_loss_that_is_not_a_number_is_refused(loss, message):
    with pytest.raises(ConfigError, match=message):
        dpx.clipped_grad(loss, clipping_norm=LIMIT)(drawn(kernel=(D, D)), stock.batch())


def test_parameters_that_have_no_gradient_are_refused():
    with pytest.raises(ConfigError, match="^step: is of type int32"):
        dpx.clipped_grad(lambda p, e: 0.0, clipping_norm=LIMIT)({"step": jnp.zeros(3, jnp.int32)}, stock.batch())
