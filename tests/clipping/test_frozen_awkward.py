"""Some parameters trained, and rows without a value, a narrow type, and examples that are tried out on random rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import ops
from dpx.declaration import ConfigError
from dpx.models import trainable
from tests.clipping.batches import QUICKLY, assert_trees_close
from tests.clipping.exactness import SELECTIONS, case
from tests.clipping.test_ops import WEIGHTS

slow = pytest.mark.slow


def clipped(losses, selection, params, batch, **options):
    trained, frozen = trainable.split(params, SELECTIONS[selection])

    def run(trained, frozen, batch):
        return dpx.clipped_sum(losses, trained, batch, frozen=frozen, weights=WEIGHTS, **({"checked": False} | options))

    return jax.jit(run, compiler_options=QUICKLY)(trained, frozen, batch)


@slow
@pytest.mark.parametrize("method", ["book_keeping", "ghost"])
@pytest.mark.parametrize("selection", ["bias", "kernels", "lora", "last_layer"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_without_a_value_counts_for_nothing(selection, method, value):
    losses, params, batch = case("bert", with_adapters=True).parts

    def changed(params, pair):
        losses_B, counts = losses(params, pair["rows"])
        return losses_B * pair["factor"], counts

    pair = {"rows": batch, "factor": jnp.ones(4).at[1].set(value)}
    found = clipped(changed, selection, params, pair, method=method)
    assert np.array_equal(found.is_counted_B, [True, False, True, True])
    others = jax.tree.map(lambda leaf: leaf[np.array([0, 2, 3])], pair)
    expected = clipped(changed, selection, params, others, method="vmap").total
    assert_trees_close(found.total, jax.tree.map(np.asarray, expected), 2e-5, 1e-8)


@slow
@pytest.mark.parametrize("family", ["bert", "decoder"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_bfloat16_is_close(family, selection):
    losses, params, batch = case(family, with_adapters=True).parts
    narrow, *_ = case(family, with_adapters=True, dtype="bfloat16").parts
    found = clipped(narrow, selection, params, batch)
    np.testing.assert_allclose(found.norms_B, clipped(losses, selection, params, batch).norms_B, rtol=0.1)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(found.total))


@slow
@pytest.mark.parametrize("family", ["bert", "decoder"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_examples_are_apart(family, selection):
    losses, params, batch = case(family, with_adapters=True).parts
    trained, frozen = trainable.split(params, SELECTIONS[selection])
    jax.eval_shape(lambda p, f, b: dpx.clipped_sum(losses, p, b, frozen=f, weights=WEIGHTS), trained, frozen, batch)


def test_examples_that_meet_in_frozen_parameters_are_refused():
    """The mean over the batch of what a frozen map makes."""
    params = {"kernel": jnp.ones((4, 3))}
    rows = {"x": jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)}

    def met(params, batch):
        y_Bd = batch["x"] @ params["frozen"]
        return ops.dense(jnp.tanh(y_Bd - y_Bd.mean(0)), params["kernel"]).sum(1)

    with pytest.raises(ConfigError, match="reduces the examples. axis"):
        dpx.clipped_sum(met, params, rows, frozen={"frozen": jnp.eye(4)}, weights=WEIGHTS)
