"""Runs an op's backward pass in one of several kinds: one kind for each result that clipping needs beside the inputs' cotangents.

A record (for example an op's input and its output cotangent) is returned as the cotangent of a dummy input, the tap; a parameter's summed
gradient as the cotangent of a second dummy input, zeros in its shape. So one `vjp` through a loss made of ops yields all of it, and no
Python state outlives a trace.

U: units.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dpx.clipping.probes import Op, leaf_names

# record: the tap's cotangent is the record. norm: it is the squared norms. weighted: the tap holds weights, and the sums' cotangent is
# the gradient weighted by them, rows of weight zero masked. plain: the sums' alone. through: nothing, for an op that trains nothing.
Pass = Literal["record", "norm", "weighted", "plain", "through"]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run(op: Op, kind: Pass, values: Any, inputs: tuple, tap: Any, sums: tuple) -> Any:
    """Returns the op's outputs.

    `sums` has one array for each leaf, or None for a leaf that is not trained or whose sum is not needed.
    """
    return op.outputs(values, inputs)


def _forward(op: Op, kind: Pass, values: Any, inputs: tuple, tap: Any, sums: tuple) -> Any:
    outputs, residuals = op.forward(values, inputs)
    return outputs, (values, residuals, tap if kind == "weighted" else None, tuple(total is not None for total in sums))


def _backward(op: Op, kind: Pass, saved: Any, cotangent: Any) -> Any:
    values, residuals, weights, wanted = saved
    if kind == "plain":
        inputs, gradient = op.gradient(values, residuals, cotangent)
        return None, inputs, None, _of_wanted(op, values, gradient, wanted)
    inputs, record = op.backward(values, residuals, cotangent)
    if kind == "weighted":
        # Not above zero: a weight may be negative.
        keep_U = jnp.stack([jnp.any(part.reshape(-1, part.shape[-1]) != 0, axis=0) for part in weights]).any(0)
        keep_U = keep_U if op.norm_sees_all else keep_U & op.is_finite(record, keep_U.shape[0])
        gradient = op.masked_sum(values, record, weights, keep_U)
        return None, inputs, jax.tree.map(jnp.zeros_like, weights), _of_wanted(op, values, gradient, wanted)
    tap = record if kind == "record" else _finite_squares(op, values, record) if kind == "norm" else None
    return None, inputs, tap, (None,) * len(wanted)


run.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def copied_again(op: Op, values: Any, inputs: tuple, copy: Any, varying: Any) -> Any:
    """Returns `copy`, the output of an op that copies its leaf, made where a loop reads it, so that the loop need not hold it.

    The cotangent goes to `copy`. `varying` is anything that differs by round: what does not is computed before the loop.
    """
    return _copied_forward(op, values, inputs, copy, varying)[0]


def _copied_forward(op: Op, values: Any, inputs: tuple, copy: Any, varying: Any) -> Any:
    (values, inputs), _ = jax.lax.optimization_barrier(((values, inputs), varying))
    return op.outputs(values, inputs), None


def _copied_backward(op: Op, _: None, cotangent: Any) -> Any:
    return None, None, cotangent, None


copied_again.defvjp(_copied_forward, _copied_backward)


def _of_wanted(op: Op, values: Any, gradient: Any, wanted: tuple[bool, ...]) -> tuple:
    return tuple(leaf if is_wanted else None for leaf, is_wanted in zip(by_leaf(op, values, gradient), wanted, strict=True))


def by_leaf(op: Op, leaves: Any, summed: Any) -> list[Any]:
    """Returns an op's sums with one entry for each of its leaves: None for frozen leaves."""
    sums = iter(jax.tree.leaves(summed))
    return [next(sums) if op.trains(name) else None for name in leaf_names(leaves)]


def _finite_squares(op: Op, values: Any, record: Any) -> tuple:
    """Returns the squared norms, with NaN for a unit whose sum would not be finite.

    No record outlives the pass, so this is the last time to look.
    """
    squares = op.squared_norm(values, record)
    if op.norm_sees_all:
        return squares
    is_finite_U = op.is_finite(record, jax.tree.leaves(squares)[0].shape[-1])
    return jax.tree.map(lambda square: jnp.where(is_finite_U, square, jnp.nan), squares)
