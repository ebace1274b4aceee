"""Ops whose leading axis is not the example, and examples that see each other: the clipped sum is right, or refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.clipping import ops
from tests.clipping.attacks import ALL_WAYS, Attacks, B, C, D, M, T, V, batch, look, right_or_refused, total

rows = Attacks()
KERNEL: dict[str, Any] = {"kernel": (D, D)}

# What each op is given, and what it does with it: its first two axes come out as they went in.
OPS = {
    "dense": ("x", KERNEL, lambda p, x: ops.dense(x, p["kernel"])),
    "add_bias": ("x", {"bias": (D,)}, lambda p, x: ops.add_bias(x, p["bias"])),
    "add_rows": ("x", {"table": (15, D)}, lambda p, x: ops.add_rows(x, p["table"])),
    "layer_norm": ("x", {"scale": (D,), "bias": (D,)}, lambda p, x: ops.layer_norm(x, p["scale"], p["bias"], 1e-6)),
    "lookup": ("id", {"table": (V, D)}, lambda p, ids: look(p["table"], ids)),
    "small_lookup": ("id", {"table": (V, D)}, lambda p, ids: ops.small_lookup(p["table"], ids, jnp.result_type(float))),
    "decode": ("x", {"table": (V, D), "bias": (V,)}, lambda p, x: ops.decode(x, p["table"], p["bias"])),
}


def swapped(x):
    return jnp.swapaxes(x, 0, 1)


def fixed(x):
    """One row that no example owns, like a row of `x`."""
    return jnp.arange(T)[None] if x.ndim == 2 else jnp.linspace(-1.0, 1.0, T * D).reshape(1, T, D)


# Ways to call an op f on x [B, T, ...] that do not change what comes out.
CALLS = {
    "time_major": lambda f, x: swapped(f(swapped(x))),
    "as_many_tokens_as_examples": lambda f, x: swapped(f(swapped(x[:, :B]))),
    "tokens_as_examples": lambda f, x: (y := f(x.reshape(-1, 1, *x.shape[2:]))).reshape(*x.shape[:2], y.shape[-1]),
    "vmap_over_tokens": lambda f, x: jax.vmap(f, in_axes=1, out_axes=1)(x[:, :, None]),
    "vmap_over_examples": lambda f, x: jax.vmap(lambda row: f(row[None])[0])(x),
    "rolled_and_back": lambda f, x: jnp.roll(f(jnp.roll(x, 1, 0)), -1, 0),
    "sorted_and_back": lambda f, x: f(x[(order := jnp.argsort(x.reshape(len(x), -1).sum(1)))])[jnp.argsort(order)],
    "in_halves": lambda f, x: jnp.concatenate([f(x[:, :2]), f(x[:, 2:])], 1),
    "one_example_at_a_time": lambda f, x: jnp.concatenate([f(x[b : b + 1]) for b in range(len(x))]),
    "a_loop_over_examples": lambda f, x: jax.lax.map(lambda row: f(row[None])[0], x),
    "a_row_of_nobody": lambda f, x: f(fixed(x)) * jnp.ones((len(x), 1, 1)),
    "a_row_of_nobody_repeated": lambda f, x: f(jnp.repeat(fixed(x), len(x), 0)).mean(0) * jnp.ones((len(x), 1, 1)),
    "every_example_twice": lambda f, x: (lambda y: y[: len(x)] * y[len(x) :])(f(jnp.concatenate([x, x]))),
    "beside_a_row_of_nobody": lambda f, x: f(jnp.concatenate([x, fixed(x)]))[: len(x)],
}
for trick, call in CALLS.items():
    for op, (key, shapes, f) in OPS.items():

        def called(p, b, call=call, f=f, key=key):
            y = call(lambda x: f(p, x), b[key])
            return total(y * b["x"][:, : y.shape[1], :1])

        called.__name__ = f"{op}_{trick}"
        # An op that adds other rows to other positions is another function under some of these, and must be refused then.
        is_slow = op != "dense" and (op, trick) not in {("lookup", "as_many_tokens_as_examples"), ("add_rows", "a_row_of_nobody")}
        rows(slow=is_slow, **shapes)(called)


@rows(**KERNEL)
def vmap_over_choices(p, b):
    return total(jax.vmap(lambda x_BTd: ops.dense(x_BTd, p["kernel"]), in_axes=1, out_axes=1)(b["choices"]))


@rows(**KERNEL)
def vmap_over_choices_of_one_token(p, b):
    """Rows this short have their norm from inputs and cotangents, each added up over choices."""
    return total(jax.vmap(lambda x_BTd: ops.dense(x_BTd, p["kernel"]), in_axes=1, out_axes=1)(b["choices"][:, :, :1]))


@rows("right", slow=True, **KERNEL)
def choices_folded_into_tokens(p, b):
    return total(ops.dense(b["choices"].reshape(-1, C * T, D), p["kernel"]))


@rows(**KERNEL)
def choices_folded_into_examples(p, b):
    return total(ops.dense(b["choices"].reshape(-1, T, D), p["kernel"]).reshape(-1, C, T, D))


@rows(kernel=(2, D, D), slow=True)
def vmap_over_experts(p, b):
    return total(jax.vmap(lambda k: ops.dense(b["x"], k), out_axes=1)(p["kernel"]))


@rows(kernel=(B, D, D))
def vmap_over_as_many_experts_as_examples(p, b):
    return total(jax.vmap(lambda k: ops.dense(b["x"], k), out_axes=1)(p["kernel"]))


@rows(slow=True, **KERNEL)
def vmap_that_maps_nothing(p, b):
    return total(jax.vmap(lambda _: ops.dense(b["x"], p["kernel"]), out_axes=1)(jnp.arange(2)))


# Gradients inside the loss.


def inner(p, x):
    return jnp.tanh(ops.dense(x, p["kernel"])).sum()


@rows(**KERNEL)
def penalty_on_the_gradient_of_inputs(p, b):
    return total(ops.dense(b["x"], p["kernel"])) + total(jax.grad(inner, 1)(p, b["x"]))


@rows(**KERNEL)
def only_the_gradient_of_inputs(p, b):
    return total(jax.grad(inner, 1)(p, b["x"]))


@rows(**KERNEL)
def moved_along_the_gradient_of_inputs(p, b):
    return total(ops.dense(b["x"] + 0.1 * jax.lax.stop_gradient(jnp.sign(jax.grad(inner, 1)(p, b["x"]))), p["kernel"]))


@rows(bias=(D,), **KERNEL)
def penalty_on_the_gradient_of_parameters(p, b):
    square = sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(jax.grad(inner)(p, b["x"])))
    return total(ops.dense(b["x"], p["kernel"], p["bias"])) * (1 + square)


@rows(**KERNEL)
def a_step_inside_the_loss(p, b):
    stepped = jax.tree.map(lambda leaf, g: leaf - 0.1 * g, p, jax.grad(lambda p: inner(p, jnp.ones((1, T, D))))(p))
    return total(ops.dense(b["x"], stepped["kernel"]))


@rows(other=(D, D), **KERNEL)
def cotangents_of_the_users_own(p, b):
    y, back = jax.vjp(lambda x: ops.dense(x, p["kernel"]), b["x"])
    return total(ops.dense(back(jnp.tanh(y))[0], p["other"]))


@rows("loud", slow=True, **KERNEL)
def forward_mode(p, b):
    return total(jax.jvp(lambda x: ops.dense(x, p["kernel"]), (b["x"],), (jnp.ones_like(b["x"]),))[1] * b["x"])


# Examples that see each other between two ops: x [B, T, d] to the like, and nothing of this is a sum over examples.
B_BY_B = jnp.asarray(np.random.default_rng(3).normal(0, 1, (B, B)), jnp.float32)


@jax.custom_vjp
def mixed_backwards(x):
    return x


# Only large cotangents are scaled, by the largest of all examples.
mixed_backwards.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.maximum(1, jnp.abs(g).max() / 50),))

SEEN = {
    "mean": lambda x, b: x - x.mean(0),
    "batch_normalisation": lambda x, b: (x - x.mean((0, 1))) / jnp.sqrt(1e-3 + x.var((0, 1))),
    "stopped_statistics": lambda x, b: x / jax.lax.stop_gradient(1e-3 + jnp.abs(x).max()),
    "roll": lambda x, b: jnp.roll(x, 1, 0),
    "flip": lambda x, b: x[::-1],
    "sort": lambda x, b: jnp.sort(x, axis=0),
    "cumsum": lambda x, b: jnp.cumsum(x, axis=0),
    "softmax": lambda x, b: jax.nn.softmax(x, axis=0),
    "products": lambda x, b: jnp.einsum("btd,csd,cse->bte", x, x, x),
    "constant_matrix": lambda x, b: jnp.einsum("bc,ctd->btd", B_BY_B, x) if len(x) == B else x,
    "reshape": lambda x, b: x.reshape(T, -1, D).swapaxes(0, 1),
    "first_row": lambda x, b: x + x[:1],
    "own_row_removed": lambda x, b: x.sum(0) - x,
    "rows_by_id": lambda x, b: x[b["id"][:, 0] % len(x)],
    "largest_id": lambda x, b: x * (1 + b["id"].max()),
    "is_any_id_above_zero": lambda x, b: x * (1 + (b["id"] > 0).any()),
    "others_ids": lambda x, b: jnp.take_along_axis(x, (b["id"][::-1] % T)[..., None], 1),
    "predicate": lambda x, b: jnp.where(b["x"].sum() > 0, x, 2 * x),
    "branch": lambda x, b: jax.lax.cond(b["x"].sum() > 0, lambda: x, lambda: jnp.sin(x)),
    "branch_on_the_first": lambda x, b: jax.lax.cond(b["x"][0, 0, 0] > 0, lambda: x, lambda: jnp.sin(x)),
    "slice_by_id": lambda x, b: x * jax.lax.dynamic_slice_in_dim(b["x"], b["id"][0, 0] % T, 1, axis=1),
    "rounds_by_id": lambda x, b: x * jax.lax.while_loop(lambda n: n < b["id"].max(), lambda n: n + 1, 0),
    "loop_over_examples": lambda x, b: jax.lax.scan(lambda c, row: (y := (c + row) / 2, y), jnp.zeros_like(x[0]), x)[1],
    "associative_scan": lambda x, b: jax.lax.associative_scan(jnp.add, x),
    "named_axis": lambda x, b: jax.vmap(lambda row: row - jax.lax.pmean(row, "i"), axis_name="i")(x),
    "convolution": lambda x, b: x + jnp.pad(x, ((1, 0), (0, 0), (0, 0)))[:-1],
    "scatter": lambda x, b: jnp.zeros_like(x).at[b["id"][:, 0] % len(x)].add(x),
    "segments": lambda x, b: jax.ops.segment_sum(x, b["id"][:, 0] % 2, 2)[b["id"][:, 0] % 2],
    "fourier": lambda x, b: jnp.fft.fft(x, axis=0).real,
    "host": lambda x, b: x * jax.pure_callback(np.mean, jax.ShapeDtypeStruct((), x.dtype), jax.lax.stop_gradient(x)),
    "random_order": lambda x, b: jax.random.permutation(jax.random.key(2), x, axis=0),
    "large_activations": lambda x, b: x / jnp.maximum(1, jnp.abs(x).max() / 8),
    "norm_clip_of_the_batch": lambda x, b: x * jnp.minimum(1, 100 / jnp.linalg.norm(x)),
    "capacity_of_large_ids": lambda x, b: x * (jnp.cumsum((b["id"] >= 30).reshape(-1)).reshape(b["id"].shape) <= 2)[..., None],
    "branch_on_large_ids": lambda x, b: jax.lax.cond(b["id"].max() > 20, jnp.sin, lambda x: x, x),
    "choice_on_large_ids": lambda x, b: jnp.where(b["id"].max() > 20, jnp.sin(x), x),
    "index_of_large_ids": lambda x, b: x.reshape(-1, D)[jnp.arange(len(x))[:, None] * T + jnp.where(b["id"] > 30, b["id"], b["id"] % T)],
    "loop_until_all_are_small": lambda x, b: x * (1 + jax.lax.while_loop(lambda n: (b["id"] > n).any(), lambda n: n + 1, 20)),
    "backward_pass": lambda x, b: mixed_backwards(x),
    "written_by_id": lambda x, b: jnp.zeros_like(x).at[jnp.where(b["id"][:, 0] > 20, 0, jnp.arange(len(x)))].add(x),
    "key_from_rows": lambda x, b: x * jax.random.normal(jax.random.key(b["id"].sum()), ()),
}
for name, seen in SEEN.items():

    def seeing(p, b, seen=seen):
        return total(ops.dense(seen(jnp.tanh(ops.dense(b["x"], p["kernel"])), b), p["other"]))

    seeing.__name__ = f"examples_see_each_other_by_{name}"
    rows("refused", other=(D, D), **KERNEL)(seeing)

    def seeing_first(p, b, seen=seen):
        return total(ops.dense(seen(b["x"], b), p["kernel"]))

    seeing_first.__name__ = f"examples_saw_each_other_by_{name}"
    # No parameter comes before, so that pass never runs.
    rows("right" if name == "backward_pass" else "refused", slow=True, **KERNEL)(seeing_first)

# Losses [B] that are not each example's own.
LOSSES = {
    "mean": lambda losses, b: losses - losses.mean(),
    "same": lambda losses, b: jnp.broadcast_to(losses.mean(), losses.shape),
    "shared_divisor": lambda losses, b: losses / b["has_label"].sum(),
    "order": lambda losses, b: losses[::-1],
    "sort": lambda losses, b: jnp.sort(losses),
    "softmax": lambda losses, b: losses * jax.lax.stop_gradient(jax.nn.softmax(losses)),
    "all_in_one": lambda losses, b: jnp.zeros_like(losses).at[0].set(losses.sum()),
}
for name, change in LOSSES.items():

    def changed(p, b, change=change):
        return change(total(ops.dense(b["x"], p["kernel"])), b)

    changed.__name__ = f"losses_see_each_other_by_{name}"
    rows("refused", **KERNEL)(changed)


@rows("refused", has_counts=True, **KERNEL)
def a_count_of_all_examples(p, b):
    losses = total(ops.dense(b["x"], p["kernel"]))
    return losses, {"above": losses > losses.mean()}


@rows("refused", rows=batch() | {"mask": jnp.ones((T, T))}, **KERNEL)
def an_array_of_the_batch_that_no_example_owns(p, b):
    return total(jnp.einsum("st,btd->bsd", b["mask"], ops.dense(b["x"], p["kernel"])))


@rows("refused", rows=batch() | {"mask": B_BY_B}, **KERNEL)
def an_array_of_the_batch_as_long_as_the_batch(p, b):
    return total(jnp.einsum("st,btd->bsd", b["mask"], ops.dense(b["x"][:, : len(b["mask"])], p["kernel"])))


@rows("refused", rows=batch() | {"scale": jnp.asarray(2.0)}, **KERNEL)
def a_number_of_the_batch(p, b):
    return total(b["scale"] * ops.dense(b["x"], p["kernel"]))


# What looks like it and is not: each example by itself, so it stays right.
APART = {
    "gather": lambda x, b: jnp.take_along_axis(x, (b["id"] % T)[..., None], 1),
    "index": lambda x, b: x[jnp.arange(len(x))[:, None], b["id"] % T],
    "written_in_place": lambda x, b: jnp.zeros_like(x).at[jnp.arange(len(x)), b["id"][:, 0] % T].set(x[:, 0]) + x,
    "flat_index": lambda x, b: x.reshape(-1, D)[jnp.arange(len(x))[:, None] * T + b["id"] % T],
    "vmap": lambda x, b: jax.vmap(lambda row, at: jnp.roll(row, at[0], 0))(x, b["id"]),
    "attention": lambda x, b: jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x)), x),
    "heads": lambda x, b: swapped(swapped(x.reshape(-1, T, 2, 2)).reshape(T, -1, D)),
    "tokens_in_line": lambda x, b: jnp.tanh(x.reshape(-1, D) @ jnp.eye(D, dtype=x.dtype)).reshape(x.shape),
    "cumsum": lambda x, b: jnp.cumsum(x, axis=1),
    "sort": lambda x, b: jnp.sort(x, axis=1),
    "loop_over_tokens": lambda x, b: swapped(jax.lax.scan(lambda c, row: (y := (c + row) / 2, y), jnp.zeros_like(x[:, 0]), swapped(x))[1]),
    "mask": lambda x, b: jnp.where(b["has_label"][..., None], x, 0) / b["has_label"].sum(1)[:, None, None],
    "padding": lambda x, b: jnp.concatenate([jnp.ones_like(x[:, :1]), x], 1)[:, :-1],
}
for name, apart in APART.items():

    def staying_apart(p, b, apart=apart):
        return total(ops.dense(apart(jnp.tanh(ops.dense(b["x"], p["kernel"])), b), p["other"]))

    staying_apart.__name__ = f"examples_stay_apart_under_{name}"
    rows("right", other=(D, D), slow=name not in ("written_in_place", "attention"), **KERNEL)(staying_apart)


@rows.each()
def test_rows(attack):
    right_or_refused(attack)


@pytest.mark.slow
@rows.each()
def test_rows_by_every_way(attack):
    right_or_refused(attack, ALL_WAYS)


assert M < B < T, "no two axes of one size, but where an attack makes them so"
