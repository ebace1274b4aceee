"""Bounds the error of a computed squared norm, and gives the upper bound that clipping uses (proof in `dpx.clipping.rounding`).

Products with bfloat16 numbers run on matrix units for bfloat16, by cutting float32 numbers into two bfloat16 parts. A product of float32
matrices at full precision does not run on the matrix units of accelerators. Where a model computes in bfloat16, one
factor of most products of clipping is bfloat16 and the other is a float32 array that was computed from bfloat16 numbers: a cotangent times
its clip weight, an activation less its mean. Such an array x is the sum of two parts within 2^-16 |x|: `high`, x rounded to bfloat16, and
`low`, the rest rounded to bfloat16. Products of bfloat16 numbers are exact in float32, so that one product of matrices becomes two, or
three where both factors have parts; the product of both low parts, at most 2^-16 of the whole, is left out.

CPUs have no such units: they multiply in float32.

B: examples, T: tokens, d: numbers in a row.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from dpx.clipping.rounding import CHAIN, SLACK, SUM_CHAIN, SUM_WINDOW

# |x - high - low| <= 2^-16 |x|, and |low| <= 2^-8 |x|. Two cut factors leave out twice the first, and the product of their low parts.
_LEFT_OUT = {1: 2.0**-16, 2: 3 * 2.0**-16}
# The sum of the magnitudes of all parts' products, and terms of second order, beside the magnitude of the product.
_MAGNITUDE = 1 + 2.0**-6
# Matrix units for narrow types add up in float32, and cut sums off where others round.
_UNIT = 2.0**-23


def error(roundings: int | float | Array, factors: int) -> float | Array:
    """Returns the error of a sum of products, relative to their magnitudes, in which so many `factors` may be cut into parts.

    In one product of matrices a term is rounded `roundings` times; adding up two or three of them rounds it twice more.
    """
    return _MAGNITUDE * ((roundings + 2) * _UNIT + _LEFT_OUT[factors])


def is_narrow(x: Array) -> bool:
    """Returns whether `x` has numbers that bfloat16 units multiply as they are."""
    return x.dtype == jnp.bfloat16


def as_narrow_as(other: Array, x: Array) -> Array:
    """Returns `x` rounded to bfloat16 where `other` has that type, so that their product runs on bfloat16 units; else `x` itself."""
    return _rounded(x).astype(jnp.bfloat16) if is_narrow(other) else x


def _rounded(x: Array) -> Array:
    """Returns `x` rounded to a number of bfloat16, in its own type.

    A pair of conversions may be taken out by the compiler.
    """
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def cut(x: Float32[Array, "..."]) -> tuple[Array, Array]:
    """Returns (high, low), two bfloat16 arrays whose sum is `x` within 2^-16 of each number, and the smallest normal number."""
    high = _rounded(x)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def einsum(equation: str, a: Array, b: Array) -> Array:
    """Returns the einsum of `a` and `b`, of which each is bfloat16, or float32 that is cut into parts; the result is float32.

    `error` bounds how far it is from the exact one.
    """
    return jax.lax.platform_dependent(a, b, cpu=functools.partial(_whole, equation), default=functools.partial(_in_parts, equation))


def _whole(equation: str, a: Array, b: Array) -> Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(equation, a, b, precision="highest", preferred_element_type=jnp.float32)


def _in_parts(equation: str, a: Array, b: Array) -> Array:
    pairs = itertools.product(*(enumerate((x,) if is_narrow(x) else cut(x)) for x in (a, b)))
    products = [jnp.einsum(equation, left, right, preferred_element_type=jnp.float32) for (i, left), (j, right) in pairs if i + j < 2]
    return sum(products[1:], products[0])


# Rows so wide that XLA's CPU backend runs one plain product after another 1.6 times faster than the batched one.
WIDE_ROWS = 8192


class Bounded(NamedTuple):
    """A squared norm and bounds on its rounding errors, all [..., B].

    The true square is at most `square + of_square`. In addition, the true norm and the rounding of the example's clipped contribution
    may exceed it by `of_norm`.
    """

    square: Array
    of_square: Array
    of_norm: Array


def upper(part: Array | Bounded) -> Array:
    """Returns the squared norm to clip by: the computed one, or its upper bound if that is larger by more than `SLACK` of the norm.

    A plain array is the squared norm of a gradient that is kept, whose error is within the margin.
    """
    return _upper(part) if isinstance(part, Bounded) else part


@jax.jit
def _upper(part: Bounded) -> Array:
    most = jnp.sqrt(jnp.maximum(part.square + part.of_square, 0)) + part.of_norm
    return jnp.maximum(part.square, jnp.square((1 - SLACK) * most))


def plus(part: Array | Bounded, square: Array | float) -> Array | Bounded:
    """Adds the squared norm of a part and the squared norm of leaves whose gradients are kept."""
    return part._replace(square=part.square + square) if isinstance(part, Bounded) else part + square


def together(part: Array | Bounded, axis: int) -> Array | Bounded:
    """Adds up the squared norms of the parts along an axis."""
    if not isinstance(part, Bounded):
        return part.sum(axis)
    return Bounded(part.square.sum(axis), part.of_square.sum(axis), jnp.sqrt(jnp.square(part.of_norm).sum(axis)))


@functools.partial(jax.jit, static_argnames="tells_zeros")
def lengths(x: Array, squares: Array | None = None, tells_zeros: bool = True) -> Float[Array, "..."]:
    """Returns the norms of the rows of `x` [..., d], rounded so that they are never too small.

    Squares that underflow, below the smallest normal number, are counted.

    `squares` are the rows' own, where they are known. A row of zeros has length zero, unless that is not asked for: it takes a pass
    over `x`.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    squares = jnp.square(x).sum(-1) if squares is None else squares
    lost = x.shape[-1] * jnp.finfo(x.dtype).tiny
    return jnp.sqrt(squares + (lost * (jnp.abs(x).max(-1) > 0) if tells_zeros else lost))


