"""A model of one's own, made of ops, clips exactly in a loop of one's own; what would be clipped wrongly is refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import ops
from dpx.clipping.weights import clip_weights
from dpx.declaration import Refused
from dpx.mechanism.declarations import Flat
from tests.clipping.batches import assert_trees_close

WEIGHTS = clip_weights(Flat(clipping_norm=0.7))


def losses(params, batch):
    """A decoder-free classifier: untied table, position rows, scanned layers without bias, gain, pooling, a head with bias."""
    x_BTd = ops.add_rows(ops.lookup(params["table"], batch["id"]), params["position"])
    x_BTd = ops.add_bias(x_BTd, params["shift"])

    def layer(x_BTd, p):
        y_BTd = jnp.tanh(ops.dense(x_BTd, p["kernel"]))
        return ops.layer_norm(x_BTd + y_BTd, p["scale"], p["bias"], 1e-6), None

    x_BTd, _ = jax.lax.scan(layer, x_BTd, params["layers"])
    logits_BC = ops.dense(x_BTd.mean(1), params["head"]["kernel"], params["head"]["bias"])
    picked_B = jnp.take_along_axis(logits_BC, batch["label"][:, None], 1)[:, 0]
    return jax.nn.logsumexp(logits_BC, axis=1) - picked_B, {}


def parameters():
    drawn = np.random.default_rng(0)
    shapes = {
        "table": (11, 6),
        "position": (9, 6),
        "shift": (6,),
        "layers": {"kernel": (3, 6, 6), "scale": (3, 6), "bias": (3, 6)},
        "head": {"kernel": (6, 4), "bias": (4,)},
    }
    return jax.tree.map(lambda s: jnp.asarray(drawn.normal(0, 0.5, s), jnp.float32), shapes, is_leaf=lambda s: isinstance(s, tuple))


def batch(examples=4, tokens=7):
    drawn = np.random.default_rng(1)
    return {"id": jnp.asarray(drawn.integers(0, 11, (examples, tokens))), "label": jnp.asarray(drawn.integers(0, 4, examples))}


@pytest.mark.parametrize("kept_bytes", [0, 2**30], ids=["grams", "kept"])
@pytest.mark.parametrize("method", ["ghost", "book_keeping"])
def test_a_model_of_ops_equals_vmap(method, kept_bytes):
    def run(**options):
        return jax.jit(lambda p, b: dpx.clipped_sum(losses, p, b, weights=WEIGHTS, **options))(parameters(), batch())

    reference = run(method="vmap")
    found = run(method=method, kept_bytes=kept_bytes)
    np.testing.assert_allclose(np.square(found.norms_B), np.square(reference.norms_B), rtol=1e-5)
    assert_trees_close(found.total, jax.tree.map(np.asarray, reference.total))


def refused(changed, params, match):
    with pytest.raises(Refused, match=match):
        jax.eval_shape(lambda p, b: dpx.clipped_sum(changed, p, b, weights=WEIGHTS), params, batch())


def test_a_parameter_nobody_claims_is_named_when_the_step_is_built():
    refused(losses, parameters() | {"forgotten": jnp.ones(3)}, "^forgotten: no op claims this parameter")


def test_a_parameter_used_outside_any_op_is_named():
    def outside(params, batch):
        losses_B, counts = losses(params, batch)
        return losses_B * jnp.sum(jnp.square(params["shift"])), counts

    refused(outside, parameters(), "^shift: is used outside any op")


def test_a_second_use_of_a_parameter_is_refused():
    """Its norm would overwrite the first use's: a published library clips tied weights 12 % too weakly for this reason."""

    def twice(params, batch):
        losses_B, counts = losses(params, batch)
        return losses_B + ops.lookup(params["table"], batch["id"]).sum((1, 2)), counts

    refused(twice, parameters(), "^table: used by lookup 2 times")


def test_a_parameter_used_in_every_round_of_a_loop_is_refused():
    def looped(params, batch):
        losses_B, counts = losses({**params, "shift": params["shift"]}, batch)
        rounds = jax.lax.scan(lambda x, _: (ops.add_bias(x, params["extra"]), None), jnp.zeros((4, 6)), jnp.arange(3))[0]
        return losses_B + rounds.sum(1), counts

    refused(looped, parameters() | {"extra": jnp.ones(6)}, "^extra: used by add_bias 2 times")


def test_two_ops_on_one_parameter_without_a_tie_are_refused():
    def shared(params, batch):
        losses_B, counts = losses(params, batch)
        return losses_B + ops.dense(jnp.ones((4, 11)), params["table"]).sum(1), counts

    refused(shared, parameters(), "^table: claimed by lookup and dense")
