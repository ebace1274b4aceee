"""Parameters in loops, branches and under rules of the user's own: the clipped sum is right, or refused."""

import jax
import jax.numpy as jnp
import pytest

from dpx.clipping import ops
from tests.clipping.attacks import ALL_WAYS, Attacks, D, L, drawn, right_or_refused, total

looped = Attacks()
SQUARE, STACK = (D, D), (L, D, D)


@looped("right", kernel=STACK, slow=True)
def scan_over_a_stack(p, b):
    return total(jax.lax.scan(lambda x, k: (jnp.tanh(ops.dense(x, k)), None), b["x"], p["kernel"])[0])


@looped("right", kernel=STACK, bias=(L, D))
def scan_backwards(p, b):
    """Records come back in the order of the layers, whichever way the loop runs."""

    def layer(x, p):
        return jnp.tanh(ops.dense(x, p["kernel"], p["bias"])), None

    return total(jax.lax.scan(layer, b["x"], p, reverse=True)[0])


@looped(kernel=STACK, slow=True)
def scan_over_a_reversed_stack(p, b):
    stack = jax.tree.map(lambda leaf: leaf[::-1], p["kernel"])
    return total(jax.lax.scan(lambda x, k: (jnp.tanh(ops.dense(x, k)), None), b["x"], stack)[0])


@looped(kernel=STACK, slow=True)
def scan_over_a_stack_out_of_order(p, b):
    stack = jax.tree.map(lambda leaf: leaf[jnp.array([1, 2, 0])], p["kernel"])
    return total(jax.lax.scan(lambda x, k: (jnp.tanh(ops.dense(x, k)), None), b["x"], stack)[0])


@looped(kernel=STACK)
def scan_over_a_stack_with_a_layer_twice(p, b):
    stack = jax.tree.map(lambda leaf: leaf[jnp.array([0, 1, 1])], p["kernel"])
    return total(jax.lax.scan(lambda x, k: (jnp.tanh(ops.dense(x, k)), None), b["x"], stack)[0])


@looped(kernel=STACK, slow=True)
def scan_over_part_of_a_stack(p, b):
    stack = jax.tree.map(lambda leaf: leaf[1:], p["kernel"])
    return total(jax.lax.scan(lambda x, k: (jnp.tanh(ops.dense(x, k)), None), b["x"], stack)[0])


@looped(kernel=STACK, slow=True)
def two_scans_over_one_stack(p, b):
    x = jax.lax.scan(lambda x, k: (jnp.tanh(ops.dense(x, k)), None), b["x"], p["kernel"])[0]
    return total(jax.lax.scan(lambda x, k: (jnp.tanh(ops.dense(x, k)), None), x, p["kernel"])[0])


@looped(kernel=STACK)
def scan_that_uses_a_layer_twice(p, b):
    return total(jax.lax.scan(lambda x, k: (jnp.tanh(ops.dense(jnp.tanh(ops.dense(x, k)), k)), None), b["x"], p["kernel"])[0])


@looped(kernel=STACK, slow=True)
def scan_that_hands_its_stack_on(p, b):
    x, stack = jax.lax.scan(lambda x, k: (jnp.tanh(ops.dense(x, k)), k), b["x"], p["kernel"])
    return total(jax.lax.scan(lambda x, k: (jnp.tanh(ops.dense(x, k)), None), x, stack)[0])


@looped(kernel=(2, L, D, D), slow=True)
def nested_scans(p, b):
    def outer(x, ks):
        return jax.lax.scan(lambda x, k: (jnp.tanh(ops.dense(x, k)), None), x, ks)[0], None

    return total(jax.lax.scan(outer, b["x"], p["kernel"])[0])


@looped(kernel=STACK, slow=True)
def a_scan_of_one_stack_in_rounds_of_another_scan(p, b):
    def round_of(x, _):
        return jax.lax.scan(lambda x, k: (jnp.tanh(ops.dense(x, k)), None), x, p["kernel"])[0], None

    return total(jax.lax.scan(round_of, b["x"], None, length=2)[0])


@looped(kernel=STACK, other=SQUARE)
def one_kernel_of_all_rounds_beside_a_stack(p, b):
    return total(jax.lax.scan(lambda x, k: (jnp.tanh(ops.dense(ops.dense(x, k), p["other"])), None), b["x"], p["kernel"])[0])