def unit(*factors: Array) -> float:
    """Returns the unit roundoff of products and sums of these factors, accumulated in float32 or wider at the highest precision.

    Matrix units multiply narrow types exactly and add them up in float32, but cut sums off where others round them.
    """
    dtype = jnp.result_type(*factors)
    return float(jnp.finfo(jnp.promote_types(dtype, jnp.float32)).eps) / (1 if jnp.finfo(dtype).bits < 32 else 2)


def of_terms(roundings: int, a: Array, g: Array) -> float | Array:
    """Returns the error of a sum of products of `a` and weighted `g` in which a term is rounded so often, relative to the magnitudes.

    Where `a` is bfloat16, `g` may be cut into parts (`einsum`).
    """
    return error(roundings, 1) if is_narrow(a) else roundings * unit(g)


def product_depth(terms: int, by_vector: bool = False) -> float:
    """Returns the largest number of roundings of one term of an inner product in a product of matrices, or with a vector (`by_vector`).

    No order of addition has more than there are terms. `norms.outer` cuts wide rows into blocks of `CHAIN` terms. Into which blocks a
    compiler cuts other products depends on the processor's caches, so that nothing is taken from it.
    """
    return float(terms if by_vector or terms < WIDE_ROWS else CHAIN + math.ceil(terms / CHAIN))


def sum_depth(terms: int) -> float | Array:
    """Returns the largest number of roundings of one term of a sum that is not a matrix product."""
    on_cpu = min(terms, SUM_WINDOW * math.ceil(math.log(max(terms, 2), SUM_WINDOW)))
    elsewhere = min(terms, SUM_CHAIN)
    return float(terms) if on_cpu == elsewhere else _by_platform(float(on_cpu), float(elsewhere))


@jax.jit
def _by_platform(on_cpu: Any, elsewhere: Any) -> Array:
    both = jnp.float32(on_cpu), jnp.float32(elsewhere)
    return jax.lax.platform_dependent(*both, cpu=lambda on_cpu, _: on_cpu, default=lambda _, elsewhere: elsewhere)
