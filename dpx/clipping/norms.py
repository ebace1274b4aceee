"""Computes squared per-example norms of a dense layer's gradient in three forms, and chooses the form.

The gradient of example b is A_b^T G_b (input and output cotangent). `kept` holds it: no extra FLOPs, B p d numbers.
`gram` never forms it: |A^T G|^2 = sum_ts (A A^T)_ts (G G^T)_ts, T^2 (p+d) products, half of it by symmetry. `recomputed`
forms it twice. With A split into its token mean a and the rest A~, and s = sum_t G_t,
|A^T G|^2 = |A~^T G|^2 + 2 sum_t (A~_t.a)(G_t.s) + |a|^2 |s|^2: without the split, flat activations with a zero-sum cotangent
(the key projection's is zero by softmax's shift invariance) cancel away up to 6e-3 of the norm in float32.

Every form comes with the errors that rounding may cause, as `Bounded` (bounds.py). rounding.py derives them.

B: examples, T: tokens, p: inputs, d: outputs.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpx.clipping import bounds
from dpx.clipping.bounds import WIDE_ROWS, Bounded
from dpx.clipping.rounding import CHAIN

Form = Literal["kept", "gram", "recomputed"]
Strip = Callable[..., tuple[Array, ...]]

# FLOPs that a machine computes while it moves one byte to or from memory: some ten on CPUs, and more on accelerators.
FLOPS_PER_BYTE = 10
# The number of positions from which a lookup's cotangents are always added up by id (lookup).
BY_ID_FROM = 128


def float32_or_wider(*dtypes: Any) -> Any:
    """Returns the type in which numbers of these types are added up: float32, or a wider one of them."""
    # Types of 8 bits and less have no promotion.
    return jnp.promote_types(jnp.result_type(*(jnp.bfloat16 if is_tiny(dtype) else dtype for dtype in dtypes)), jnp.float32)


def at_least_float32(x: Array) -> Array:
    """Returns `x` in float32, or in its own type if that is wider."""
    return x.astype(float32_or_wider(x.dtype))


def at_least_bfloat16(x: Array) -> Array:
    """Returns `x`, or if it has a floating-point type of 8 bits or less, the same numbers in bfloat16."""
    return x.astype(jnp.bfloat16) if is_tiny(x.dtype) else x


def is_tiny(dtype: Any) -> bool:
    """Returns whether it is a floating-point type of 8 bits or less."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 8


def as_stored(leaf: Array) -> Array:
    """Rounds a record to its storage type before a norm is taken.

    Without this, the compiler may take the norm before it rounds, while the sum, which is behind a branch, is of the rounded record.
    """
    return jax.lax.optimization_barrier(leaf) if leaf.dtype.itemsize < 4 else leaf


@jax.jit
def rows(weights_B: Array, x: Array) -> Array:
    """Returns each example's rows multiplied by its weight, in float32 or wider."""
    return at_least_float32(x) * weights_B.reshape((-1,) + (1,) * (x.ndim - 1))


def product(equation: str, a: Array, b: Array) -> Array:
    """Computes an einsum that accumulates and returns float32 or wider, at full precision on every device."""
    a, b = at_least_bfloat16(a), at_least_bfloat16(b)
    return jnp.einsum(equation, a, b, precision="highest", preferred_element_type=float32_or_wider(a.dtype, b.dtype))


def weighted_product(equation: str, a: Array, b: Array) -> Array:
    """Computes `product` of arrays of which one is multiplied by clip weights: in bfloat16 parts if the other one is narrow."""
    return (bounds.einsum if bounds.is_narrow(a) or bounds.is_narrow(b) else product)(equation, a, b)


def blocks(tokens: int) -> int:
    """Returns the number n of blocks into which symmetric products are cut: the work is (n+1)/2n of the whole square."""
    return 8 if tokens >= 256 else 4 if tokens >= 64 else 1


def gram_flops(T: int, p: int, d: int) -> float:
    """Returns the FLOPs of the Gram form for T tokens, p inputs and d outputs."""
    return 2 * T * T * (p + d) * (blocks(T) + 1) / (2 * blocks(T))


