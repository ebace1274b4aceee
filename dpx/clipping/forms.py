"""Describes a parameter's per-example gradient from each of its uses, and computes the norm of the sum over several uses.

The squared norm of a sum is not the sum of the squared norms: products between uses count too. Without them a table that is both
looked up and decoded is clipped 12 % too weakly, without any other symptom.

B: examples, T: tokens (of all uses if uses are joined), p, d: a matrix's rows and columns, n: rounds of a loop.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpx.clipping import bounds, norms
from dpx.clipping.bounds import Bounded


class Outer(NamedTuple):
    """The gradient sum_t a_t^T g_t, a matrix [p, d]."""

    a: Float[Array, "B T p"]
    g: Float[Array, "B T d"]


class Rows(NamedTuple):
    """A gradient that adds g_t to row id_t of a table."""

    id: Float[Array, "B T"]
    g: Float[Array, "B T d"]


class Whole(NamedTuple):
    """The gradient itself, [B, ...].

    `of_norm` is the rounding error of its sum over the rounds of a loop, if it is such a sum.
    """

    values: Array
    of_norm: Float[Array, " B"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Part:
    """The gradient of a part of a parameter, sum_nt a_nt^T g_nt for each batch axis E of a product; `op` writes it to its place.

    The place of round n is `at`, if it differs by round, or by unit too unless the op says that all units share it.
    """

    a: Any  # [B, n, E, T, p]
    g: Any  # [B, n, E, T, d]
    at: Any  # [B, n, axes]
    op: Any = dataclasses.field(metadata={"static": True})


Form = Outer | Rows | Whole | Part


class Use(NamedTuple):
    """The gradient of one use, and its squared norm `own_B` [B] if the op has already computed it."""

    form: Form
    own_B: Array | Bounded | None = None


def merged(form: Form, rounds: int) -> Form:
    """Adds up a use over the rounds of loops: arrays [n, ..., B, ...], whose first `rounds` axes are loops, become one use [B, ...]."""
    if isinstance(form, Whole):
        looped, terms = tuple(range(rounds)), math.prod(form.values.shape[:rounds]) + 1
        values = norms.at_least_float32(form.values)
        length_B = jnp.sqrt(jnp.square(values).sum(tuple(range(rounds + 1, values.ndim)))).sum(looped)
        return Whole(values.sum(looped), 2 * terms * bounds.unit(values) * length_B)

    def one(x: Array) -> Array:
        inward = jnp.moveaxis(x, rounds, 0)
        return inward.reshape(x.shape[rounds], math.prod((*x.shape[:rounds], x.shape[rounds + 1])), *x.shape[rounds + 2 :])

    if isinstance(form, Part):
        a, g, *at = (one(x) for x in (form.a, form.g, form.at) if x is not None)
        return dataclasses.replace(form, a=a, g=g, at=at[0] if at else None)
    return type(form)(*(one(x) for x in form))


def squares(uses: list[Use], shape: tuple[int, ...]) -> Float[Array, " B"]:
    """Returns the squared norm of the sum of the uses, by which a parameter of this shape is clipped."""
    if len(uses) == 1 and uses[0].own_B is not None:
        return bounds.upper(uses[0].own_B)
    if not has_products([use.form for use in uses], shape):
        square_B = norms.squares(added_up([use.form for use in uses], shape))
        return bounds.upper(_of_uses(square_B, jnp.zeros_like(square_B), [of_formed(use.form) for use in uses], len(uses)))
    outer = [use for use in uses if isinstance(use.form, Outer)]
    rows = [use for use in uses if isinstance(use.form, Rows)]
    each, both = [], []
    for alike, joined_square in ((outer, _outer_square), (rows, lambda form: norms.lookup(form.id, form.g, shape[0]))):
        if alike:
            arrays = zip(*(use.form for use in alike), strict=True)
            both.append(type(alike[0].form)(*(jnp.concatenate(own, axis=1) for own in arrays)))
            own = alike[0].own_B if len(alike) == 1 else None
            each.append(own if isinstance(own, Bounded) else joined_square(both[-1]))
    if len(each) == 1:
        return bounds.upper(each[0])
    square_B = each[0].square + each[1].square + 2 * _product(*both)
    of_square_B = each[0].of_square + each[1].of_square + 2 * _error_of_product(*both)
    return bounds.upper(_of_uses(square_B, of_square_B, [bounded.of_norm for bounded in each], len(uses)))


def has_products(forms: Sequence[Form], shape: tuple[int, ...]) -> bool:
    """Returns whether products between the uses give the norm of their sum, without the sum itself; shapes are enough."""
    matrices = {(form.a.shape[-1], form.g.shape[-1]) for form in forms if isinstance(form, Outer)}
    # Rows of a table meet a matrix whose rows are the table's.
    is_table = not any(isinstance(form, Rows) for form in forms) or matrices <= {(shape[0], math.prod(shape[1:]))}
    return not any(isinstance(form, Whole | Part) for form in forms) and len(matrices) <= 1 and is_table


def is_formed_once(forms: Sequence[Form], shape: tuple[int, ...]) -> bool:
    """Returns whether the sum of the uses should be formed for the norm and kept for the clipped sum, if memory allows; shapes are enough.

    Else products between positions cost no more, and at most half of the product that forms a matrix.
    """
    outer = [form for form in forms if isinstance(form, Outer)]
    rows = [form for form in forms if isinstance(form, Rows)]
    if not has_products(forms, shape):
        return bool(outer) or any(isinstance(form, Part) for form in forms)
    kept = apart = 0
    if rows:
        (V, d), T = (shape[0], rows[0].g.shape[-1]), sum(form.g.shape[1] for form in rows)
        apart = norms.lookup_cost("by_id" if norms.is_added_by_id(T, V) else "pairs", T, d, V)
        # The rows are added to what the products have formed.
        kept = norms.FLOPS_PER_BYTE * 4 * T * d if outer else norms.lookup_cost("kept", T, d, V)
    if not outer:
        return kept < apart
    (p, d), T = (outer[0].a.shape[-1], outer[0].g.shape[-1]), sum(form.a.shape[1] for form in outer)
    is_cheaper = kept + norms.cost("kept", T, p, d) < apart + norms.cost(norms.choose(T, p, d, False), T, p, d)
    return is_cheaper or norms.choose(T, p, d, True) == "kept" and norms.gram_flops(T, p, d) > T * p * d


def added_up(forms: Sequence[Form], shape: tuple[int, ...]) -> Array:
    """Returns the gradient of all uses together, [B, *shape]."""
    whole, *others = (formed(form, shape) for form in forms)
    return sum(others, whole)


def kept(forms: Sequence[Form], shape: tuple[int, ...]) -> Array:
    """Returns `added_up` for a gradient that is kept for the sum, so that it may round more often: rows are added to what is there."""
    rows = [form for form in forms if isinstance(form, Rows)]
    others = [form for form in forms if not isinstance(form, Rows)]
    if not others:
        return added_up(forms, shape)
    whole = added_up(others, shape).reshape(-1, shape[0], math.prod(shape[1:]))
    whole = whole.astype(norms.float32_or_wider(whole.dtype, *(form.g.dtype for form in rows)))
    for form in rows:
        whole = jax.vmap(lambda own, id_T, g_Td: own.at[id_T.astype(jnp.int32)].add(g_Td.astype(own.dtype)))(whole, form.id, form.g)
    return whole.reshape(-1, *shape)


def _of_uses(square_B: Array, of_square_B: Array, of_norms: list[Array], uses: int) -> Bounded:
    """Returns the bounds of the sum of several uses.

    The uses are added one after another, so each is rounded once more for every other use; each was rounded at least twice before.
    """
    return Bounded(square_B, of_square_B, (1 + uses / 2) * sum(of_norms[1:], of_norms[0]))


def of_formed(form: Form) -> Float[Array, " B"]:
    """Returns the rounding error of one use's gradient if it is formed once for the norm and again for the sum."""
    if isinstance(form, Whole):
        values = norms.at_least_float32(form.values)
        return 4 * bounds.unit(values) * jnp.sqrt(norms.squares(values)) if form.of_norm is None else form.of_norm
    if isinstance(form, Part):
        length_BE = (bounds.lengths(form.a) * bounds.lengths(form.g)).sum((1, 3))
        roundings = 2 * form.g.shape[1] * form.g.shape[3] + 1
        return bounds.of_terms(roundings, form.a, form.g) * jnp.sqrt(norms.squares(length_BE))
    length_BT = bounds.lengths(form.g) * (bounds.lengths(form.a) if isinstance(form, Outer) else 1)
    roundings = 2 * form.g.shape[1] + 1
    return (bounds.of_terms(roundings, form.a, form.g) if isinstance(form, Outer) else roundings * bounds.unit(form.g)) * length_BT.sum(1)


