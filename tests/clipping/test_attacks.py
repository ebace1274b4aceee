"""Parameters met by several ops, or by one op several times: the clipped sum is right, or refused."""

import jax
import jax.numpy as jnp
import pytest

from dpx.clipping import ops
from dpx.models.fused_head import token_loss
from tests.clipping.attacks import ALL_WAYS, WAYS, Attacks, D, M, T, V, look, right_or_refused, total

shared = Attacks()
TABLE, SQUARE = (V, D), (D, D)


def tied(table, b, decoded):
    return ops.tied_lookup(table, b["id"], decoded, jnp.result_type(float))


@shared("right", table=TABLE)
def tied_by_hand(p, b):
    """The tie that has been needed until now stays right."""
    x_BTd, tie = tied(p["table"], b, T)
    return total(ops.decode(jnp.tanh(x_BTd), p["table"], tie=tie))


@shared("right", table=TABLE)
def lookup_and_decode(p, b):
    return total(ops.decode(jnp.tanh(look(p["table"], b["id"])), p["table"]))


@shared(table=TABLE, slow=True)
def tie_dropped(p, b):
    x_BTd, _ = tied(p["table"], b, T)
    return total(ops.decode(jnp.tanh(x_BTd), p["table"]))


@shared(table=TABLE, slow=True)
def tie_cut(p, b):
    x_BTd, tie = tied(p["table"], b, T)
    cut = tie._replace(gathered_BMT=jax.lax.stop_gradient(tie.gathered_BMT), hidden_BMd=jax.lax.stop_gradient(tie.hidden_BMd))
    return total(ops.decode(jnp.tanh(x_BTd), p["table"], tie=cut))


@shared(table=TABLE, slow=True)
def tie_scaled(p, b):
    x_BTd, tie = tied(p["table"], b, T)
    return total(ops.decode(jnp.tanh(x_BTd), p["table"], tie=tie._replace(hidden_BMd=3 * tie.hidden_BMd)))


@shared(table=TABLE)
def tie_of_other_ids(p, b):
    x_BTd, tie = tied(p["table"], b, T)
    return total(ops.decode(jnp.tanh(x_BTd), p["table"], tie=tie._replace(id_BT=tie.id_BT[:, ::-1])))


@shared(table=TABLE, slow=True)
def tie_used_twice(p, b):
    x_BTd, tie = tied(p["table"], b, M)
    return total(ops.decode(x_BTd[:, :M], p["table"], tie=tie)) + total(ops.decode(b["h"], p["table"], tie=tie))


@shared(table=TABLE, other=TABLE, slow=True)
def ties_of_two_tables_swapped(p, b):
    x_BTd, tie = tied(p["table"], b, M)
    y_BTd, other = tied(p["other"], b, M)
    return total(ops.decode(x_BTd[:, :M], p["table"], tie=other)) + total(ops.decode(y_BTd[:, :M], p["other"], tie=tie))


@shared(table=TABLE, slow=True)
def tie_through_other_rows(p, b):
    x_BTd, tie = tied(p["table"], b, M)
    rolled = jax.tree.map(lambda leaf: jnp.roll(leaf, 1, 0), tie)
    return total(ops.decode(x_BTd[:, :M], p["table"], tie=rolled))


@shared(table=TABLE)
def lookup_and_token_loss(p, b):
    return token_loss(b["label"], b["has_label"], look(p["table"], b["id"]), p["table"])[0]


@shared(table=TABLE, bias=(V,), slow=True)
def lookup_and_token_loss_tie_dropped(p, b):
    return token_loss(b["label"], b["has_label"], tied(p["table"], b, T)[0], p["table"], p["bias"])[0]


@shared(table=TABLE, slow=True)
def two_lookups(p, b):
    return total(look(p["table"], b["id"]) * look(p["table"], b["label"]))


@shared(table=TABLE, slow=True)
def two_lookups_of_different_length(p, b):
    return total(look(p["table"], b["id"])) + total(look(p["table"], b["label"][:, :2]))


@shared(table=TABLE, slow=True)
def tied_and_looked_up_again(p, b):
    x_BTd, tie = tied(p["table"], b, T)
    return total(ops.decode(x_BTd + look(p["table"], b["label"]), p["table"], tie=tie))


