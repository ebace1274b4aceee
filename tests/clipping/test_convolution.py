"""Convolutions by their own op: every form of the norm, any order of axes, strides, dilations, padding and groups, units of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import norms
from tests.clipping.test_clipped_grad import LIMIT, assert_exact, one_at_a_time

LAST, FIRST = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NHWC")
# kernel, input, dimensions, other options
CASES = {
    "same": ((3, 3, 2, 4), (5, 4, 2), LAST, {"window_strides": (1, 1), "padding": "SAME"}),
    "strides": ((3, 2, 2, 3), (9, 8, 2), LAST, {"window_strides": (2, 3), "padding": "VALID"}),
    "patches": ((2, 2, 2, 3), (4, 6, 2), LAST, {"window_strides": (2, 2), "padding": "VALID"}),
    "dilated": ((3, 2, 3, 2), (2, 9, 8), FIRST, {"window_strides": (2, 1), "padding": ((1, 2), (0, -1)), "rhs_dilation": (2, 1)}),
    "groups": ((6, 1, 3, 3), (3, 5, 4), FIRST, {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 3}),
    "transposed": ((4, 3, 2), (6, 3), ("NWC", "WIO", "NWC"), {"window_strides": (1,), "padding": ((3, 0),), "lhs_dilation": (2,)}),
}


def subject(name):
    kernel, of_input, dimensions, options = CASES[name]
    drawn = np.random.default_rng(len(name))

    def loss(p, x):
        y = jnp.tanh(jax.lax.conv_general_dilated(x[None], p["kernel"], dimension_numbers=dimensions, **options))
        return jnp.square(y * jnp.linspace(0.5, 1, y.size).reshape(y.shape)).sum()

    scales = np.array([0.1, 0.5, 1, 2])[(...,) + (None,) * len(of_input)]
    if name == "dilated":
        kernel = (kernel[2], 2, kernel[0], kernel[1])
    params = {"kernel": jnp.asarray(drawn.normal(0, 0.3, kernel), jnp.float32)}
    return loss, params, jnp.asarray(drawn.normal(0, 1, (4, *of_input)) * scales, jnp.float32)


FORMS = ("kept", "recomputed", "gram")
# Each form, and each kind of convolution.
QUICK = {("patches", "gram"), ("dilated", "kept"), ("groups", "recomputed")}


@pytest.mark.parametrize(
    ("name", "form"),
    [pytest.param(name, form, marks=[pytest.mark.slow] * ((name, form) not in QUICK)) for name in CASES for form in FORMS],
)
def test_sums_and_norms_are_those_of_one_example_at_a_time(name, form, monkeypatch):
    monkeypatch.setattr(norms, "choose", lambda *_: form)
    assert_exact(*subject(name))


@pytest.mark.parametrize("form", ["kept", pytest.param("recomputed", marks=pytest.mark.slow), pytest.param("gram", marks=pytest.mark.slow)])
def test_the_rows_of_a_unit_add_up_before_they_are_squared(form, monkeypatch):
    monkeypatch.setattr(norms, "choose", lambda *_: form)
    loss, params, x = subject("groups")
    wanted, _, _ = one_at_a_time(lambda p, pair: loss(p, pair[0]) + loss(p, pair[1]), params, x.reshape(2, 2, *x.shape[1:]))
    found = jax.jit(dpx.clipped_grad(loss, clipping_norm=LIMIT, rows_per_unit=2))(params, x)
    np.testing.assert_allclose(found.norms, wanted, rtol=2e-5)


def test_a_kernel_that_is_used_twice_has_the_norm_of_the_sum():
    def loss(p, x):
        run = lambda x: jax.lax.conv_general_dilated(x[None], p["kernel"], (1, 1), "SAME", dimension_numbers=LAST)[0]  # noqa: E731
        return jnp.square(run(jnp.tanh(run(x)))).mean()

    drawn = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(drawn.normal(0, 0.3, (3, 3, 2, 2)), jnp.float32)}
    rows = jnp.asarray(drawn.normal(0, 1, (3, 4, 4, 2)), jnp.float32)
    assert_exact(loss, params, rows)
    (taken,) = dpx.clipped_grad(loss, clipping_norm=LIMIT).explain(params, rows)
    assert taken.route == "convolution"


# Which examples count is decided by their norms, whatever op these are of: test_attacks_counted.py.
@pytest.mark.slow
def test_an_input_that_is_not_finite_excludes_its_example_alone():
    loss, params, x = subject("same")
    broken = x.at[1, 0, 0, 0].set(jnp.inf)
    found, kept = (jax.jit(dpx.clipped_grad(loss, clipping_norm=LIMIT))(params, rows) for rows in (broken, x[np.array([0, 2, 3])]))
    assert found.is_counted.tolist() == [True, False, True, True]
    np.testing.assert_allclose(found.total["kernel"], kept.total["kernel"], rtol=1e-5, atol=1e-7)
