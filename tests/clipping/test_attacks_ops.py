"""Ops of the user's own: a right one clips right, and one whose answers have the wrong form is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dpx.clipping import norms, ops
from dpx.clipping.op import Op, apply
from tests.clipping.attacks import ALL_WAYS, Attacks, D, right_or_refused, total

own = Attacks()


@dataclasses.dataclass(frozen=True)
class Gain(Op):
    """x * scale, right in every part; the attacks change one part each."""

    name: str = "gain"

    def forward(self, leaves, inputs):
        return inputs[0] * leaves["scale"], inputs[0]

    def input_cotangent(self, leaves, residuals, cotangent):
        return (cotangent * leaves["scale"],), norms.at_least_float32(cotangent * residuals).sum(1)

    def squared_norm(self, leaves, record):
        return (norms.squares(record),)

    def weighted_sum(self, leaves, record, weights):
        return {"scale": jnp.tensordot(weights[0], record, 1, precision="highest")}


def changed(part, change):
    """Gain with one of its functions' answers changed."""
    true = getattr(Gain, part)
    return type("Changed", (Gain,), {part: lambda self, *args: change(true(self, *args))})()


# What each function answers, changed so that jax would broadcast it, add it up or not look at it.
CHANGES = {
    "norm_of_all": ("squared_norm", lambda found: (found[0].sum(keepdims=True),)),
    "norm_a_number": ("squared_norm", lambda found: (found[0].sum(),)),
    "norm_a_column": ("squared_norm", lambda found: (found[0][:, None],)),
    "norm_a_row": ("squared_norm", lambda found: (found[0][None],)),
    "norm_of_every_entry": ("squared_norm", lambda found: (found[0][:, None] * jnp.ones((1, D)),)),
    "norm_without_a_tuple": ("squared_norm", lambda found: found[0]),
    "norm_of_two_parts": ("squared_norm", lambda found: (found[0], found[0])),
    "norm_of_no_part": ("squared_norm", lambda found: ()),
    "sum_a_number": ("weighted_sum", lambda found: {"scale": found["scale"].sum()}),
    "sum_of_one": ("weighted_sum", lambda found: {"scale": found["scale"].sum(keepdims=True)}),
    "sum_a_row": ("weighted_sum", lambda found: {"scale": found["scale"][None]}),
    "sum_a_column": ("weighted_sum", lambda found: {"scale": found["scale"][:, None]}),
    "sum_of_nothing": ("weighted_sum", lambda found: {}),
    "sum_of_more": ("weighted_sum", lambda found: found | {"rest": found["scale"]}),
    "sum_without_a_name": ("weighted_sum", lambda found: found["scale"]),
    "cotangent_a_number": ("input_cotangent", lambda found: ((found[0][0].sum(),), found[1])),
    "cotangent_of_none": ("input_cotangent", lambda found: ((None,), found[1])),
    "record_of_other_rows": ("input_cotangent", lambda found: (found[0], jnp.roll(found[1], 1, 0))),
    "record_turned": ("input_cotangent", lambda found: (found[0], found[1].T)),
    "record_of_nobody": ("input_cotangent", lambda found: (found[0], found[1].sum(0))),
    "record_of_all": ("input_cotangent", lambda found: (found[0], found[1].sum(0, keepdims=True))),
    "record_of_nothing": ("input_cotangent", lambda found: (found[0], ())),
    "record_of_whole_numbers": ("input_cotangent", lambda found: (found[0], found[1].astype(jnp.int32))),
}
# That an op is wrong in its values nobody can see from outside; these are about form.
UNSEEN = {"record_of_other_rows", "cotangent_of_none"}
for name, (part, change) in CHANGES.items():

    def attacked(p, b, op=changed(part, change)):  # noqa: B008
        return total(apply(op, {"scale": p["scale"]}, (b["x"],)))

    attacked.__name__ = name
    if name not in UNSEEN:
        own("loud" if name.startswith("cotangent") else None, scale=(D,))(attacked)


def gain(x_BTd, scale, op=Gain()):  # noqa: B008
    return apply(op, {"scale": scale}, (x_BTd,))


@own("right", scale=(D,), kernel=(D, D))
def right(p, b):
    return total(gain(jnp.tanh(ops.dense(b["x"], p["kernel"])), p["scale"]))


@own("right", scale=(2, D))
def right_in_a_scan(p, b):
    return total(jax.lax.scan(lambda x, scale: (jnp.tanh(gain(x, scale)), None), b["x"], p["scale"])[0])


@own(scale=(D,))
def twice(p, b):
    return total(gain(jnp.tanh(gain(b["x"], p["scale"])), p["scale"]))


@own(scale=(D,))
def beside_an_op_of_ours(p, b):
    return total(ops.add_bias(gain(b["x"], p["scale"]), p["scale"]))


@own(bias=(D,))
def under_the_name_of_an_op_of_ours(p, b):
    """Two ops that are told apart by nothing but what they do."""
    return total(ops.add_bias(gain(b["x"], p["bias"], Gain(name="add_bias")), p["bias"]))


@own("right", scale=(D,), bias=(D,))
def under_the_name_of_an_op_of_ours_elsewhere(p, b):
    return total(ops.add_bias(gain(b["x"], p["scale"], Gain(name="add_bias")), p["bias"]))


@own(scale=(1,))
def a_gain_that_broadcasts(p, b):
    return total(gain(b["x"], p["scale"]))


@own(scale=(D,))
def a_parameter_for_an_input(p, b):
    return total(b["x"] * apply(Gain(), {"scale": p["scale"]}, (p["scale"],)))


@own("raises", scale=(D,))
def a_parameter_for_a_fact(p, b):
    return total(ops.layer_norm(b["x"], p["scale"], jnp.zeros(D), p["scale"]))


@own(scale=(D,))
def a_parameter_used_by_its_values(p, b):
    """`forward` is called by hand: what autodiff may do, no record tells of."""
    return total(Gain().forward({"scale": p["scale"]}, (b["x"],))[0])


@own(scale=(D,), shift=(D,))
def inputs_that_are_not_of_examples(p, b):
    """The op's second input is a constant of tokens; it has no example."""

    @dataclasses.dataclass(frozen=True)
    class Masked(Gain):
        def forward(self, leaves, inputs):
            return inputs[0] * inputs[1] * leaves["scale"], inputs[0] * inputs[1]

        def input_cotangent(self, leaves, residuals, cotangent):
            return (cotangent * leaves["scale"], None), norms.at_least_float32(cotangent * residuals).sum(1)

    y_BTd = apply(Masked(), {"scale": p["scale"]}, (ops.add_bias(b["x"], p["shift"]), jnp.arange(D)))
    return total(y_BTd)


@own.each()
def test_ops_of_ones_own(attack):
    right_or_refused(attack)


@pytest.mark.slow
@own.each()
def test_ops_of_ones_own_by_every_way(attack):
    right_or_refused(attack, ALL_WAYS)