@looped(kernel=SQUARE, slow=True)
def every_round_of_a_scan(p, b):
    return total(jax.lax.scan(lambda x, _: (jnp.tanh(ops.dense(x, p["kernel"])), None), b["x"], None, length=2)[0])


@looped(kernel=SQUARE, slow=True)
def the_only_round_of_a_scan(p, b):
    return total(jax.lax.scan(lambda x, _: (jnp.tanh(ops.dense(x, p["kernel"])), None), b["x"], None, length=1)[0])


@looped(kernel=SQUARE, slow=True)
def carried_by_a_scan(p, b):
    def layer(carry, _):
        x, kernel = carry
        return (jnp.tanh(ops.dense(x, kernel)), kernel), None

    return total(jax.lax.scan(layer, (b["x"], p["kernel"]), None, length=2)[0][0])


@looped(kernel=SQUARE, other=SQUARE)
def carried_and_exchanged(p, b):
    def layer(carry, _):
        x, first, second = carry
        return (jnp.tanh(ops.dense(x, first)), second, first), None

    return total(jax.lax.scan(layer, (b["x"], p["kernel"], p["other"]), None, length=2)[0][0])


@looped(kernel=SQUARE, slow=True)
def tokens_one_after_another(p, b):
    x_TBd = jnp.swapaxes(b["x"], 0, 1)
    return total(jax.lax.scan(lambda h, x: (jnp.tanh(ops.dense(h, p["kernel"]) + x), None), jnp.zeros_like(x_TBd[0]), x_TBd)[0])


@looped(kernel=SQUARE, slow=True)
def a_map_over_tokens(p, b):
    return total(jnp.swapaxes(jax.lax.map(lambda x_Bd: ops.dense(x_Bd, p["kernel"]), jnp.swapaxes(b["x"], 0, 1)), 0, 1))


@looped(kernel=SQUARE, slow=True)
def rounds_of_a_for_loop(p, b):
    return total(jax.lax.fori_loop(0, 2, lambda _, x: jnp.tanh(ops.dense(x, p["kernel"])), b["x"]))


@looped(kernel=STACK)
def layers_of_a_for_loop(p, b):
    def layer(i, x):
        return jnp.tanh(ops.dense(x, jax.tree.map(lambda leaf: leaf[i], p["kernel"])))

    return total(jax.lax.fori_loop(0, L, layer, b["x"]))


@looped("raises", kernel=SQUARE)
def rounds_of_a_while_loop(p, b):
    body = lambda at: (at[0] + 1, jnp.tanh(ops.dense(at[1], p["kernel"])))  # noqa: E731
    return total(jax.lax.while_loop(lambda at: at[0] < 2, body, (0, b["x"]))[1])


@looped(kernel=SQUARE, other=SQUARE)
def a_while_loop_that_no_gradient_enters(p, b):
    body = lambda at: (at[0] + 1, jnp.tanh(ops.dense(at[1], p["kernel"])))  # noqa: E731
    x = jax.lax.stop_gradient(jax.lax.while_loop(lambda at: at[0] < 2, body, (0, b["x"]))[1])
    return total(ops.dense(x, p["other"]))


INDICES = {
    "once_each": (0, 1, 2),
    "out_of_order": (2, 0, 1),
    "one_twice": (0, 1, 1),
    "from_behind": (-3, -2, -1),
    "behind_and_before": (0, 2, -1),
}
for name, indices in INDICES.items():

    def unrolled(p, b, indices=indices):
        x = b["x"]
        for i in indices:
            x = jnp.tanh(ops.dense(x, jax.tree.map(lambda leaf, i=i: leaf[i], p["layers"]["kernel"])))
        return total(x)

    unrolled.__name__ = f"layers_in_line_{name}"
    looped(params=drawn({"layers": {"kernel": STACK}}), slow=True)(unrolled)


@looped(params=drawn({"layers": {"kernel": STACK}}), slow=True)
def layers_in_line_without_tree_map(p, b):
    x = b["x"]
    for i in range(L):
        x = jnp.tanh(ops.dense(x, p["layers"]["kernel"][i]))
    return total(x)


@looped(kernel=STACK)
def a_layer_in_line_and_all_in_a_scan(p, b):
    x = jnp.tanh(ops.dense(b["x"], jax.tree.map(lambda leaf: leaf[1], p["kernel"])))
    return total(jax.lax.scan(lambda x, k: (jnp.tanh(ops.dense(x, k)), None), x, p["kernel"])[0])


