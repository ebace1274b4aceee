"""`dpx.clipped_grad` as a transform: which arguments it takes, what it returns, and what it refuses, in the caller's terms.

B: examples, D: width.
"""

import inspect
import math
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping.rounding import MARGINS
from dpx.declaration import ConfigError

B, D = 4, 3
DRAWN = np.random.default_rng(0)
K, V = (jnp.asarray(DRAWN.normal(0, 1, (D, D)), jnp.float32) for _ in range(2))
X, Y = jnp.asarray(DRAWN.normal(0, 1, (B, D)), jnp.float32), jnp.asarray(DRAWN.normal(0, 1, B), jnp.float32)


def loss(params, x, y):
    return jnp.square(jnp.tanh(x @ params["k"]).sum() - y)


def sums(function, argnums, *args, batched=None):
    """(sum of gradients clipped to norm one, norms) by autodiff, one row at a time; `batched`: places of arguments that have rows."""
    batched = range(1, len(args)) if batched is None else batched
    rows = [[arg[b] if place in batched else arg for place, arg in enumerate(args)] for b in range(B)]
    gradients = [jax.grad(function, argnums)(*row) for row in rows]
    norms = [math.sqrt(sum(float(jnp.square(leaf).sum()) for leaf in jax.tree.leaves(one))) for one in gradients]
    held = 1 - MARGINS["float32"]
    factors = [held / max(held, norm) for norm in norms]
    return jax.tree.map(lambda *leaves: sum(c * leaf for c, leaf in zip(factors, leaves, strict=True)), *gradients), norms


def close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_it_takes_arguments_by_position_like_grad():
    expected, norms = sums(loss, 0, {"k": K}, X, Y)
    gradient = dpx.clipped_grad(loss, clipping_norm=1.0)
    found = jax.jit(gradient)({"k": K}, X, Y)
    close(found.total, expected)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    np.testing.assert_allclose(found.losses, jax.vmap(loss, (None, 0, 0))({"k": K}, X, Y), rtol=1e-5)
    assert found.aux == {} and found.is_counted.all()


@pytest.mark.parametrize("argnums", [(1, 0), -3, *(pytest.param(places, marks=pytest.mark.slow) for places in (0, 1, (0, 1), [1]))])
def test_argnums_may_be_one_or_several_and_come_back_in_that_shape(argnums):
    def two(k, v, x, y):
        return jnp.square(jnp.tanh(x @ k @ v["v"]).sum() - y)

    shared = tuple({0, 1} - {place % 4 for place in ([argnums] if isinstance(argnums, int) else argnums)})
    found = dpx.clipped_grad(two, argnums, clipping_norm=1.0, shared_argnums=shared)(K, {"v": V}, X, Y)
    expected, norms = sums(two, argnums, K, {"v": V}, X, Y, batched=(2, 3))
    close(found.total, expected)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)


def test_shared_arguments_may_be_anything():
    def scaled(params, x, how, y):
        return how["scale"] * loss(params, x, y) if how["is_on"] == "yes" else 0.0

    how = {"scale": 2.0, "is_on": "yes"}
    found = dpx.clipped_grad(scaled, clipping_norm=1.0, shared_argnums=2)({"k": K}, X, how, Y)
    close(found.total, sums(lambda p, x, y: 2 * loss(p, x, y), 0, {"k": K}, X, Y)[0])


def test_aux_is_each_examples_own_in_its_own_type_and_zero_where_it_does_not_count():
    def with_aux(params, x, y):
        return loss(params, x, y), (x > 0, {"y": y}, x.sum())

    found = dpx.clipped_grad(with_aux, has_aux=True, clipping_norm=1.0)({"k": K}, X, Y, is_padding=jnp.arange(B) == 1)
    is_positive, named, total = found.aux
    real = np.arange(B) != 1
    assert is_positive.dtype == bool
    np.testing.assert_array_equal(is_positive, (X > 0) & real[:, None])
    np.testing.assert_array_equal(named["y"], np.where(real, Y, 0))
    np.testing.assert_allclose(total, np.where(real, X.sum(1), 0), rtol=1e-5)
    np.testing.assert_array_equal(found.is_counted, real)