def formed(form: Form, shape: tuple[int, ...]) -> Array:
    """Returns the gradient itself, [B, *shape]."""
    if isinstance(form, Whole):
        return norms.at_least_float32(form.values).reshape(form.values.shape[0], *shape)
    if isinstance(form, Outer):
        return norms.per_example(form.a, form.g).reshape(-1, *shape)
    if isinstance(form, Rows):
        start = jnp.zeros((shape[0], math.prod(shape[1:])), norms.float32_or_wider(form.g.dtype))
        return jax.vmap(lambda id_T, g_Td: start.at[id_T.astype(jnp.int32)].add(g_Td))(form.id, form.g).reshape(-1, *shape)
    op, dtype = form.op, norms.float32_or_wider(form.a.dtype, form.g.dtype)
    like = jax.ShapeDtypeStruct(shape, dtype)
    if form.at is None:
        return jax.vmap(partial(op.placed, like=like))(norms.product("bnetp,bnetd->bepd", form.a, form.g))

    def add(total: Array, round_of: Any) -> tuple[Array, None]:
        a, g, at = round_of
        own = norms.product("betp,betd->bepd", a, g)
        return jax.vmap(op.added, in_axes=(0, 0, None if op.is_shared else 0))(total, own, at[0] if op.is_shared else at), None

    start = jnp.zeros((form.a.shape[0], *op.view.before.shape), dtype)
    along = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (form.a, form.g, form.at))
    return jax.vmap(partial(op.view.before.back, like=like))(jax.lax.scan(add, start, along)[0])


