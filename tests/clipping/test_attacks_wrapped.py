"""Parameters read, changed or left bare on their way to an op: the clipped sum is right, or refused."""

import dataclasses
from collections import namedtuple
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.flatten_util import ravel_pytree

from dpx.clipping import ops
from tests.clipping.attacks import ALL_WAYS, WAYS, Attacks, D, V, drawn, look, right_or_refused, total

wrapped = Attacks()


@wrapped(kernel=(D, D), bias=(D,))
def all_scaled(p, b):
    p = jax.tree.map(lambda leaf: 2 * leaf, p)
    return total(ops.dense(b["x"], p["kernel"], p["bias"]))


@wrapped(kernel=(D, D), slow=True)
def squared_on_the_way(p, b):
    return total(ops.dense(b["x"], jax.tree.map(jnp.square, p["kernel"])))


@wrapped(kernel=(D, D), settings={"tolerance": 1e-2})
def rounded_on_the_way(p, b):
    p = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p)
    return total(ops.dense(b["x"], p["kernel"]))


@wrapped(kernel=(D, D), settings={"is_zero": True}, slow=True)
def stopped(p, b):
    return total(ops.dense(b["x"], jax.tree.map(jax.lax.stop_gradient, p["kernel"])))


@wrapped(kernel=(D, D))
def transposed_by_tree_map(p, b):
    return total(ops.dense(b["x"], jax.tree.map(lambda leaf: jnp.swapaxes(leaf, -1, -2), p["kernel"])))


@wrapped(kernel=(2 * D, D))
def half_by_tree_map(p, b):
    return total(ops.dense(b["x"], jax.tree.map(lambda leaf: leaf[:D], p["kernel"])))


@wrapped(kernel=(D, 2, 2))
def reshaped_by_tree_map(p, b):
    return total(ops.dense(b["x"], jax.tree.map(lambda leaf: leaf.reshape(D, -1), p["kernel"])))