@pytest.mark.parametrize("raw", [False, True])
def test_random_keys_are_batched_one_an_example(raw):
    def noisy(params, x, key):
        return (jax.random.bernoulli(key, 0.5, x.shape) * jnp.tanh(x @ params["k"])).sum()

    keys = jax.random.split(jax.random.key(1), B)
    keys = jax.random.key_data(keys) if raw else keys
    found = dpx.clipped_grad(noisy, clipping_norm=1.0)({"k": K}, X, keys)
    close(found.total, sums(noisy, 0, {"k": K}, X, keys)[0])


def test_the_norm_may_be_traced_and_a_narrow_loss_leaves_more_for_rounding():
    large = lambda k, x: 100 * (x @ k["k"]).sum()  # noqa: E731
    narrow = lambda k, x: 100 * (x @ k["k"]).astype(jnp.bfloat16).sum().astype(jnp.float32)  # noqa: E731
    one = {"k": K}, X[:1]
    size = lambda found: float(jnp.linalg.norm(found.total["k"]))  # noqa: E731
    traced = jax.jit(lambda norm: dpx.clipped_grad(large, clipping_norm=norm)(*one))(0.5)
    assert size(traced) == pytest.approx(0.5 * (1 - MARGINS["float32"]), rel=1e-6)
    assert size(dpx.clipped_grad(narrow, clipping_norm=0.5)(*one)) == pytest.approx(0.5 * (1 - MARGINS["bfloat16"]), rel=1e-4)


@pytest.mark.parametrize("norm", [0.0, -1.0, 1e-7, math.nan])
def test_a_traced_norm_that_would_be_refused_lets_nothing_through(norm):
    found = jax.jit(lambda norm: dpx.clipped_grad(loss, clipping_norm=norm)({"k": K}, X, Y))(norm)
    np.testing.assert_array_equal(found.total["k"], 0)


def test_sensitivity_is_of_the_sum_under_each_relation():
    gradient = dpx.clipped_grad(loss, clipping_norm=0.5, rows_per_unit=2)
    assert [gradient.sensitivity(one) for one in ("zero_out", "add_remove", "replace_one")] == [0.5, 0.5, 1.0]
    with pytest.raises(ConfigError, match="^adjacency='swap': no such neighbouring relation"):
        gradient.sensitivity("swap")
    assert not hasattr(dpx.weighted_grad(loss, weights=jnp.ones_like), "sensitivity")


def test_no_rows_give_zeros_and_are_explained():
    gradient = dpx.clipped_grad(lambda p, x, y: (loss(p, x, y), x), has_aux=True, clipping_norm=1.0)
    found = gradient({"k": K}, X[:0], Y[:0])
    close(found.total, {"k": jnp.zeros((D, D))})
    assert found.norms.shape == found.losses.shape == (0,) and found.aux.shape == (0, D)
    assert [taken.route for taken in gradient.explain({"k": K}, X[:0], Y[:0])] == ["product"]


MADE = {
    "no_norm": (lambda: dpx.clipped_grad(loss, clipping_norm=None), "^clipping_norm=None: is not one real number"),
    "norm_as_a_word": (lambda: dpx.clipped_grad(loss, clipping_norm="1"), "^clipping_norm='1': is not one real number"),
    "norms": (lambda: dpx.clipped_grad(loss, clipping_norm=jnp.ones(2)), "is not one real number"),
    "norm_of_zero": (lambda: dpx.clipped_grad(loss, clipping_norm=0.0), "^clipping_norm=0.0: must be at least 1e-06"),
    "norm_too_small": (lambda: dpx.clipped_grad(loss, clipping_norm=9e-7), "must be at least 1e-06"),
    "norm_not_finite": (lambda: dpx.clipped_grad(loss, clipping_norm=math.nan), "must be at least 1e-06"),
    "no_loss": (lambda: dpx.clipped_grad(None, clipping_norm=1.0), "^loss=None: is not a function"),
    "argnums_as_a_word": (
        lambda: dpx.clipped_grad(loss, "params", clipping_norm=1.0),
        "^argnums='params': is not the position of an argument",
    ),
    "no_argnums": (lambda: dpx.clipped_grad(loss, (), clipping_norm=1.0), r"^argnums=\(\): names no argument"),
    "argnums_twice": (lambda: dpx.clipped_grad(loss, (0, 0), clipping_norm=1.0), "name the same argument twice"),
    "trained_and_shared": (lambda: dpx.clipped_grad(loss, clipping_norm=1.0, shared_argnums=(1, 0)), "name the same argument twice"),
    "a_method_of_ops": (lambda: dpx.clipped_grad(loss, clipping_norm=1.0, method="traced"), "^method='traced': no such method"),
    "bytes_as_a_word": (lambda: dpx.clipped_grad(loss, clipping_norm=1.0, kept_bytes="1G"), "^kept_bytes='1G': is not a number of bytes"),
    "no_rows_a_unit": (lambda: dpx.clipped_grad(loss, clipping_norm=1.0, rows_per_unit=None), "^rows_per_unit=None: is not a whole number"),
    "weights_as_a_number": (lambda: dpx.weighted_grad(loss, weights=1.0), "^weights=1.0: is not a function of norms"),
}


