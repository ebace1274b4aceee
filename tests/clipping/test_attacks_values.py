"""Ids and labels of no row, shapes that broadcast, losses of the wrong form, values that are not finite: right, or refused."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dpx.clipping import ops
from dpx.models.fused_head import token_loss
from tests.clipping.attacks import ALL_WAYS, Attacks, B, C, D, T, V, batch, drawn, look, right_or_refused, total

values = Attacks(in_turn=True)
TABLE: dict[str, Any] = {"table": (V, D)}
KERNEL: dict[str, Any] = {"kernel": (D, D)}


def small(table, id_BT):
    return ops.small_lookup(table, id_BT, jnp.result_type(float))


# Such an id reads zeros and has no gradient, by every op and whatever the op is tied to.
STRANGE = {"below": (-1, -V, -V - 1), "beyond": (V, V + 5, 10**6), "beyond_float32": (2**24, 2**24 + 1, 2**31 - 1)}
for name, ids in STRANGE.items():
    strange = batch() | {key: batch()[key].at[:, 1:4].set(jnp.asarray(ids, jnp.int32)) for key in ("id", "label")}

    def looked_up(p, b):
        return total(look(p["table"], b["id"]) * b["x"])

    def looked_up_small(p, b):
        return total(small(p["table"], b["id"]) * b["x"])

    def looked_up_and_decoded(p, b):
        return total(ops.decode(look(p["table"], b["id"]) + b["x"], p["table"]))

    def looked_up_and_tied(p, b):
        x_BTd, tie = ops.tied_lookup(p["table"], b["id"], T, jnp.result_type(float))
        return total(ops.decode(x_BTd + b["x"], p["table"], tie=tie))

    def labelled(p, b):
        return token_loss(b["label"], jnp.ones((len(b["x"]), T), bool), b["x"], p["table"], p["bias"])[0]

    def labelled_beside_slots(p, b):
        return token_loss(b["label"], jnp.zeros((len(b["x"]), T), bool).at[:, ::4].set(True), b["x"], p["table"], p["bias"])[0]

    # Each place of an id, and each op with one of them; the long suite has all pairs.
    WITH = {
        "below": (looked_up, labelled),
        "beyond": (looked_up_small, looked_up_and_decoded),
        "beyond_float32": (looked_up, looked_up_and_tied),
    }
    for function in (looked_up, looked_up_small, looked_up_and_decoded, looked_up_and_tied, labelled, labelled_beside_slots):
        is_plain = function in (looked_up, looked_up_small)
        function.__name__ = f"{function.__name__}_{name}"
        shapes: dict[str, Any] = TABLE | ({"bias": (V,)} if function.__name__.startswith("labelled") else {})
        values(
            "right" if is_plain else None,
            rows=strange,
            slow=function not in WITH[name],
            **shapes,
        )(function)


@pytest.mark.parametrize(
    "read", [look, small, lambda table, ids: ops.tied_lookup(table, ids, 1)[0]], ids=["lookup", "small_lookup", "tied_lookup"]
)
def test_an_id_of_no_row_reads_zeros(read):
    ids = jnp.asarray([[0, -1, V - 1, V, -V, 2**30]])
    table = drawn((V, D)) + 10
    np.testing.assert_array_equal(read(table, ids), jnp.zeros((1, 6, D)).at[0, 0].set(table[0]).at[0, 2].set(table[V - 1]))


# name: (must, shapes, losses). What broadcasts has a gradient of another shape than what it meets.
SHAPES = {
    "bias_of_one": (None, {"bias": (1,)}, lambda p, b: ops.add_bias(b["x"], p["bias"])),
    "bias_of_nothing": (None, {"bias": ()}, lambda p, b: ops.add_bias(b["x"], p["bias"])),
    "bias_of_every_token": (None, {"bias": (T, D)}, lambda p, b: ops.add_bias(b["x"], p["bias"])),
    "bias_of_one_token": (None, {"bias": (1, D)}, lambda p, b: ops.add_bias(b["x"], p["bias"])),
    "bias_of_every_example": ("refused", {"bias": (B, D)}, lambda p, b: ops.add_bias(b["y"], p["bias"])),
    "bias_wider_than_the_input": (None, {"bias": (D,)}, lambda p, b: ops.add_bias(b["x"][..., :1], p["bias"])),
    "dense_bias_of_one": (None, KERNEL | {"bias": (1,)}, lambda p, b: ops.dense(b["x"], p["kernel"], p["bias"])),
    "dense_bias_of_nothing": (None, KERNEL | {"bias": ()}, lambda p, b: ops.dense(b["x"], p["kernel"], p["bias"])),
    "dense_bias_of_every_token": (None, KERNEL | {"bias": (T, D)}, lambda p, b: ops.dense(b["x"], p["kernel"], p["bias"])),
    "dense_bias_wider": (None, {"kernel": (D, 1), "bias": (D,)}, lambda p, b: ops.dense(b["x"], p["kernel"], p["bias"])),
    "decode_bias_of_one": (None, TABLE | {"bias": (1,)}, lambda p, b: ops.decode(b["x"], p["table"], p["bias"])),
    "decode_bias_of_every_token": (None, TABLE | {"bias": (T, V)}, lambda p, b: ops.decode(b["x"], p["table"], p["bias"])),
    "gain_of_one": (None, {"scale": (1,), "bias": (D,)}, lambda p, b: ops.layer_norm(b["x"], p["scale"], p["bias"], 1e-6)),
    "gain_of_nothing": (None, {"scale": (), "bias": (D,)}, lambda p, b: ops.layer_norm(b["x"], p["scale"], p["bias"], 1e-6)),
    "gain_of_every_token": (None, {"scale": (T, D), "bias": (D,)}, lambda p, b: ops.layer_norm(b["x"], p["scale"], p["bias"], 1e-6)),
    "shift_of_one": (None, {"scale": (D,), "bias": (1,)}, lambda p, b: ops.layer_norm(b["x"], p["scale"], p["bias"], 1e-6)),
    "gain_wider": (None, {"scale": (D,), "bias": (D,)}, lambda p, b: ops.layer_norm(b["x"][..., :1], p["scale"], p["bias"], 1e-6)),
    "rows_of_one": (None, {"table": (1, D)}, lambda p, b: ops.add_rows(b["x"], p["table"])),
    "rows_of_one_left": (None, {"table": (3, D)}, lambda p, b: ops.add_rows(b["x"], p["table"], 2)),
    "rows_of_width_one": (None, {"table": (T, 1)}, lambda p, b: ops.add_rows(b["x"], p["table"])),
    "rows_from_behind": (None, {"table": (2 * T, D)}, lambda p, b: ops.add_rows(b["x"], p["table"], -T - 1)),
    "rows_of_many_for_one_token": (None, {"table": (V, D)}, lambda p, b: ops.add_rows(b["x"][:, :1], p["table"])),
    "rows_of_choices": ("right", {"table": (V, D)}, lambda p, b: ops.add_rows(b["choices"], p["table"])),
    "rows_of_examples": ("refused", {"table": (V, D)}, lambda p, b: ops.add_rows(b["y"], p["table"])),
    "rows_of_rank_three": (None, {"table": (T, T, D)}, lambda p, b: ops.add_rows(b["x"], p["table"])),
    "kernel_of_rank_one": (None, {"kernel": (D,)}, lambda p, b: ops.dense(b["x"], p["kernel"])),
    "kernel_of_rank_three": (None, {"kernel": (1, D, D)}, lambda p, b: ops.dense(b["x"], p["kernel"])),
    "kernel_of_every_example": ("refused", {"kernel": (B, D, D)}, lambda p, b: ops.dense(b["x"], p["kernel"])),
    "kernel_of_every_choice": (None, {"kernel": (C, D, D)}, lambda p, b: ops.dense(b["choices"], p["kernel"])),
    "kernel_against_examples": ("raises", {"kernel": (B, D)}, lambda p, b: ops.dense(b["x"][:, 0, 0], p["kernel"]) + b["y"]),
    "dense_without_tokens": ("right", KERNEL, lambda p, b: ops.dense(b["y"], p["kernel"])),
    "dense_of_choices": ("right", KERNEL, lambda p, b: ops.dense(b["choices"], p["kernel"])),
    "table_of_rank_one": ("raises", {"table": (V,)}, lambda p, b: look(p["table"], b["id"])),
    "table_of_rank_three": ("raises", {"table": (V, 2, D)}, lambda p, b: look(p["table"], b["id"])),
    "small_table_of_rank_one": (None, {"table": (V,)}, lambda p, b: small(p["table"], b["id"])),
    "small_table_of_rank_three": (None, {"table": (V, 2, D)}, lambda p, b: small(p["table"], b["id"])),
    "one_id_an_example": ("raises", TABLE, lambda p, b: look(p["table"], b["id"][:, 0])),
    "ids_of_choices": ("raises", TABLE, lambda p, b: look(p["table"], b["id"][:, None] * jnp.ones((1, C, 1), jnp.int32))),
    "one_small_id_an_example": (None, TABLE, lambda p, b: small(p["table"], b["id"][:, 0])),
    "short_ids": (None, TABLE, lambda p, b: look(p["table"], b["id"].astype(jnp.uint8))),
    "true_or_false_ids": ("raises", {"table": (2, D)}, lambda p, b: look(p["table"], b["id"] > 2)),
    "decoded_without_positions": ("raises", TABLE, lambda p, b: ops.decode(b["y"], p["table"])),
    "decoded_table_of_rank_three": ("raises", {"table": (1, V, D)}, lambda p, b: ops.decode(b["x"], p["table"])),
    "a_parameter_for_an_input": (None, {"a": (D, D), "b": (D, D)}, lambda p, b: b["x"] @ ops.dense(p["a"], p["b"])),
    "no_tokens": (None, KERNEL, lambda p, b: ops.dense(b["x"][:, :0], p["kernel"])),
}
SLOW = {
    "decode_bias_of_one",
    "dense_bias_wider",
    "shift_of_one",
    "rows_of_width_one",
    "small_table_of_rank_one",
    "short_ids",
    "gain_of_one",
}
for name, (must, shapes, function) in SHAPES.items():

    def shaped(p, b, function=function):
        return total(function(p, b))

    shaped.__name__ = name
    values(must, slow=name in SLOW, settings={"is_zero": name == "no_tokens"}, **shapes)(shaped)


def plain(p, b):
    return ops.dense(b["x"], p["kernel"])


FORMS = {
    "a_number": lambda p, b: (total(plain(p, b)).sum(), {}),
    "a_mean": lambda p, b: (total(plain(p, b)).mean(), {}),
    "a_column": lambda p, b: (total(plain(p, b))[:, None], {}),
    "of_every_token": lambda p, b: (jnp.sin(plain(p, b)).sum(-1), {}),
    "of_as_many_tokens_as_examples": lambda p, b: (jnp.sin(plain(p, b)[:, :B]).sum((0, 2)), {}),
    "twice_as_many": lambda p, b: (jnp.repeat(total(plain(p, b)), 2), {}),
    "one_of_all": lambda p, b: (total(plain(p, b)).sum(keepdims=True), {}),
    "narrow": lambda p, b: (total(plain(p, b)).astype(jnp.bfloat16), {}),
    "whole_numbers": lambda p, b: (total(plain(p, b)).astype(jnp.int32), {}),
    "without_counts": lambda p, b: total(plain(p, b)),
    "with_no_counts": lambda p, b: (total(plain(p, b)), None),
    "with_a_number_to_count": lambda p, b: (total(plain(p, b)), {"all": jnp.sum(b["id"])}),
    "with_counts_of_tokens": lambda p, b: (total(plain(p, b)), {"right": b["has_label"]}),
    "in_a_list": lambda p, b: [total(plain(p, b)), {}],
}
for name, function in FORMS.items():
    of_all = ("a_number", "a_mean", "of_every_token", "of_as_many_tokens_as_examples", "twice_as_many", "one_of_all", "whole_numbers")
    must = "refused" if name in of_all else None
    losses = lambda p, b, function=function: function(p, b)  # noqa: E731
    losses.__name__ = f"losses_{name}"
    values(must, has_counts=True, settings={"tolerance": 1e-2} if name == "narrow" else None, **KERNEL)(losses)


@values.each()
def test_values(attack):
    right_or_refused(attack)


@pytest.mark.slow
@values.each()
def test_values_by_every_way(attack):
    right_or_refused(attack, ALL_WAYS)
