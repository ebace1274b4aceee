"""Examples that are not finite, rows of padding and units of several rows: what does not count contributes exactly zero."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import norms, ops
from dpx.clipping.op import Op, apply
from dpx.declaration import ConfigError
from dpx.models.fused_head import token_loss
from tests.clipping.attacks import ALL_WAYS, WAYS, Attacks, B, D, T, V, batch, drawn, look, right_or_refused, total

counted = Attacks(in_turn=True)
WITH_VMAP = WAYS | {"vmap": {"method": "vmap"}}
TABLE: dict[str, Any] = {"table": (V, D)}
KERNEL: dict[str, Any] = {"kernel": (D, D)}
NAN = jnp.nan


def poisoned(key, value, at: Any = 1):
    return batch() | {key: batch()[key].at[at].set(value)}


def two_layers(p, b, x_BTd):
    return ops.dense(jnp.tanh(ops.layer_norm(ops.dense(x_BTd, p["kernel"]), p["scale"], p["bias"], 1e-6)), p["other"])


LAYERS = {"kernel": (D, D), "scale": (D,), "bias": (D,), "other": (D, D)}


@counted("right", rows=poisoned("x", NAN), slow=True, **LAYERS)
def a_row_that_is_not_a_number(p, b):
    return total(two_layers(p, b, b["x"]))


@counted("right", rows=poisoned("x", jnp.inf, (1, 0, 2)), slow=True, **LAYERS)
def one_infinite_number(p, b):
    return total(two_layers(p, b, b["x"]))


@counted("right", rows=batch() | {"factor": jnp.array([1.0, 0.0, 1.0])}, **LAYERS)
def only_backwards(p, b):
    """The root of zero is zero, and its derivative is not."""
    return jnp.sqrt(b["factor"] * jnp.square(two_layers(p, b, b["x"])).sum((1, 2)))


@counted("right", rows=batch() | {"factor": jnp.array([1.0, 1e25, 1.0])}, **LAYERS)
def a_square_that_overflows(p, b):
    return b["factor"] * total(two_layers(p, b, b["x"]))


@counted("right", rows=batch() | {"factor": jnp.array([1.0, jnp.inf, 1.0])}, slow=True, **KERNEL)
def a_loss_that_is_infinite_though_its_gradient_is_zero(p, b):
    return total(ops.dense(b["x"], p["kernel"])) + b["factor"]


@counted("right", rows=poisoned("x", jnp.inf, (1, 0)), **KERNEL)
def an_infinite_input_that_no_cotangent_meets(p, b):
    return total(jnp.where(jnp.arange(T)[:, None] > 0, ops.dense(b["x"], p["kernel"]), 0.0))


@counted("right", rows=poisoned("h", NAN), slow=True, **TABLE)
def a_decoded_row_that_is_not_a_number(p, b):
    return total(ops.decode(b["h"], p["table"]))


@counted("right", rows=poisoned("x", NAN), bias=(V,), slow=True, **TABLE)
def logits_that_are_not_numbers(p, b):
    return token_loss(b["label"], b["has_label"], b["x"], p["table"], p["bias"])[0]


@counted(rows=poisoned("x", NAN), slow=True, **TABLE)
def a_tied_row_that_is_not_a_number(p, b):
    return total(ops.decode(look(p["table"], b["id"]) * b["x"], p["table"]))


@counted("right", rows=poisoned("x", NAN), slow=True, **TABLE)
def a_row_tied_by_hand_that_is_not_a_number(p, b):
    x_BTd, tie = ops.tied_lookup(p["table"], b["id"], T, jnp.result_type(float))
    return total(ops.decode(x_BTd * b["x"], p["table"], tie=tie))


ONE_ROW = batch() | {"id": jnp.asarray([[0] * T, [0, 1, 0, 2, 1], [2] * T], jnp.int32)}


@counted("right", params={"table": drawn((V, D)).at[1].set(NAN)}, rows=ONE_ROW)
def a_row_of_the_table_that_one_example_reads(p, b):
    return total(look(p["table"], b["id"]) * b["x"])


@counted("right", params={"table": drawn((V, D)).at[1].set(NAN)}, rows=ONE_ROW, slow=True)
def a_row_of_a_small_table_that_one_example_reads(p, b):
    return total(ops.small_lookup(p["table"], b["id"], jnp.result_type(float)) * b["x"])


@counted("right", rows=poisoned("x", NAN), position=(T, D), shift=(D,), slow=True)
def added_rows_and_biases(p, b):
    return total(ops.add_bias(ops.add_rows(b["x"], p["position"]), p["shift"]))


@counted("right", kernel=(2, D, D), rows=poisoned("x", NAN), slow=True)
def through_a_scan(p, b):
    return total(jax.lax.scan(lambda x, k: (jnp.tanh(ops.dense(x, k)), None), b["x"], p["kernel"])[0])


@dataclasses.dataclass(frozen=True)
class Narrow(Op):
    """A gain whose record is float16, though its norm was taken before: what the sum reads may be infinite, and its norm is not."""

    name: str = "narrow"

    def forward(self, leaves, inputs):
        return inputs[0] * leaves["scale"], inputs[0]

    def input_cotangent(self, leaves, residuals, cotangent):
        gradient_Bd = norms.at_least_float32(cotangent * residuals).sum(1)
        return (cotangent * leaves["scale"],), {"square": norms.squares(gradient_Bd), "gradient": gradient_Bd.astype(jnp.float16)}

    def squared_norm(self, leaves, record):
        return (record["square"],)

    def weighted_sum(self, leaves, record, weights):
        return {"scale": jnp.tensordot(weights[0], norms.at_least_float32(record["gradient"]), 1, precision="highest")}


@pytest.mark.parametrize("way", WAYS)
def test_a_record_that_only_the_sum_finds_infinite(way):
    """The others are summed as if it were not there, and it is not counted; or the op is refused."""
    rows = batch() | {"factor": jnp.array([1.0, 1e6, 1.0])}

    def losses(p, b):
        return b["factor"] * total(apply(Narrow(), {"scale": p["scale"]}, (b["x"],))), {}

    @jax.jit
    def sums(padding_B):
        weights = lambda norms_B: 1 / jnp.maximum(norms_B, 1)  # noqa: E731
        return dpx.clipped_sum(losses, drawn({"scale": (D,)}), rows, weights=weights, is_padding_B=padding_B, **WAYS[way])

    try:
        found = sums(jnp.zeros(B, bool))
    except ConfigError:
        return
    np.testing.assert_array_equal(found.total["scale"], sums(jnp.arange(B) == 1).total["scale"])
    np.testing.assert_array_equal(found.is_counted_B, [True, False, True])


@pytest.mark.parametrize("way", ["book_keeping", pytest.param("ghost", marks=pytest.mark.slow), "vmap"])
def test_an_infinite_weight_of_an_example_without_a_gradient(way):
    """1 / norm, as pages on clipping print it: infinity times zero would be in every parameter's sum."""
    factor_B = jnp.array([1.0, 0.0, 1.0])
    losses = lambda p, b: (b["factor"] * total(ops.dense(b["x"], p["kernel"])), {})  # noqa: E731
    run = jax.jit(lambda p, b: dpx.clipped_sum(losses, p, b, weights=lambda n: 1 / n, **WITH_VMAP[way]))
    found = run(drawn(KERNEL), batch() | {"factor": factor_B})
    assert bool(jnp.isfinite(found.total["kernel"]).all())


