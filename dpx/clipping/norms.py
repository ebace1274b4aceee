"""Squared per-example norms of a dense layer's gradient, in three forms, and which to use.

The gradient of example b is A_b^T G_b (input and output cotangent). `kept` holds it: no extra FLOPs, B p d numbers.
`gram` never forms it: |A^T G|^2 = sum_ts (A A^T)_ts (G G^T)_ts, T^2 (p+d) products, half of it by symmetry. `recomputed`
forms it twice. With A split into its token mean a and the rest A~, and s = sum_t G_t,
|A^T G|^2 = |A~^T G|^2 + 2 sum_t (A~_t.a)(G_t.s) + |a|^2 |s|^2: without the split, flat activations with a zero-sum cotangent
(the key projection's is zero by softmax's shift invariance) cancel away up to 6e-3 of the norm in float32.

B: examples, T: tokens, p: inputs, d: outputs.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Form = Literal["kept", "gram", "recomputed"]


def wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def product(equation: str, a: Array, b: Array) -> Array:
    """An einsum that accumulates and returns float32 or wider, at full precision on every device."""
    return jnp.einsum(equation, a, b, precision="highest", preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def blocks(tokens: int) -> int:
    """Into how many blocks the symmetric products are cut: the work is (n+1)/2n of the square."""
    return 8 if tokens >= 256 else 4 if tokens >= 64 else 1


def gram_flops(T: int, p: int, d: int) -> float:
    return 2 * T * T * (p + d) * (blocks(T) + 1) / (2 * blocks(T))


def choose(T: int, p: int, d: int, kept_fits: bool) -> Form:
    """The cheapest form: Gram if it costs under 2 % of the layer's products, else kept if it fits, else by FLOPs."""
    gram, recomputed = gram_flops(T, p, d), 2 * T * p * d
    if gram < 0.02 * 3 * recomputed:
        return "gram"
    if kept_fits:
        return "kept"
    return "gram" if gram < recomputed else "recomputed"


def symmetric(a_BTp: Array, *others: Array) -> tuple[Float[Array, " B"], ...]:
    """sum_ts (A A^T)_ts (G G^T)_ts for each G [B,T,d] of `others`, by the upper triangle of blocks."""
    T = a_BTp.shape[1]
    edges = [round(i * T / blocks(T)) for i in range(blocks(T) + 1)]
    totals = [jnp.zeros((a_BTp.shape[0],), jnp.promote_types(a_BTp.dtype, jnp.float32))] * len(others)
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        outer_Bij = outer(a_BTp[:, start:end], a_BTp[:, start:])
        for place, g_BTd in enumerate(others):
            both = outer_Bij * product("bid,bjd->bij", g_BTd[:, start:end], g_BTd[:, start:])
            square_B, rest_B = both[:, :, : end - start].sum((1, 2)), both[:, :, end - start :].sum((1, 2))
            totals[place] = totals[place] + square_B + 2 * rest_B
    return tuple(totals)


def gram(a_BTp: Array, g_BTd: Array) -> Float[Array, " B"]:
    """|A^T G|^2 by the centred Gram form."""
    if a_BTp.shape[1] == 1:
        return jnp.square(wide(a_BTp)).sum((1, 2)) * jnp.square(wide(g_BTd)).sum((1, 2))
    mean_B1p = wide(a_BTp).mean(1, keepdims=True)
    # Centred in the storage type, the mean taken from what storage really subtracted.
    mean_B1p = wide(mean_B1p.astype(a_BTp.dtype))
    centred_BTp, sum_Bd = wide(a_BTp) - mean_B1p, wide(g_BTd).sum(1)
    along_BT = jnp.einsum("btp,bp->bt", centred_BTp, mean_B1p[:, 0], precision="highest")
    against_BT = jnp.einsum("btd,bd->bt", wide(g_BTd), sum_Bd, precision="highest")
    flat_B = jnp.square(mean_B1p).sum((1, 2)) * jnp.square(sum_Bd).sum(1)
    return jnp.maximum(symmetric(centred_BTp, wide(g_BTd))[0] + 2 * (along_BT * against_BT).sum(1) + flat_B, 0)


def per_example(a_BTp: Array, g_BTd: Array) -> Float[Array, "B p d"]:
    return product("btp,btd->bpd", a_BTp, g_BTd)


def squares(x: Array) -> Float[Array, " B"]:
    return jnp.square(wide(x)).sum(tuple(range(1, x.ndim)))


# Rows so wide that XLA's CPU backend runs one plain product after another 1.6 times faster than the batched one.
WIDE_ROWS = 8192


def outer(x_BMV: Array, y_BNV: Array) -> Float[Array, "B M N"]:
    """x y^T of every example."""

    def one_by_one(x_BMV: Array, y_BNV: Array) -> Array:
        return jax.lax.map(lambda pair: product("mv,nv->mn", *pair), (x_BMV, y_BNV))

    def batched(x_BMV: Array, y_BNV: Array) -> Array:
        return product("bmv,bnv->bmn", x_BMV, y_BNV)

    if x_BMV.shape[-1] < WIDE_ROWS:
        return batched(x_BMV, y_BNV)
    return jax.lax.platform_dependent(x_BMV, y_BNV, cpu=one_by_one, default=batched)


def lookup(id_BT: Array, g_BTd: Array) -> Float[Array, " B"]:
    """Squared norm of a table's gradient: rows of equal id add up before they are squared: sum over id_t = id_s of g_t.g_s."""
    T = g_BTd.shape[1]
    edges = [round(i * T / blocks(T)) for i in range(blocks(T) + 1)]
    total_B = jnp.zeros((g_BTd.shape[0],), jnp.promote_types(g_BTd.dtype, jnp.float32))
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        same = id_BT[:, start:end, None] == id_BT[:, None, start:]
        both = jnp.where(same, product("bid,bjd->bij", g_BTd[:, start:end], g_BTd[:, start:]), 0)
        total_B = total_B + both[:, :, : end - start].sum((1, 2)) + 2 * both[:, :, end - start :].sum((1, 2))
    return jnp.maximum(total_B, 0)