@wrapped(kernel=(D, D), other=(D, D), slow=True)
def exchanged_by_tree_map(p, b):
    leaves, tree = jax.tree.flatten(p)
    p = jax.tree.unflatten(tree, leaves[len(leaves) // 2 :] + leaves[: len(leaves) // 2])
    return total(jnp.tanh(ops.dense(b["x"], p["kernel"])) + 2 * ops.dense(b["x"], p["other"]))


@wrapped(kernel=(D, D))
def mixed_with_its_old_self(p, b):
    p = jax.tree.map(lambda leaf: leaf + 0.5 * jax.lax.stop_gradient(leaf), p)
    return total(ops.dense(b["x"], p["kernel"]))


CHANGES = {
    "T": lambda k: k.T,
    "transpose": jnp.transpose,
    "times": lambda k: 2 * k,
    "astype": lambda k: k.astype(jnp.bfloat16),
    "reshape": lambda k: k.reshape(D, D),
    "jnp_reshape": lambda k: jnp.reshape(k, (D, D)),
    "row": lambda k: k[:, :2],
    "stack": lambda k: jnp.stack([k, k])[0],
    "value": lambda k: jax.tree.leaves(k)[0],
    "where": lambda k: jnp.where(True, k, 0),
    "power": lambda k: k**2,
    "negative": lambda k: -k,
}
for name, change in CHANGES.items():

    def changed(p, b, change=change):
        return total(ops.dense(b["x"], change(p["kernel"])))

    changed.__name__ = f"kernel_{name}"
    wrapped(kernel=(D, D), slow=name in ("stack", "power", "negative", "jnp_reshape", "times"))(changed)


READERS = {
    "leaves": lambda p: sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(p)),
    "first_leaf": lambda p: jnp.sum(jnp.square(jax.tree.leaves(p)[0])),
    "tree_reduce": lambda p: jax.tree.reduce(lambda s, leaf: s + jnp.sum(leaf**2), p, 0.0),
    "ravel": lambda p: jnp.sum(jnp.square(ravel_pytree(p)[0])),
    "jnp_sum": lambda p: jnp.sum(p["kernel"]),
    "norm": lambda p: jnp.linalg.norm(p["kernel"]),
    "matmul": lambda p: jnp.sum(jnp.ones((1, D)) @ p["kernel"]),
    "einsum": lambda p: jnp.einsum("ij->", p["kernel"]),
    "lax": lambda p: jax.lax.reduce_max(p["kernel"], (0, 1)),
    "stopped": lambda p: jax.lax.stop_gradient(jnp.sum(jax.tree.leaves(p)[0])),
}
for name, reader in READERS.items():

    def read(p, b, reader=reader):
        return total(ops.dense(b["x"], p["kernel"])) * (1 + reader(p))

    read.__name__ = f"penalty_by_{name}"
    # lax converts its operands before it asks them.
    wrapped("loud" if name == "lax" else None, kernel=(D, D), slow=name in ("norm", "einsum", "tree_reduce", "lax"))(read)


@wrapped(kernel=(D, D))
def closure_reads_a_leaf(p, b):
    kernel = p["kernel"]

    def penalised(x_BTd):
        return x_BTd * jnp.sum(jax.tree.leaves(kernel)[0] ** 2)

    return total(penalised(ops.dense(b["x"], kernel)))


@wrapped(kernel=(D, D), has_counts=True)
def counts_hold_a_parameter(p, b):
    return total(ops.dense(b["x"], p["kernel"])), {"kernel": p["kernel"]}


@wrapped(kernel=(D, D), has_counts=True, slow=True)
def counts_hold_leaves(p, b):
    return total(ops.dense(b["x"], p["kernel"])), {"all": jax.tree.leaves(p)}


RAW = jnp.linspace(-1, 1, D * D).reshape(D, D)


@wrapped("right", kernel=(D, D), slow=True)
def a_constant_of_the_closure(p, b):
    return total(ops.dense(jnp.tanh(ops.dense(b["x"], RAW)), p["kernel"]))


@wrapped("right", a=(D, 2), b=(2, D))
def low_rank_beside_a_frozen_kernel(p, b):
    return total(ops.dense(b["x"], RAW) + ops.dense(ops.dense(b["x"], p["a"]), p["b"]))


@wrapped(bias=(D,))
def frozen_kernel_with_trained_bias(p, b):
    return total(ops.dense(b["x"], RAW, p["bias"]))


@wrapped(kernel=(D, D))
def trained_kernel_with_frozen_bias(p, b):
    return total(ops.dense(b["x"], p["kernel"], RAW[0]))


@wrapped(scale=(D,), slow=True)
def trained_scale_with_frozen_bias(p, b):
    return total(ops.layer_norm(b["x"], p["scale"], RAW[0], 1e-6))


@wrapped(table=(V, D))
def kernel_made_by_another_op(p, b):
    """A hypernetwork: its op reads a single row that no example owns."""
    kernel_dd = look(p["table"], jnp.arange(D)[None])[0]
    return total(ops.dense(b["x"], kernel_dd))


@wrapped(table=(V, D), bias=(D,), slow=True)
def kernel_made_by_another_op_beside_a_bias(p, b):
    return total(ops.dense(b["x"], look(p["table"], jnp.arange(D)[None])[0], p["bias"]))


@wrapped(kernel=(D, D), w=(D, D * D), slow=True)
def kernel_made_from_the_rows(p, b):
    """A kernel for each example, made by an op: nothing is wrapped but what makes it."""
    kernel_Bdd = ops.dense(b["y"], p["w"]).reshape(-1, D, D)
    return total(ops.dense(b["x"], p["kernel"]) @ kernel_Bdd)


# How parameters are kept.

PATHS = {
    "slash": {"a/b": (D, D), "a": {"b": (D, D)}},
    "index": {"a": [(D, D)], "a/0": (D, D)},
    "number": {"a": {0: (D, D)}, "a/0": (D, D)},
    "empty": {"": {"b": (D, D)}, "/b": (D, D)},
}
for name, shapes in PATHS.items():

    def colliding(p, b):
        first, second = jax.tree.leaves(p, is_leaf=lambda leaf: hasattr(leaf, "shape"))
        return total(ops.dense(jnp.tanh(ops.dense(b["x"], first)), second))

    colliding.__name__ = f"paths_that_read_alike_by_{name}"
    wrapped(params=drawn(shapes))(colliding)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Kept:
    kernel: object
    bias: object


Pair = namedtuple("Pair", ["kernel", "bias"])


@wrapped("right", params=Kept(**drawn({"kernel": (D, D), "bias": (D,)})))
def in_a_dataclass(p, b):
    return total(ops.dense(b["x"], p.kernel, p.bias))


@wrapped("right", params=[drawn(Pair((D, D), (D,))), (drawn((D, D)), None), {}], slow=True)
def in_lists_and_tuples(p, b):
    (kernel, bias), (other, _), _ = p
    return total(ops.dense(jnp.tanh(ops.dense(b["x"], kernel, bias)), other))


@wrapped("right", params=drawn((D, D)))
def a_single_leaf(p, b):
    return total(ops.dense(b["x"], p))


@wrapped("right", kernel=(D, D), bias=(D,))
def through_a_function_of_their_own(p, b):
    return total(jax.jit(lambda p, x_BTd: ops.dense(x_BTd, p["kernel"], p["bias"]))(p, b["x"]))


@wrapped(kernel=(D, D), other=(D, D))
def another_program_every_time(p, b, calls=SimpleNamespace(count=0)):  # noqa: B008
    """One function of the parameters, in one use and in two by turns: what was checked is not what runs."""
    calls.count += 1
    y_BTd = jnp.tanh(ops.dense(b["x"], p["other"]))
    if calls.count % 2:
        return total(ops.dense(y_BTd, p["kernel"]))
    return total(ops.dense(0.5 * y_BTd, p["kernel"]) + ops.dense(0.5 * y_BTd, p["kernel"]))


@wrapped.each()
def test_parameters_on_their_way(attack):
    right_or_refused(attack)


@pytest.mark.slow
@wrapped.each()
def test_parameters_on_their_way_by_every_way(attack):
    right_or_refused(attack, ALL_WAYS)


@pytest.mark.parametrize("name", ["all_scaled", pytest.param("penalty_by_first_leaf", marks=pytest.mark.slow)])
def test_without_a_compiler(name):
    right_or_refused(wrapped.table[name][0], WAYS, is_compiled=False)
