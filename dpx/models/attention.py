"""Multi-head self-attention without its projections: no parameters, and a backward pass that keeps no probabilities.

B: examples, T, S: tokens, N: heads, D: head size, H: width = N D.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Added to the score of a key that is padding: exp() of it is exactly 0, yet a row of nothing but padding stays finite.
MASKED_SCORE = -1.0e9


def length_bias(length_B: Int[Array, " B"], tokens: int, dtype) -> Float[Array, "B 1 1 T"]:
    """0 at real keys, `MASKED_SCORE` at padding."""
    return jnp.where(jnp.arange(tokens) < length_B[:, None], 0.0, MASKED_SCORE).astype(dtype)[:, None, None, :]


def heads_of(x_BTd: Array, parts: int, heads: int) -> Array:
    """[B,T,parts*H] as [parts,B,N,T,D]."""
    B, T, d = x_BTd.shape
    return x_BTd.reshape(B, T, parts, heads, d // (parts * heads)).transpose(2, 0, 3, 1, 4)


def probabilities(q_BNTD: Array, k_BNSD: Array, length_B: Array) -> Array:
    """Softmax of the scaled scores over real keys, computed in float32 or wider."""
    wide = jnp.promote_types(q_BNTD.dtype, jnp.float32)
    scores_BNTS = jnp.einsum("BNTD,BNSD->BNTS", q_BNTD, k_BNSD, preferred_element_type=wide) * q_BNTD.shape[-1] ** -0.5
    return jax.nn.softmax(scores_BNTS + length_bias(length_B, k_BNSD.shape[2], wide), axis=-1)


def attend(qkv_BTd: Array, length_B: Array, heads: int, dropped: Callable[[Array], Array]) -> Float[Array, "B T H"]:
    """Context of every token; `dropped` is dropout of the probabilities."""
    q_BNTD, k_BNSD, v_BNSD = heads_of(qkv_BTd, 3, heads)
    probs_BNTS = dropped(probabilities(q_BNTD, k_BNSD, length_B).astype(qkv_BTd.dtype))
    context_BNTD = jnp.einsum("BNTS,BNSD->BNTD", probs_BNTS, v_BNSD)
    B, N, T, D = context_BNTD.shape
    return context_BNTD.transpose(0, 2, 1, 3).reshape(B, T, N * D)


def attend_backward(
    qkv_BTd: Array, context_BTH: Array, g_BTH: Array, length_B: Array, heads: int, dropped: Callable[[Array], Array]
) -> Float[Array, "B T d"]:
    """Cotangent of qkv. `dropped` is linear with a fixed mask, hence its own transpose.

    sum_s g_probs probs, the softmax's own term, equals g_context . context token by token, so no [T,S] array is reduced for it.
    """
    q_BNTD, k_BNSD, v_BNSD = heads_of(qkv_BTd, 3, heads)
    (g_BNTD,), (context_BNTD,) = heads_of(g_BTH, 1, heads), heads_of(context_BTH, 1, heads)
    wide = jnp.promote_types(qkv_BTd.dtype, jnp.float32)
    probs_BNTS = probabilities(q_BNTD, k_BNSD, length_B)
    g_v = jnp.einsum("BNTS,BNTD->BNSD", dropped(probs_BNTS.astype(qkv_BTd.dtype)), g_BNTD)
    g_probs_BNTS = dropped(jnp.einsum("BNTD,BNSD->BNTS", g_BNTD, v_BNSD, preferred_element_type=wide))
    own_BNT1 = jnp.sum(g_BNTD.astype(wide) * context_BNTD.astype(wide), axis=-1, keepdims=True)
    g_scores_BNTS = (probs_BNTS * (g_probs_BNTS - own_BNT1) * q_BNTD.shape[-1] ** -0.5).astype(qkv_BTd.dtype)
    g_q = jnp.einsum("BNTS,BNSD->BNTD", g_scores_BNTS, k_BNSD)
    g_k = jnp.einsum("BNTS,BNTD->BNSD", g_scores_BNTS, q_BNTD)
    B, T, d = qkv_BTd.shape
    return jnp.stack([g_q, g_k, g_v]).transpose(1, 3, 0, 2, 4).reshape(B, T, d)
