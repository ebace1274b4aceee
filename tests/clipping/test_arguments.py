"""Odd arguments of clipped sums: right, or one line that says which argument and what to give.

B: examples, D: width.
"""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import ops
from dpx.declaration import ConfigError

B, D = 4, 3
PARAMS = {"k": jnp.asarray(np.random.default_rng(0).normal(0, 1, (D, D)), jnp.float32)}
ROWS = {"x": jnp.asarray(np.random.default_rng(1).normal(0, 1, (B, D)), jnp.float32)}
METHODS = pytest.mark.parametrize("method", ["book_keeping", "ghost", "vmap", "traced"])


def losses(params, batch):
    found = jnp.sin(ops.dense(batch["x"], params["k"])).sum(-1)
    return found, {"positive": found > 0}


def clip(norms_B):
    return 1 / jnp.maximum(norms_B, 1)


def summed(params=PARAMS, rows=ROWS, **options):
    return dpx.clipped_sum(losses, params, rows, **({"weights": clip} | options))


REFUSED = {
    "mask_of_integers": ({"is_padding_B": jnp.array([0, 0, 1, 0])}, "^is_padding_B: is of type int32"),
    "mask_of_floats": ({"is_padding_B": jnp.zeros(B)}, "^is_padding_B: is of type float32"),
    "mask_as_a_list": ({"is_padding_B": [False] * B}, "^is_padding_B: is of type list"),
    "mask_as_a_word": ({"is_padding_B": "no"}, "^is_padding_B: is of type str"),
    "mask_of_another_length": (
        {"is_padding_B": jnp.zeros(B + 1, bool)},
        r"^is_padding_B\(5,\): does not have one flag for each of the 4 rows",
    ),
    "weights_of_one_number": ({"weights": lambda norms: 1.0}, r"^weights: gives an array \(\) of type float32 for norms \(4,\)"),
    "weights_of_a_column": ({"weights": lambda norms: norms[:, None]}, r"^weights: gives an array \(4, 1\)"),
    "weights_of_integers": ({"weights": lambda norms: jnp.ones(B, int)}, "^weights: gives an array .* of type int32"),
    "weights_as_a_number": ({"weights": 0.5}, "^weights=0.5: is not a function of norms"),
    "no_weights": ({"weights": None}, "^weights=None: is not a function of norms"),
    "rows_as_a_word": ({"rows_per_unit": "2"}, "^rows_per_unit='2': is not a whole number above zero"),
    "rows_as_a_float": ({"rows_per_unit": 2.0}, "^rows_per_unit=2.0: is not a whole number above zero"),
    "no_rows": ({"rows_per_unit": 0}, "^rows_per_unit=0: is not a whole number above zero"),
    "a_batch_of_words": ({"rows": {"x": ROWS["x"], "name": "text"}}, "^batch/name: is a str and not an array"),
    "a_batch_of_lists": ({"rows": {"x": [[1.0] * D] * B}}, "^batch/x/0/0: is a float and not an array"),
    "no_batch": ({"rows": None}, "^batch: contains no array"),
    "an_array_without_axes": ({"rows": {"x": ROWS["x"], "rate": jnp.zeros(())}}, "^batch of leading axes"),
    "arrays_of_two_lengths": ({"rows": {"x": ROWS["x"], "y": jnp.zeros(3)}}, r"^batch of leading axes \[3, 4\]"),
    "one_key_for_all": ({"rows": {"x": ROWS["x"], "key": jax.random.key(0)}}, "^batch/key: is one random key for all examples"),
    "parameters_as_a_word": ({"params": {"k": "weights"}}, "^k: is a str and not an array"),
    "no_parameters": ({"params": None}, "^params: contain no parameter"),
    "a_method_of_nobody": ({"method": "fast"}, "^method='fast': no such method"),
    "a_list_of_methods": ({"method": ["vmap"]}, r"^method=\['vmap'\]: no such method"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_in_one_line(name):
    options, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as refused:
        summed(**options)
    assert "\n" not in str(refused.value)


@METHODS
def test_weights_of_another_shape_are_refused_by_every_method(method):
    with pytest.raises(ConfigError, match="^weights: gives an array"):
        summed(method=method, weights=lambda norms_B: norms_B.max())


@METHODS
def test_a_mask_of_integers_is_refused_by_every_method(method):
    """With two rows a unit, `~1` counted as a row: padding was added to the sum."""
    with pytest.raises(ConfigError, match="^is_padding_B: is of type int32"):
        summed(method=method, is_padding_B=jnp.array([0, 1, 0, 0]), rows_per_unit=2)


@METHODS
@pytest.mark.parametrize("rows_per_unit", [1, 2])
def test_no_rows_give_zeros(method, rows_per_unit):
    found = jax.jit(lambda p, b: summed(p, b, method=method, rows_per_unit=rows_per_unit))(PARAMS, {"x": jnp.zeros((0, D))})
    np.testing.assert_array_equal(found.total["k"], np.zeros((D, D)))
    assert found.norms_B.shape == found.losses_B.shape == found.is_counted_B.shape == found.counts["positive"].shape == (0,)


def test_no_rows_of_a_plain_sum_give_zeros():
    found = dpx.plain_sum(losses, PARAMS, {"x": jnp.zeros((0, D))})
    np.testing.assert_array_equal(found.total["k"], np.zeros((D, D)))
    assert found.losses_B.shape == (0,) and found.norms_B is None


@METHODS
def test_a_symbolic_number_of_rows_is_named(method):
    size = jax.export.symbolic_shape("rows, 3")
    with pytest.raises(ConfigError, match="^batch of rows rows: is symbolic"):
        jax.export.export(jax.jit(lambda x: summed(rows={"x": x}, method=method).total))(jax.ShapeDtypeStruct(size, jnp.float32))


def test_vmap_keeps_the_type_of_what_a_loop_carries():
    narrow, start = {"k": PARAMS["k"].astype(jnp.bfloat16)}, jnp.ones(D, jnp.bfloat16)

    def carried(params, batch):
        def step(c, x):
            return jnp.tanh(c * x.astype(jnp.bfloat16) + jnp.diag(params["k"])), None

        return jax.vmap(lambda x: jax.lax.scan(step, start, x[None])[0].astype(jnp.float32).sum())(batch["x"])

    found = dpx.clipped_sum(carried, narrow, ROWS, weights=jnp.ones_like, method="vmap")
    expected = jax.grad(lambda p: carried(p, ROWS).sum())(narrow)
    assert {leaf.dtype for leaf in jax.tree.leaves(found.total)} == {jnp.dtype("float32")}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.03, atol=0.03), found.total, expected)