@pytest.mark.parametrize("name", MADE)
def test_a_transform_that_cannot_stand_is_refused_when_it_is_made(name):
    make, message = MADE[name]
    with pytest.raises(ConfigError, match=message):
        make()


CALLED = {
    "by_name": (lambda g: g({"k": K}, x=X, y=Y), "^x, y: is given by name"),
    "mask_of_integers": (lambda g: g({"k": K}, X, Y, is_padding=jnp.zeros(B, int)), "^is_padding: is of type int32"),
    "mask_too_long": (lambda g: g({"k": K}, X, Y, is_padding=jnp.zeros(B + 1, bool)), r"^is_padding\(5,\): does not have one flag"),
    "a_word": (lambda g: g({"k": K}, X, "mean"), "^y: is a str and not an array. .*shared_argnums"),
    "a_list": (lambda g: g({"k": K}, X, [0.0] * B), "^y/0: is a float and not an array"),
    "nothing": (lambda g: g({"k": K}, X, None), "^y: contains no array"),
    "one_key": (lambda g: g({"k": K}, X, jax.random.key(0)), "^y: is one random key for all examples"),
    "another_length": (lambda g: g({"k": K}, X, Y[1:]), r"^batch of leading axes \[3, 4\]"),
    "parameters_alone": (lambda g: g({"k": K}), "^the arguments: contain no batched array"),
    "no_arguments": (lambda g: g(), "^argnums=0: is not the position of one of the 0 arguments"),
    "parameters_as_a_word": (lambda g: g("weights", X, Y), "^params: is a str and not an array"),
    "no_parameters": (lambda g: g(None, X, Y), "contain no parameter"),
}


@pytest.mark.parametrize("name", CALLED)
def test_a_call_that_cannot_stand_is_refused_in_one_line(name):
    call, message = CALLED[name]
    with pytest.raises(ConfigError, match=message):
        call(dpx.clipped_grad(loss, clipping_norm=1.0))


def test_a_symbolic_number_of_rows_is_named():
    gradient, shape = dpx.clipped_grad(lambda p, x: (x @ p["k"]).sum(), clipping_norm=1.0), jax.export.symbolic_shape("rows, 3")
    with pytest.raises(ConfigError, match="^batch of rows rows: is symbolic"):
        jax.export.export(jax.jit(lambda x: gradient({"k": K}, x).total))(jax.ShapeDtypeStruct(shape, jnp.float32))


def test_refusals_name_nothing_that_the_caller_did_not_call():
    """For every reason, the advice names neither a declaration of a run nor an argument of another function."""
    gradient = dpx.clipped_grad(lambda p, x: (x @ p["k"]).sum(), clipping_norm=1.0, rows_per_unit=3)
    with pytest.raises(ConfigError, match="^rows_per_unit=3: does not divide the 4 rows") as refused:
        gradient({"k": K}, X)
    assert "clipping_method=" not in str(refused.value) and "privacy." not in str(refused.value)


# That jobs which account start without jax is in tests/test_main.py.
EPSILON = "dpx.privacy.epsilon([(0.01, 10)], noise_multiplier=1.0, delta=1e-5, adjacency='add_remove') > 0"


@pytest.mark.parametrize("asked", ["'dp_accounting' not in sys.modules", pytest.param(EPSILON, marks=pytest.mark.slow)])
def test_the_package_offers_its_functions_without_importing_them(asked):
    script = (
        "import sys, dpx\n"
        "assert {'privacy', 'clipped_grad', 'weighted_grad', 'clipped_sum', 'add_noise', 'load'} <= set(dir(dpx))\n"
        f"assert {asked} and 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_first_arguments_are_those_of_grad():
    assert list(inspect.signature(dpx.clipped_grad).parameters)[1:3] == list(inspect.signature(jax.grad).parameters)[1:3]
