"""A parameter's per-example gradient, as each use of the parameter gives it, and the norm of the sum over several uses.

The squared norm of a sum is not the sum of the squared norms: products between uses count too. Without them a table that is both
looked up and decoded is clipped 12 % too weakly, and no other symptom shows it.

B: examples, T: tokens (of all uses where uses are joined), p, d: a matrix's rows and columns, n: rounds of a loop.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpx.clipping import norms


class Outer(NamedTuple):
    """sum_t a_t^T g_t, a matrix [p, d]."""

    a: Float[Array, "B T p"]
    g: Float[Array, "B T d"]


class Rows(NamedTuple):
    """g_t added to row id_t of a table."""

    id: Float[Array, "B T"]
    g: Float[Array, "B T d"]


class Whole(NamedTuple):
    """The gradient itself, [B, ...]."""

    values: Array


Form = Outer | Rows | Whole

# Where a lookup and a decoder cancel, rounding in float32 is about this share of their squares: a smaller result is raised to it.
ROUNDING = 2.0**-22


class Use(NamedTuple):
    """One use's gradient, and its squared norm `own_B` [B] where the op has computed it already."""

    form: Form
    own_B: Array | None = None


def merged(form: Form, rounds: int) -> Form:
    """The sum of a use over the rounds of loops: arrays [n, ..., B, ...], whose first `rounds` axes are loops, as one use [B, ...]."""
    if isinstance(form, Whole):
        return Whole(form.values.sum(tuple(range(rounds))))

    def one(x: Array) -> Array:
        inward = jnp.moveaxis(x, rounds, 0)
        return inward.reshape(x.shape[rounds], math.prod((*x.shape[:rounds], x.shape[rounds + 1])), *x.shape[rounds + 2 :])

    return type(form)(*(one(x) for x in form))


def squares(uses: list[Use], shape: tuple[int, ...]) -> Float[Array, " B"]:
    """The squared norm of the uses' sum, for a parameter of this shape."""
    if len(uses) == 1 and uses[0].own_B is not None:
        return uses[0].own_B
    outer = [use for use in uses if isinstance(use.form, Outer)]
    rows = [use for use in uses if isinstance(use.form, Rows)]
    matrices = {(form.a.shape[-1], form.g.shape[-1]) for form, _ in uses if isinstance(form, Outer)}
    # Rows of a table meet a matrix whose rows are the table's.
    is_table = not rows or matrices <= {(shape[0], math.prod(shape[1:]))}
    if len(outer) + len(rows) < len(uses) or len(matrices) > 1 or not is_table:
        whole, *others = (formed(use.form, shape) for use in uses)
        return norms.squares(sum(others, whole))
    each_B, both = [], []
    for alike, joined_square in ((outer, _outer_square), (rows, lambda form: norms.lookup(*form))):
        if alike:
            both.append(_concatenated(alike))
            each_B.append(alike[0].own_B if len(alike) == 1 and alike[0].own_B is not None else joined_square(both[-1]))
    total_B = sum(each_B[1:], each_B[0])
    return total_B if len(both) == 1 else jnp.maximum(total_B + 2 * _product(*both), ROUNDING * total_B)


def formed(form: Form, shape: tuple[int, ...]) -> Array:
    """The gradient itself, [B, *shape]."""
    if isinstance(form, Whole):
        return norms.at_least_float32(form.values).reshape(-1, *shape)
    if isinstance(form, Outer):
        return norms.per_example(form.a, form.g).reshape(-1, *shape)
    start = jnp.zeros((shape[0], math.prod(shape[1:])), jnp.promote_types(form.g.dtype, jnp.float32))
    return jax.vmap(lambda id_T, g_Td: start.at[id_T.astype(jnp.int32)].add(g_Td))(form.id, form.g).reshape(-1, *shape)


def summed(form: Form, weights_B: Array, shape: tuple[int, ...]) -> Array:
    """sum_b w_b of the gradient, [*shape]."""
    if isinstance(form, Whole):
        return jnp.tensordot(weights_B, norms.at_least_float32(form.values), 1, precision="highest").reshape(shape)
    weighted = norms.at_least_float32(form.g) * weights_B[:, None, None]
    if isinstance(form, Outer):
        return norms.summed(norms.at_least_float32(form.a), weighted).reshape(shape)
    start = jnp.zeros((shape[0], math.prod(shape[1:])), weighted.dtype)
    return start.at[form.id.astype(jnp.int32)].add(weighted).reshape(shape)


def _concatenated(uses: list[Use]) -> Form:
    return type(uses[0].form)(*(jnp.concatenate(arrays, axis=1) for arrays in zip(*(use.form for use in uses), strict=True)))


def _outer_square(form: Outer) -> Float[Array, " B"]:
    (_, T, p), d = form.a.shape, form.g.shape[-1]
    if p >= norms.WIDE_ROWS:
        # As wide as a vocabulary: centring would take another pass over it.
        return jnp.maximum(norms.symmetric(form.a, form.g)[0], 0)
    if norms.choose(T, p, d, False) == "gram":
        return norms.gram(form.a, form.g)
    return norms.squares(norms.per_example(form.a, form.g))


def _product(decoded: Outer, looked_up: Rows) -> Float[Array, " B"]:
    """sum over a table's entries of one's gradient times the other's: sum_mt a[m, id_t] (g_m . g_t)."""
    id_B1T = looked_up.id.astype(jnp.int32)[:, None]
    gathered_BMT = jnp.take_along_axis(norms.at_least_float32(decoded.a), id_B1T, axis=2)
    across_BMT = norms.product("bmd,btd->bmt", norms.at_least_float32(decoded.g), norms.at_least_float32(looked_up.g))
    return (gathered_BMT * across_BMT).sum((1, 2))