@shared(table=TABLE, slow=True)
def lookup_and_two_decodes(p, b):
    x_BTd = look(p["table"], b["id"])
    return total(ops.decode(x_BTd, p["table"])) + total(ops.decode(b["h"], p["table"]))


@shared(table=TABLE, slow=True)
def lookup_and_small_lookup(p, b):
    return total(look(p["table"], b["id"]) * ops.small_lookup(p["table"], b["label"], jnp.result_type(float)))


@shared(table=TABLE)
def lookup_and_add_rows(p, b):
    return total(ops.add_rows(look(p["table"], b["id"]), p["table"]))


@shared(table=TABLE)
def add_rows_twice_at_other_offsets(p, b):
    return total(ops.add_rows(ops.add_rows(b["h"], p["table"]), p["table"], offset=M))


@shared(table=SQUARE, slow=True)
def dense_and_decode(p, b):
    return total(ops.decode(jnp.tanh(ops.dense(b["h"], p["table"])), p["table"]))


@shared(table=SQUARE, slow=True)
def lookup_dense_and_decode(p, b):
    ids = jnp.minimum(b["id"], D - 1)
    return total(ops.decode(ops.dense(look(p["table"], ids), p["table"]), p["table"]))


@shared("right", kernel=SQUARE)
def two_denses(p, b):
    return total(ops.dense(jnp.tanh(ops.dense(b["x"], p["kernel"])), p["kernel"]))


@shared(kernel=SQUARE, slow=True)
def two_denses_of_different_length(p, b):
    return total(ops.dense(b["x"], p["kernel"])) + total(ops.dense(b["x"].mean(1), p["kernel"]))


@shared(kernel=SQUARE, slow=True)
def two_denses_of_other_arrays(p, b):
    return total(ops.dense(b["x"], p["kernel"])) * total(ops.dense(b["choices"], p["kernel"]))


@shared(kernel=SQUARE, other=SQUARE, bias=(D,), slow=True)
def one_bias_of_two_denses(p, b):
    return total(ops.dense(jnp.tanh(ops.dense(b["x"], p["kernel"], p["bias"])), p["other"], p["bias"]))


@shared(kernel=SQUARE, bias=(D,), slow=True)
def bias_of_a_dense_and_alone(p, b):
    return total(ops.add_bias(jnp.tanh(ops.dense(b["x"], p["kernel"], p["bias"])), p["bias"]))


@shared(scale=(D,))
def one_leaf_for_both_of_an_op(p, b):
    """One op, two places: the cross-term is missing within the op."""
    return total(ops.layer_norm(b["x"], p["scale"], p["scale"], 1e-6))


@shared(kernel=SQUARE, scale=(D,), bias=(D,), slow=True)
def gain_of_one_is_bias_of_another(p, b):
    return total(ops.layer_norm(ops.dense(b["x"], p["kernel"], p["scale"]), p["scale"], p["bias"], 1e-6))


@shared(table=TABLE, settings={"floor": 1e-2, "is_zero": True})
def opposite_uses(p, b):
    """The gradient is zero, by parts that cancel: a total rounded below zero has no root."""
    h_BTd = b["x"]
    logits_BTV = ops.decode(h_BTd, p["table"])
    picked_BT = jnp.take_along_axis(logits_BTV, b["id"][..., None], 2)[..., 0]
    return picked_BT.sum(1) - (look(p["table"], b["id"]) * h_BTd).sum((1, 2))


@shared(table=TABLE, settings={"floor": 1e-2, "is_zero": True}, slow=True)
def opposite_uses_tied_by_hand(p, b):
    x_BTd, tie = tied(p["table"], b, T)
    h_BTd = b["x"]
    picked_BT = jnp.take_along_axis(ops.decode(h_BTd, p["table"], tie=tie), b["id"][..., None], 2)[..., 0]
    return picked_BT.sum(1) - (x_BTd * h_BTd).sum((1, 2))


@shared.each()
def test_parameters_met_more_than_once(attack):
    right_or_refused(attack)


@pytest.mark.slow
@shared.each()
def test_parameters_met_more_than_once_by_every_way(attack):
    right_or_refused(attack, ALL_WAYS)


@pytest.mark.slow
def test_without_a_compiler():
    right_or_refused(shared.table["lookup_and_decode"][0], WAYS, is_compiled=False)
