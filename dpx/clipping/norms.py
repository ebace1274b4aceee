"""Squared per-example norms of a dense layer's gradient, in three forms, and which to use.

The gradient of example b is A_b^T G_b (input and output cotangent). `kept` holds it: no extra FLOPs, B p d numbers.
`gram` never forms it: |A^T G|^2 = sum_ts (A A^T)_ts (G G^T)_ts, T^2 (p+d) products, half of it by symmetry. `recomputed`
forms it twice. With A split into its token mean a and the rest A~, and s = sum_t G_t,
|A^T G|^2 = |A~^T G|^2 + 2 sum_t (A~_t.a)(G_t.s) + |a|^2 |s|^2: without the split, flat activations with a zero-sum cotangent
(the key projection's is zero by softmax's shift invariance) cancel away up to 6e-3 of the norm in float32.

B: examples, T: tokens, p: inputs, d: outputs.
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Form = Literal["kept", "gram", "recomputed"]
Strip = Callable[..., tuple[Array, ...]]

# Rows so wide that XLA's CPU backend runs one plain product after another 1.6 times faster than the batched one.
WIDE_ROWS = 8192


def at_least_float32(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rows(weights_B: Array, x: Array) -> Array:
    """Each example's rows times its weight, in float32 or wider."""
    return at_least_float32(x) * weights_B.reshape((-1,) + (1,) * (x.ndim - 1))


def product(equation: str, a: Array, b: Array) -> Array:
    """An einsum that accumulates and returns float32 or wider, at full precision on every device."""
    accumulated = jnp.promote_types(jnp.result_type(a, b), jnp.float32)
    return jnp.einsum(equation, a, b, precision="highest", preferred_element_type=accumulated)


def blocks(tokens: int) -> int:
    """Into how many blocks the symmetric products are cut: the work is (n+1)/2n of the square."""
    return 8 if tokens >= 256 else 4 if tokens >= 64 else 1


def blocks_on_cpu(tokens: int) -> int:
    """XLA's CPU backend copies every block and runs small products slowly: at 128 tokens the whole square takes half the time of four."""
    return 4 if tokens >= 256 else 1


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


def over_triangle(strip: Strip, *arrays: Array, whole: bool = False) -> tuple[Float[Array, " B"], ...]:
    """Sums over t,s of symmetric [B,T,T] products, from the upper triangle of blocks unless `whole`.

    `strip(start, end, *arrays)` gives rows start to end of each product, from column start on; `arrays` are [B,T,...].
    """

    def cut(count: int, *arrays: Array) -> tuple[Array, ...]:
        edges = [round(i * T / count) for i in range(count + 1)]
        by_strip = [strip(start, end, *arrays) for start, end in zip(edges[:-1], edges[1:], strict=True)]
        return tuple(sum(map(_counted_twice, strips[1:]), _counted_twice(strips[0])) for strips in zip(*by_strip, strict=True))

    T = arrays[0].shape[1]
    count, on_cpu = (1, 1) if whole else (blocks(T), blocks_on_cpu(T))
    if count == on_cpu:
        return cut(count, *arrays)
    return jax.lax.platform_dependent(*arrays, cpu=functools.partial(cut, on_cpu), default=functools.partial(cut, count))


def _counted_twice(strip_Bij: Array) -> Float[Array, " B"]:
    """The sum of a strip that starts with a block on the diagonal; what is right of the block counts twice, by symmetry."""
    i = strip_Bij.shape[1]
    return strip_Bij[:, :, :i].sum((1, 2)) + 2 * strip_Bij[:, :, i:].sum((1, 2))


def symmetric(a_BTp: Array, *others: Array) -> tuple[Float[Array, " B"], ...]:
    """sum_ts (A A^T)_ts (G G^T)_ts for each G [B,T,d] of `others`.

    A few rows as wide as a vocabulary are not cut: copying their blocks takes longer than the products that it saves.
    """

    def strip(start: int, end: int, a_BTp: Array, *others: Array) -> tuple[Array, ...]:
        outer_Bij = outer(a_BTp[:, start:end], a_BTp[:, start:])
        return tuple(outer_Bij * product("bid,bjd->bij", g_BTd[:, start:end], g_BTd[:, start:]) for g_BTd in others)

    return over_triangle(strip, a_BTp, *others, whole=a_BTp.shape[2] >= WIDE_ROWS and a_BTp.shape[1] < 256)