@looped(kernel=SQUARE, other=SQUARE)
def once_in_each_branch(p, b):
    x = jnp.tanh(ops.dense(b["x"], p["other"]))
    return total(jax.lax.cond(jnp.array(True), lambda: ops.dense(x, p["kernel"]), lambda: 2 * ops.dense(x, p["kernel"])))


@looped(kernel=SQUARE, slow=True)
def twice_in_one_branch(p, b):
    twice = lambda: ops.dense(jnp.tanh(ops.dense(b["x"], p["kernel"])), p["kernel"])  # noqa: E731
    return total(jax.lax.cond(jnp.array(True), twice, lambda: b["x"]))


@looped(kernel=SQUARE, slow=True)
def in_a_branch_and_beside_it(p, b):
    x = ops.dense(b["x"], p["kernel"])
    return total(jax.lax.cond(jnp.array(True), lambda: ops.dense(jnp.tanh(x), p["kernel"]), lambda: x))


@looped(kernel=SQUARE, other=SQUARE, slow=True)
def in_a_switch(p, b):
    branches = [lambda x: ops.dense(x, p["kernel"]), lambda x: ops.dense(ops.dense(x, p["kernel"]), p["other"]), lambda x: x]
    return total(jax.lax.switch(jnp.array(1), branches, b["x"]))


@looped(kernel=SQUARE, slow=True)
def a_branch_in_every_round(p, b):
    def layer(x, i):
        return jax.lax.cond(i == 1, lambda: jnp.tanh(ops.dense(x, p["kernel"])), lambda: x), None

    return total(jax.lax.scan(layer, b["x"], jnp.arange(3))[0])


@looped(kernel=SQUARE, bias=(D,), slow=True)
def under_remat(p, b):
    return total(jax.checkpoint(lambda p, x: jnp.tanh(ops.dense(x, p["kernel"], p["bias"])))(p, b["x"]))


@looped(kernel=SQUARE)
def twice_under_remat(p, b):
    return total(jax.checkpoint(lambda p, x: ops.dense(jnp.tanh(ops.dense(x, p["kernel"])), p["kernel"]))(p, b["x"]))


@looped(kernel=STACK, slow=True)
def a_scan_under_remat(p, b):
    layer = jax.checkpoint(lambda x, k: (jnp.tanh(ops.dense(x, k)), None))
    return total(jax.lax.scan(layer, b["x"], p["kernel"])[0])


# Rules of the user's own around an op.


def scaled_rule(function, factor):
    """`function` with a backward pass that is `factor` times the true one: wrong, but what autodiff obeys."""
    ruled = jax.custom_vjp(function)
    ruled.defvjp(lambda *args: jax.vjp(function, *args), lambda back, g: jax.tree.map(lambda leaf: factor * leaf, back(g)))
    return ruled


@looped(kernel=SQUARE)
def in_a_rule_that_scales(p, b):
    return total(scaled_rule(lambda kernel, x: ops.dense(x, kernel), 3.0)(p["kernel"], b["x"]))


@looped(kernel=SQUARE, other=SQUARE)
def before_a_rule_that_scales(p, b):
    x = ops.dense(b["x"], p["kernel"])
    return total(ops.dense(scaled_rule(jnp.tanh, 3.0)(x), p["other"]))


@looped(kernel=SQUARE, slow=True)
def in_a_rule_that_forgets(p, b):
    ruled = jax.custom_vjp(lambda kernel, x: ops.dense(x, kernel))
    ruled.defvjp(lambda kernel, x: (ops.dense(x, kernel), kernel), lambda kernel, g: (jax.tree.map(jnp.zeros_like, kernel), g))
    return total(ruled(p["kernel"], b["x"]))


@looped("loud", kernel=SQUARE, settings={"is_zero": True})
def in_a_forward_rule(p, b):
    """The rule knows no tangent of the kernel, so its gradient is zero."""
    ruled = jax.custom_jvp(lambda kernel, x: ops.dense(x, kernel))

    @ruled.defjvp
    def rule(primals, tangents):
        kernel, x = primals
        return ops.dense(x, kernel), 3 * ops.dense(tangents[1], kernel)

    return total(ruled(p["kernel"], b["x"]))


@looped.each()
def test_parameters_in_loops_and_branches(attack):
    right_or_refused(attack)


@pytest.mark.slow
@looped.each()
def test_parameters_in_loops_and_branches_by_every_way(attack):
    right_or_refused(attack, ALL_WAYS)
