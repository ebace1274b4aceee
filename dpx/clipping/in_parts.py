"""Multiplies float32 numbers with bfloat16 ones on matrix units for bfloat16, by cutting float32 numbers into two bfloat16 parts.

A product of float32 matrices at full precision does not run on the matrix units of accelerators. Where a model computes in bfloat16, one
factor of most products of clipping is bfloat16 and the other is a float32 array that was computed from bfloat16 numbers: a cotangent times
its clip weight, an activation less its mean. Such an array x is the sum of two parts within 2^-16 |x|: `high`, x rounded to bfloat16, and
`low`, the rest rounded to bfloat16. Products of bfloat16 numbers are exact in float32, so that one product of matrices becomes two, or
three where both factors have parts; the product of both low parts, at most 2^-16 of the whole, is left out.

CPUs have no such units: they multiply in float32.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

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