def cost(form: Form, T: int, p: int, d: int) -> int:
    """Returns what the norm and the sum cost by this form: FLOPs of products, and `FLOPS_PER_BYTE` for each byte that they move.

    A product reads its factors; a gradient is written, and read for the norm; if it is kept, it is read again for the sum.
    """
    product, factors, gradient = 2 * T * p * d, 4 * T * (p + d), 4 * p * d
    flops, moved = {
        "kept": (product, factors + 3 * gradient),
        "gram": (product + int(gram_flops(T, p, d)), 2 * factors),
        "recomputed": (2 * product, 2 * factors + 2 * gradient),
    }[form]
    return flops + FLOPS_PER_BYTE * moved


def lookup_cost(way: Literal["kept", "pairs", "by_id"], T: int, d: int, rows_of_table: int) -> int:
    """Returns what the norm and the sum of T lookups of rows [d] cost, counted as `cost` does.

    Their cotangents are compared in pairs, added up by id, or added up in a table that is kept.
    """
    cotangents, count = 4 * T * d, blocks(T)
    flops, moved = {
        "kept": (0, cotangents + 3 * 4 * rows_of_table * d),
        "pairs": (T * T * d * (count + 1) // count, 2 * cotangents),
        "by_id": (0, 2 * cotangents + 2 * 4 * min(T, rows_of_table) * d),
    }[way]
    return flops + FLOPS_PER_BYTE * moved


def choose(T: int, p: int, d: int, kept_fits: bool) -> Form:
    """Returns the cheapest form.

    It is Gram if that costs under 2 % of the layer's products and no more than keeping, else kept if it fits in memory, else the one with
    the fewest FLOPs.
    """
    gram, recomputed = gram_flops(T, p, d), 2 * T * p * d
    if gram < 0.02 * 3 * recomputed and cost("gram", T, p, d) <= cost("kept", T, p, d):
        return "gram"
    if kept_fits:
        return "kept"
    return "gram" if gram < recomputed else "recomputed"


def over_triangle(strip: Strip, *arrays: Array, whole: bool = False) -> tuple[Float[Array, " B"], ...]:
    """Sums symmetric [B,T,T] products over t,s, from the upper triangle of blocks unless `whole`.

    `strip(start, end, *arrays)` gives rows start to end of each product, from column start on; `arrays` are [B,T,...].
    """

    def cut(count: int, *arrays: Array) -> tuple[Array, ...]:
        edges = [round(i * T / count) for i in range(count + 1)]
        by_strip = [strip(start, end, *arrays) for start, end in zip(edges[:-1], edges[1:], strict=True)]
        return tuple(sum(map(_counted_twice, strips[1:]), _counted_twice(strips[0])) for strips in zip(*by_strip, strict=True))

    T = arrays[0].shape[1]
    # XLA's CPU backend copies every block and runs small products slowly: at 128 tokens the whole square takes half the time of four.
    count, on_cpu = (1, 1) if whole else (blocks(T), 4 if T >= 256 else 1)
    if count == on_cpu:
        return cut(count, *arrays)
    return jax.lax.platform_dependent(*arrays, cpu=functools.partial(cut, on_cpu), default=functools.partial(cut, count))


def _counted_twice(strip_Bij: Array) -> Float[Array, " B"]:
    """Returns the sum of a strip whose first block lies on the diagonal; entries right of that block count twice, by symmetry."""
    i = strip_Bij.shape[1]
    if i == strip_Bij.shape[2]:
        return strip_Bij.sum((1, 2))
    return strip_Bij[:, :, :i].sum((1, 2)) + 2 * strip_Bij[:, :, i:].sum((1, 2))


# A norm is a program of hundreds of lines. Under `jax.jit` it is traced and written down once for all parameters of the same shapes.
@functools.partial(jax.jit, static_argnames="tells_zeros")
def symmetric(a_BTp: Array, *others: Array, tells_zeros: bool = True) -> tuple[Bounded, ...]:
    """Returns the squared norm sum_ts (A A^T)_ts (G G^T)_ts of A^T G, for each G [B,T,d] of `others`.

    A few rows as wide as a vocabulary are not cut: copying their blocks takes longer than the products that it saves. Nor are their
    lengths computed a second time; only `tells_zeros` reads them again, so that A of zeros has norm zero whatever G is.
    """
    outer_BTT = outer(a_BTp, a_BTp) if a_BTp.shape[2] >= WIDE_ROWS and a_BTp.shape[1] < 256 else None
    # The diagonal holds the squares of lengths, which may be too small by the error of a product.
    most = 1 + bounds.product_depth(a_BTp.shape[2]) * bounds.unit(a_BTp)
    own_BT = None if outer_BTT is None else most * jnp.diagonal(outer_BTT, axis1=1, axis2=2)
    alpha_BT = bounds.lengths(a_BTp, own_BT, tells_zeros)
    gammas = [bounds.lengths(g_BTd) for g_BTd in others]
    squares = _symmetric(a_BTp, alpha_BT, others, gammas, outer_BTT)
    pairs = zip(squares, others, gammas, strict=True)
    return tuple(bounded._replace(of_norm=_of_sum(a_BTp, alpha_BT, g_BTd, gamma_BT)) for bounded, g_BTd, gamma_BT in pairs)


def _of_sum(a: Array, alpha_BT: Array, g_BTd: Array, gamma_BT: Array, formed: int = 0) -> Array:
    """Returns the rounding error of the contraction of A and c G, in which a term is rounded T + 1 times, and `formed` times before.

    `alpha_BT` are the lengths of the rows of `a`.
    """
    return bounds.of_terms(alpha_BT.shape[-1] + 1 + formed, a, g_BTd) * (alpha_BT * gamma_BT).sum(-1)


def _symmetric(
    a_BTp: Array,
    alpha_BT: Array,
    others: Sequence[Array],
    gammas: Sequence[Array],
    outer_BTT: Array | None = None,
    has_parts: bool = False,
) -> list[Bounded]:
    """Returns squared norms for rows of A of length `alpha_BT` and rows of each G of one of `gammas`, without rounding of the sum.

    `outer_BTT` is A A^T, where it is known; then nothing is cut. With `has_parts` A is multiplied in bfloat16 parts.
    """
    count, of_a = len(others), _error_of_a(a_BTp, has_parts=has_parts)
    own = functools.partial(bounds.einsum, "bmp,bnp->bmn") if has_parts else outer
    scaled = [jnp.sqrt(of_a) * alpha_BT, *(math.sqrt(_error_of_g(g)) * gamma for g, gamma in zip(others, gammas, strict=True))]

    def strip(start: int, end: int, a_BTp: Array, *arrays: Array) -> tuple[Array, ...]:
        outer_Bij, sums = own(a_BTp[:, start:end], a_BTp[:, start:]) if outer_BTT is None else outer_BTT, []
        alpha_Bij, *gamma_Bij = (x_BT[:, start:end, None] * x_BT[:, None, start:] for x_BT in arrays[count:])
        for g_BTd, gammas_Bij in zip(arrays[:count], gamma_Bij, strict=True):
            other_Bij = outer(g_BTd[:, start:end], g_BTd[:, start:])
            sums += [outer_Bij * other_Bij, alpha_Bij * jnp.abs(other_Bij) + gammas_Bij * jnp.abs(outer_Bij)]
        return tuple(sums)

    sums = over_triangle(strip, a_BTp, *others, *scaled, whole=outer_BTT is not None)
    squares = []
    for place, (g_BTd, gamma_BT) in enumerate(zip(others, gammas, strict=True)):
        second_order_B = 2 * jnp.square((scaled[0] * scaled[1 + place]).sum(1))
        lost_B = _lost(alpha_BT.sum(1), a_BTp.shape[2], gamma_BT.sum(1), g_BTd.shape[2])
        squares.append(Bounded(sums[2 * place], sums[2 * place + 1] + second_order_B + lost_B, jnp.zeros_like(lost_B)))
    return squares


def _error_of_a(a_BTp: Array, by_vector: bool = False, has_parts: bool = False) -> float | Array:
    """Returns the error of the product of two rows of A and of the sum over pairs of tokens, relative to the lengths of the rows."""
    T, p = a_BTp.shape[1:]
    terms = bounds.product_depth(p, by_vector) + bounds.sum_depth(T * T) + 12
    return bounds.error(terms, 2) if has_parts else terms * bounds.unit(a_BTp)


def _error_of_g(g_BTd: Array, by_vector: bool = False) -> float:
    return bounds.product_depth(g_BTd.shape[2], by_vector) * bounds.unit(g_BTd)


def _lost(alpha_B: Array, p: int, gamma_B: Array, d: int) -> Float[Array, " B"]:
    """Bounds what inner products below the smallest normal number may take from a squared norm.

    The arguments are sums of row lengths. The bound is exactly zero where a factor is.
    """
    tiny = 4 * float(jnp.finfo(alpha_B.dtype).tiny)
    return _lost_of(alpha_B, math.sqrt(tiny * d), gamma_B, math.sqrt(tiny * p))


@jax.jit
def _lost_of(alpha_B: Array, of_alpha: Any, gamma_B: Array, of_gamma: Any) -> Float[Array, " B"]:
    lost_B = jnp.square(of_gamma * gamma_B) + jnp.square(of_alpha * alpha_B)
    return jax.lax.select((alpha_B > 0) & (gamma_B > 0), lost_B, jnp.zeros_like(lost_B))


@jax.jit
def gram(a_BTp: Array, g_BTd: Array) -> Bounded:
    """Returns |A^T G|^2 by the centred Gram form."""
    has_parts, stored_BTd, g_BTd = bounds.is_narrow(a_BTp) and a_BTp.shape[2] < WIDE_ROWS, g_BTd, at_least_float32(g_BTd)
    gamma_BT = bounds.lengths(g_BTd)
    if a_BTp.shape[1] == 1:
        length_B = (bounds.lengths(a_BTp) * gamma_BT)[:, 0]
        return Bounded(jnp.square(length_B), jnp.zeros_like(length_B), bounds.of_terms(2, a_BTp, g_BTd) * length_B)
    (T, p), d, u = a_BTp.shape[1:], g_BTd.shape[2], bounds.unit(g_BTd)
    mean_Bp = at_least_float32(a_BTp).mean(1)
    # Centred in the storage type, the mean taken from what storage really subtracted.
    mean_Bp = at_least_float32(mean_Bp.astype(a_BTp.dtype))
    centred_BTp, sum_Bd = at_least_float32(a_BTp) - mean_Bp[:, None], g_BTd.sum(1)
    alpha_BT, mean_B, sum_B = bounds.lengths(centred_BTp), bounds.lengths(mean_Bp), bounds.lengths(sum_Bd)
    along_BT = jnp.einsum("btp,bp->bt", centred_BTp, mean_Bp, precision="highest")
    against_BT = jnp.einsum("btd,bd->bt", g_BTd, sum_Bd, precision="highest")
    flat_B = jnp.square(mean_B * sum_B)
    ((square_B, of_square_B, _),) = _symmetric(centred_BTp, alpha_BT, (stored_BTd,), (gamma_BT,), has_parts=has_parts)
    of_a, of_g = _error_of_a(centred_BTp, by_vector=True), _error_of_g(g_BTd, by_vector=True)
    of_square_B += 2 * of_a * mean_B * (alpha_BT * jnp.abs(against_BT)).sum(1)
    of_square_B += 2 * of_g * sum_B * (gamma_BT * jnp.abs(along_BT)).sum(1)
    magnitude_B, gamma_B = (alpha_BT * gamma_BT).sum(1), gamma_BT.sum(1)
    of_square_B += 4 * of_a * of_g * magnitude_B * mean_B * sum_B + 2 * u * (bounds.sum_depth(p) + bounds.sum_depth(d) + 4) * flat_B
    of_square_B += _lost(mean_B, p, gamma_B, d)
    # A term goes through one rounding of the centring, T of the cotangents' sum, and T + 1 of the contraction.
    of_sum = bounds.of_terms(T + 1, a_BTp, g_BTd)
    of_norm_B = (of_sum + u) * magnitude_B + (of_sum + T * u) * mean_B * gamma_B
    return Bounded(square_B + 2 * (along_BT * against_BT).sum(1) + flat_B, of_square_B, of_norm_B)


@jax.jit
def formed(a_BTp: Array, g_BTd: Array, gradient_Bpd: Array) -> Bounded:
    """Returns the squared norm of the gradient itself, which is formed again for the sum."""
    square_B = squares(gradient_Bpd)
    return Bounded(square_B, jnp.zeros_like(square_B), of_formed_sum(a_BTp, bounds.lengths(a_BTp), g_BTd, bounds.lengths(g_BTd)))


def of_formed_sum(a: Array, alpha_BT: Array, g_BTd: Array, gamma_BT: Array) -> Array:
    """Returns the rounding error of a gradient of A and G that is formed once for the norm and again for the sum (`recomputed`).

    Axes before those of positions and features are examples. `alpha_BT` are the lengths of the rows of `a`.
    """
    return _of_sum(a, alpha_BT, g_BTd, gamma_BT, formed=alpha_BT.shape[-1])


def summed(a_BTp: Array, weighted_BTd: Array) -> Float[Array, "p d"]:
    """Returns sum_b A_b^T G_b, [p, d], in float32 or wider, for cotangents that are multiplied by clip weights (`rows`)."""
    if bounds.is_narrow(a_BTp) and weighted_BTd.dtype == jnp.float32:
        return bounds.einsum("btp,btd->pd", a_BTp, weighted_BTd)
    return contracted(at_least_float32(a_BTp), weighted_BTd, "highest")


def contracted(a_BTp: Array, g_BTd: Array, precision: str | None = None) -> Float[Array, "p d"]:
    """Returns sum_b A_b^T G_b, [p, d], in float32 or wider, at a precision of `jax.numpy.einsum`.

    In float32 the narrower factor comes first: XLA's CPU backend writes out the first one transposed, together with the operations that
    compute it.
    """
    at_least_f32 = float32_or_wider(a_BTp.dtype)
    if a_BTp.dtype == at_least_f32 and a_BTp.shape[-1] > g_BTd.shape[-1]:
        return jnp.einsum("btd,btp->dp", g_BTd, a_BTp, precision=precision, preferred_element_type=at_least_f32).T
    return jnp.einsum("btp,btd->pd", a_BTp, g_BTd, precision=precision, preferred_element_type=at_least_f32)


@jax.jit
def contracted_units(gradient: Array, weights_U: Array, keep_U: Array | None = None) -> Array:
    """Returns sum_u w_u gradient_u of gradients [U, ...]; those of units that are not kept may hold any values.

    A masked copy of all gradients would take as much memory as the gradients, so they are then masked one by one.
    """
    if keep_U is None:
        return jnp.tensordot(weights_U, gradient, 1, precision="highest")

    def add(total: Array, unit: tuple[Array, Array, Array]) -> tuple[Array, None]:
        own, weight, is_kept = unit
        return total + weight * jnp.where(is_kept, own, 0), None

    start = jnp.zeros(gradient.shape[1:], jnp.result_type(gradient, weights_U))
    return jax.lax.scan(add, start, (gradient, weights_U, keep_U))[0]


def per_example(a_BTp: Array, g_BTd: Array) -> Float[Array, "B p d"]:
    """Returns the gradient A_b^T G_b of each example, [B, p, d], in float32 or wider."""
    return product("btp,btd->bpd", a_BTp, g_BTd)


def recorded(form: Form, a_BTp: Array, g_BTd: Array) -> dict[str, Array]:
    """Returns the record of a matrix's gradient in this form: `kernel` [B,p,d], or `a` and `g`."""
    return {"kernel": per_example(a_BTp, g_BTd)} if form == "kept" else {"a": a_BTp, "g": g_BTd}


def of_recorded(form: Form, record: dict[str, Array]) -> Array | Bounded:
    """Returns the squared norms from a record of `recorded`."""
    if form == "kept":
        return squares(record["kernel"])
    if form == "gram":
        return gram(record["a"], record["g"])
    return formed(record["a"], record["g"], per_example(record["a"], record["g"]))


def squares(x: Array) -> Float[Array, " B"]:
    """Returns the sum of squares of each example's numbers, [B]."""
    return jnp.square(at_least_float32(x)).sum(tuple(range(1, x.ndim)))


def outer(x_BMV: Array, y_BNV: Array) -> Float[Array, "B M N"]:
    """Returns x y^T of every example, [B, M, N].

    Wide rows are cut into blocks of `CHAIN` terms, so that the depth of accumulation does not depend on how the compiler cuts them.
    """

    def cut(equation: str, x: Array, y: Array) -> Array:
        first, *rest = (product(equation, x[..., at : at + CHAIN], y[..., at : at + CHAIN]) for at in range(0, x.shape[-1], CHAIN))
        return sum(rest, first)

    def one_by_one(x_BMV: Array, y_BNV: Array) -> Array:
        return jax.lax.map(lambda pair: cut("mv,nv->mn", *pair), (x_BMV, y_BNV))

    if x_BMV.shape[-1] < WIDE_ROWS:
        return product("bmv,bnv->bmn", x_BMV, y_BNV)
    return jax.lax.platform_dependent(x_BMV, y_BNV, cpu=one_by_one, default=functools.partial(cut, "bmv,bnv->bmn"))


@functools.partial(jax.jit, static_argnums=2)
def lookup(id_BT: Array, g_BTd: Array, rows_of_table: int) -> Bounded:
    """Returns the squared norm of a table's gradient, in which the cotangents of equal ids add up before they are squared.

    The cotangents are added up by id, except those of a few positions that read a table with more rows, which are compared in pairs.
    """
    T, d = g_BTd.shape[1:]
    if not is_added_by_id(T, rows_of_table):
        gamma_BT = bounds.lengths(g_BTd)

        def strip(start: int, end: int, id_BT: Array, g_BTd: Array, gamma_BT: Array) -> tuple[Array, Array]:
            same_Bij = id_BT[:, start:end, None] == id_BT[:, None, start:]
            outer_Bij = product("bid,bjd->bij", g_BTd[:, start:end], g_BTd[:, start:])
            lengths_Bij = gamma_BT[:, start:end, None] * gamma_BT[:, None, start:]
            return jnp.where(same_Bij, outer_Bij, 0), jnp.where(same_Bij, lengths_Bij, 0)

        # The sum over id_t = id_s of g_t.g_s.
        square_B, magnitude_B = over_triangle(strip, id_BT, g_BTd, gamma_BT)
        u = bounds.unit(g_BTd)
        of_square = (bounds.product_depth(d) + bounds.sum_depth(T * T) + 12) * u
        return Bounded(square_B, of_square * magnitude_B, (T + 1) * u * jnp.sqrt(magnitude_B))
    if rows_of_table <= T:
        return _lookup_by_id(id_BT.astype(jnp.int32), g_BTd, rows_of_table)
    # A table with more rows than there are positions: the ids are sorted, and each takes the place of its number among them.
    order_BT = jnp.argsort(id_BT, axis=1)
    sorted_BT = jnp.take_along_axis(id_BT, order_BT, 1)
    number_BT = jnp.cumsum(jnp.diff(sorted_BT, axis=1, prepend=sorted_BT[:, :1]) != 0, 1)
    return _lookup_by_id(number_BT, jnp.take_along_axis(g_BTd, order_BT[..., None], 1), T)


def is_added_by_id(T: int, rows_of_table: int) -> bool:
    """Returns whether `lookup` adds up the cotangents of T positions by id."""
    return T >= BY_ID_FROM or rows_of_table <= T


def _lookup_by_id(id_BT: Array, g_BTd: Array, ids: int) -> Bounded:
    """Adds up the cotangents of each id in [B, ids, d].

    Each is rounded once for every other cotangent of its id, for the norm and again for the sum.
    """
    by_id = jax.vmap(functools.partial(jax.ops.segment_sum, num_segments=ids))
    g_BTd = at_least_float32(g_BTd)
    square_B, gamma_BT = squares(by_id(g_BTd, id_BT)), bounds.lengths(g_BTd)
    error_BV = (2 * by_id(jnp.ones_like(gamma_BT), id_BT) + 1) * bounds.unit(g_BTd) * by_id(gamma_BT, id_BT)
    return Bounded(square_B, jnp.zeros_like(square_B), jnp.sqrt(squares(error_BV)))