def summed(form: Form, weights_B: Array, shape: tuple[int, ...]) -> Array:
    """Returns sum_b w_b grad_b, [*shape]."""
    if isinstance(form, Whole):
        return jnp.tensordot(weights_B, norms.at_least_float32(form.values), 1, precision="highest").reshape(shape)
    if isinstance(form, Outer | Rows):
        weighted = norms.at_least_float32(form.g) * weights_B[:, None, None]
        if isinstance(form, Outer):
            return norms.summed(form.a, weighted).reshape(shape)
        start = jnp.zeros((shape[0], math.prod(shape[1:])), weighted.dtype)
        return start.at[form.id.astype(jnp.int32)].add(weighted).reshape(shape)
    weighted = norms.rows(weights_B, form.g)
    op, like = form.op, jax.ShapeDtypeStruct(shape, weighted.dtype)
    if form.at is None:
        return op.placed(norms.weighted_product("bnetp,bnetd->epd", form.a, weighted), like)

    def add(total: Array, round_of: Any) -> tuple[Array, None]:
        a, g, at = round_of
        return op.added(total, norms.weighted_product("betp,betd->epd", a, g), at), None

    if op.is_shared:
        along = *(jnp.moveaxis(x, 1, 0) for x in (form.a, weighted)), form.at[0]
    else:
        along = jax.tree.map(lambda x: x.reshape(-1, 1, *x.shape[2:]), (form.a, weighted))
        along = *along, form.at.reshape(-1, form.at.shape[-1])
    start = jnp.zeros(op.view.before.shape, weighted.dtype)
    return op.view.before.back(jax.lax.scan(add, start, along)[0], like)


def _outer_square(form: Outer) -> Bounded:
    (_, T, p), d = form.a.shape, form.g.shape[-1]
    if p >= norms.WIDE_ROWS:
        # As wide as a vocabulary: centring would take another pass over it.
        return norms.symmetric(form.a, form.g)[0]
    if norms.choose(T, p, d, False) == "gram":
        return norms.gram(form.a, form.g)
    return norms.formed(form.a, form.g, norms.per_example(form.a, form.g))


def _product(decoded: Outer, looked_up: Rows) -> Float[Array, " B"]:
    """Returns the inner product of two gradients of one table, sum_mt a[m, id_t] (g_m . g_t)."""
    across_BMT = norms.product("bmd,btd->bmt", norms.at_least_float32(decoded.g), norms.at_least_float32(looked_up.g))
    return (_gathered(decoded, looked_up) * across_BMT).sum((1, 2))


def _error_of_product(decoded: Outer, looked_up: Rows) -> Float[Array, " B"]:
    """Returns the largest rounding error of `_product`."""
    gathered_BMT = _gathered(decoded, looked_up)
    lengths_BMT = bounds.lengths(decoded.g)[:, :, None] * bounds.lengths(looked_up.g)[:, None]
    terms = bounds.product_depth(decoded.g.shape[-1]) + bounds.sum_depth(math.prod(gathered_BMT.shape[1:])) + 12
    return terms * bounds.unit(gathered_BMT) * (jnp.abs(gathered_BMT) * lengths_BMT).sum((1, 2))


def _gathered(decoded: Outer, looked_up: Rows) -> Float[Array, "B M T"]:
    """Returns a[m, id_t], [B, M, T]."""
    return jnp.take_along_axis(norms.at_least_float32(decoded.a), looked_up.id.astype(jnp.int32)[:, None], axis=2)