def gram(a_BTp: Array, g_BTd: Array) -> Float[Array, " B"]:
    """|A^T G|^2 by the centred Gram form."""
    if a_BTp.shape[1] == 1:
        return jnp.square(at_least_float32(a_BTp)).sum((1, 2)) * jnp.square(at_least_float32(g_BTd)).sum((1, 2))
    mean_B1p = at_least_float32(a_BTp).mean(1, keepdims=True)
    # Centred in the storage type, the mean taken from what storage really subtracted.
    mean_B1p = at_least_float32(mean_B1p.astype(a_BTp.dtype))
    centred_BTp, sum_Bd = at_least_float32(a_BTp) - mean_B1p, at_least_float32(g_BTd).sum(1)
    along_BT = jnp.einsum("btp,bp->bt", centred_BTp, mean_B1p[:, 0], precision="highest")
    against_BT = jnp.einsum("btd,bd->bt", at_least_float32(g_BTd), sum_Bd, precision="highest")
    flat_B = jnp.square(mean_B1p).sum((1, 2)) * jnp.square(sum_Bd).sum(1)
    return jnp.maximum(symmetric(centred_BTp, at_least_float32(g_BTd))[0] + 2 * (along_BT * against_BT).sum(1) + flat_B, 0)


def summed(a_BTp: Array, g_BTd: Array, precision: str | None = "highest") -> Float[Array, "p d"]:
    """sum_b A_b^T G_b, float32 or wider. In float32 the narrower factor comes first: XLA's CPU backend writes out the first one
    transposed, together with what computes it."""
    at_least_f32 = jnp.promote_types(a_BTp.dtype, jnp.float32)
    if a_BTp.dtype == at_least_f32 and a_BTp.shape[-1] > g_BTd.shape[-1]:
        return jnp.einsum("btd,btp->dp", g_BTd, a_BTp, precision=precision, preferred_element_type=at_least_f32).T
    return jnp.einsum("btp,btd->pd", a_BTp, g_BTd, precision=precision, preferred_element_type=at_least_f32)


def per_example(a_BTp: Array, g_BTd: Array) -> Float[Array, "B p d"]:
    return product("btp,btd->bpd", a_BTp, g_BTd)


def recorded(form: Form, a_BTp: Array, g_BTd: Array) -> dict[str, Array]:
    """What is kept of a matrix's gradient in this form: `kernel` [B,p,d], or `a` and `g`."""
    return {"kernel": per_example(a_BTp, g_BTd)} if form == "kept" else {"a": a_BTp, "g": g_BTd}


def of_recorded(form: Form, record: dict[str, Array]) -> Float[Array, " B"]:
    """The squared norms of what `recorded` kept."""
    if form == "gram":
        return gram(record["a"], record["g"])
    return squares(record["kernel"] if form == "kept" else per_example(record["a"], record["g"]))


def squares(x: Array) -> Float[Array, " B"]:
    return jnp.square(at_least_float32(x)).sum(tuple(range(1, x.ndim)))


def outer(x_BMV: Array, y_BNV: Array) -> Float[Array, "B M N"]:
    """x y^T of every example."""

    def one_by_one(x_BMV: Array, y_BNV: Array) -> Array:
        return jax.lax.map(lambda pair: product("mv,nv->mn", *pair), (x_BMV, y_BNV))

    batched = functools.partial(product, "bmv,bnv->bmn")
    if x_BMV.shape[-1] < WIDE_ROWS:
        return batched(x_BMV, y_BNV)
    return jax.lax.platform_dependent(x_BMV, y_BNV, cpu=one_by_one, default=batched)


def lookup(id_BT: Array, g_BTd: Array) -> Float[Array, " B"]:
    """Squared norm of a table's gradient: rows of equal id add up before they are squared: sum over id_t = id_s of g_t.g_s."""

    def strip(start: int, end: int, id_BT: Array, g_BTd: Array) -> tuple[Array]:
        same = id_BT[:, start:end, None] == id_BT[:, None, start:]
        return (jnp.where(same, product("bid,bjd->bij", g_BTd[:, start:end], g_BTd[:, start:]), 0),)

    return jnp.maximum(over_triangle(strip, id_BT, g_BTd)[0], 0)
