"""Loops that stack each value once: the same results, and fewer arrays."""

import jax
import jax.numpy as jnp
import numpy as np

from dpx.clipping.program import without_copies
from dpx.cost.traced import temporary_bytes

ROUNDS, D = 6, 5
X = jnp.asarray(np.random.default_rng(0).normal(size=(ROUNDS, D)), jnp.float32)


def passes_on(x_RD, reverse=False):
    """A loop that returns an input as it is and in other shapes, a value twice, a carried value, and a constant."""

    def round_of(h_D, x_D):
        new_D = jnp.tanh(h_D + x_D)
        return new_D, (x_D, x_D.reshape(D, 1), jnp.transpose(x_D.reshape(1, D)), new_D, new_D.reshape(1, D), h_D, jnp.float32(2))

    return jax.lax.scan(round_of, jnp.zeros(D), x_RD, reverse=reverse)


def stacked_by(function):
    """The outputs that the loop of a traced program stacks."""
    (loop,) = (eqn for eqn in jax.make_jaxpr(function)().jaxpr.eqns if eqn.primitive.name == "scan")
    return len(loop.outvars) - 1


def test_results_are_equal_to_the_bit_and_values_are_stacked_once():
    for reverse in (False, True):
        plain, ours = (
            (lambda reverse=reverse: passes_on(X, reverse)),
            (lambda reverse=reverse: without_copies(lambda: passes_on(X, reverse))),
        )
        for one, other in zip(jax.tree.leaves(plain()), jax.tree.leaves(ours()), strict=True):
            np.testing.assert_array_equal(one, other)
        # Its new value, the carried one, and the constant; jax itself passes on what has the same shape.
        assert (stacked_by(plain), stacked_by(ours)) == (6, 3)


def test_a_loop_inside_other_operations_and_without_rounds():
    def run(x_RD):
        carried, stacked = passes_on(x_RD)
        return jnp.sin(carried), stacked[0] * 2

    for x_RD in (X, X[:0]):
        expected, found = jax.jit(run)(x_RD), jax.jit(lambda x_RD: without_copies(lambda: run(x_RD)))(x_RD)
        jax.tree.map(np.testing.assert_array_equal, expected, found)


def test_records_of_a_stack_of_layers_are_not_held_beside_its_residuals():
    def sums(run):
        def loss(params_RDD, taps_R4D, x_4D):
            @jax.custom_vjp
            def op(x_4D, kernel_DD, tap_4D):
                return x_4D @ kernel_DD

            forward = lambda x_4D, kernel_DD, tap_4D: (x_4D @ kernel_DD, (x_4D, kernel_DD))  # noqa: E731
            op.defvjp(forward, lambda kept, g_4D: (g_4D @ kept[1].T, None, kept[0]))
            return jnp.square(jax.lax.scan(lambda x, p: (jnp.tanh(op(x, *p)), None), x_4D, (params_RDD, taps_R4D))[0]).sum()

        def records(params_RDD, x_4D):
            _, backward = jax.vjp(lambda taps: loss(params_RDD, taps, x_4D), jnp.zeros((ROUNDS, *x_4D.shape)))
            return run(lambda: backward(jnp.float32(1)))[0].sum(0)

        return records

    shapes = jax.ShapeDtypeStruct((ROUNDS, 8, 8), jnp.float32), jax.ShapeDtypeStruct((512, 8), jnp.float32)
    held, plain = temporary_bytes(sums(without_copies), *shapes), temporary_bytes(sums(lambda run: run()), *shapes)
    assert held <= plain - ROUNDS * 4 * 512 * 8 / 2