# Padding, and units of two rows: full, with padding behind, padding alone.
PADDING = jnp.array([False, False, False, True, True, True])
SIX = batch(6)
CLEARED = {
    key: jnp.where(PADDING.reshape(-1, *[1] * (leaf.ndim - 1)), jnp.nan, leaf) if leaf.dtype == jnp.float32 else leaf
    for key, leaf in SIX.items()
}
WAY_OUT = {key: jnp.where(PADDING[:, None], -(10**6), leaf) if key in ("id", "label") else leaf for key, leaf in CLEARED.items()}
PLANS = {
    "padding": (SIX, {"is_padding_B": PADDING}),
    "padding_of_nan": (WAY_OUT, {"is_padding_B": PADDING}),
    "no_padding": (SIX, {"is_padding_B": jnp.zeros(6, bool)}),
    "nothing_but_padding": (SIX, {"is_padding_B": jnp.ones(6, bool)}),
    "units": (SIX, {"rows_per_unit": 2}),
    "units_and_padding": (SIX, {"rows_per_unit": 2, "is_padding_B": PADDING}),
    "units_and_padding_of_nan": (WAY_OUT, {"rows_per_unit": 2, "is_padding_B": PADDING}),
    "units_of_all": (SIX, {"rows_per_unit": 6}),
    "units_with_a_row_of_nan": (SIX | {"x": SIX["x"].at[3].set(NAN)}, {"rows_per_unit": 2}),
}


def tied_by_hand(p, b):
    x_BTd, tie = ops.tied_lookup(p["table"], b["id"], T, jnp.result_type(float))
    return total(ops.decode(jnp.tanh(x_BTd + b["x"]), p["table"], tie=tie))


PROGRAMS = {
    "tied_by_hand": (TABLE, tied_by_hand),
    "tied": (TABLE, lambda p, b: total(ops.decode(jnp.tanh(look(p["table"], b["id"]) + b["x"]), p["table"]))),
    "two_lookups": (TABLE, lambda p, b: total(look(p["table"], b["id"]) * b["x"] + look(p["table"], b["label"]))),
    "two_denses": (KERNEL, lambda p, b: total(ops.dense(jnp.tanh(ops.dense(b["x"], p["kernel"])), p["kernel"]))),
    "layers": (LAYERS, lambda p, b: total(two_layers(p, b, b["x"]))),
    "token_loss": (TABLE, lambda p, b: token_loss(b["label"], b["has_label"], look(p["table"], b["id"]) + b["x"], p["table"])[0]),
}
# Those that say something apart from the others; the long suite has all pairs.
FAST = {
    "padding_of_nan tied",
    "nothing_but_padding tied_by_hand",
    "units tied",
    "units_and_padding_of_nan tied_by_hand",
}
FAST |= {"units_with_a_row_of_nan layers"}
for plan, (rows, options) in PLANS.items():
    for program, (shapes, function) in PROGRAMS.items():
        must = "right" if program in ("layers", "tied_by_hand") else None
        settings = {"options": options, "is_zero": plan == "nothing_but_padding"}
        losses = lambda p, b, function=function: function(p, b)  # noqa: E731
        losses.__name__ = f"{program}_{plan}"
        counted(must, rows=rows, settings=settings, slow=f"{plan} {program}" not in FAST, **shapes)(losses)


@counted.each()
def test_what_counts(attack):
    right_or_refused(attack)


@pytest.mark.slow
@counted.each()
def test_what_counts_by_every_way(attack):
    right_or_refused(attack, ALL_WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in counted.table if not name.endswith(tuple(PLANS))])
def test_what_counts_one_gradient_at_a_time(name):
    right_or_refused(counted.table[name][0], {"vmap": {"method": "vmap"}})
