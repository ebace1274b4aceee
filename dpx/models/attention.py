"""Computes multi-head self-attention without its projections; the backward pass keeps no probabilities in memory.

`model.attention` chooses between the formula below, by hand with its backward pass, and `jax.nn.dot_product_attention`, which applies no
dropout and is computed again where it is differentiated.

An example may hold several texts of equal length side by side (multiple choice): `length` is then [B,C], and no token sees
another text. `causal`: a token sees itself and the tokens before it.

A decoder may read one token of a text at a time: the keys and values of the tokens before it are given in place of the tokens. One that is
applied with the collection `KEPT` reads one token of each text, its last. With `MADE` mutable, each layer returns in that collection the
keys and values of the tokens that it read. Without these collections, as in training, this module computes nothing.

B: examples, C: texts of an example, R: rows of attention = B C, T, S: tokens, N: heads, D: head size, H: width = N D. One token at a time,
S: tokens read, U: tokens of a text whose keys and values are kept, G: key-value heads.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dpx.models.shape import Model

# Added to the score of a key that is padding: exp() of it is exactly 0, yet a row that is all padding stays finite.
MASKED_SCORE = -1.0e9

Dropped = Callable[[Array], Array]
# (keys, values) of the tokens that are read -> of all tokens that they see.
Seen = Callable[[Array, Array], tuple[Array, Array]]


def heads_of(x_BTd: Array, parts: int, heads: int) -> Array:
    """Returns `x` [B,T,parts*H] as [parts,B,N,T,D]."""
    B, T, d = x_BTd.shape
    return x_BTd.reshape(B, T, parts, heads, d // (parts * heads)).transpose(2, 0, 3, 1, 4)


def probabilities(q_RNTD: Array, k_RNSD: Array, length_R: Array, causal: bool) -> Array:
    """Returns the softmax of the scaled scores over the keys that a query sees, computed in float32 or wider."""
    at_least_f32 = jnp.promote_types(q_RNTD.dtype, jnp.float32)
    scores_RNTS = jnp.einsum("RNTD,RNSD->RNTS", q_RNTD, k_RNSD, preferred_element_type=at_least_f32) * q_RNTD.shape[-1] ** -0.5
    place_S = jnp.arange(k_RNSD.shape[2])
    # [R,U,S], where U is 1 if all tokens see the same keys.
    is_seen_RUS = (place_S < length_R[:, None])[:, None, :]
    if causal:
        is_seen_RUS = is_seen_RUS & (place_S <= place_S[:, None])
    return jax.nn.softmax(scores_RNTS + jnp.where(is_seen_RUS, 0.0, MASKED_SCORE).astype(at_least_f32)[:, None], axis=-1)


def by_text(x_BTd: Array, length: Array) -> Array:
    """Returns `x` [B,C*T,d] as [B*C,T,d]."""
    return x_BTd.reshape(length.size, -1, x_BTd.shape[-1])


def by_example(dropped: Dropped, length: Array) -> Dropped:
    """Returns dropout of an array [R, ...], whose mask is drawn once for each example and all its texts."""
    if length.ndim == 1:
        return dropped
    return lambda probs: dropped(probs.reshape(*length.shape, *probs.shape[1:])).reshape(probs.shape)


def attend(qkv_BTd: Array, length: Array, model: Model, dropped: Dropped, seen: Seen | None = None) -> Float[Array, "B T H"]:
    """Returns the context of every token; `dropped` applies dropout to the probabilities.

    If `seen` gives more tokens than are read, each text's last token is read, and all that are given come before it.
    """
    if model.attention != "explicit":
        return _by_jax(qkv_BTd, length, model)
    q_RNTD, k_RNSD, v_RNSD = heads_of(by_text(qkv_BTd, length), 3, model.heads)
    if seen is not None:
        k_RNSD, v_RNSD = seen(k_RNSD, v_RNSD)
    is_causal = model.causal and k_RNSD.shape[2] == q_RNTD.shape[2]
    probs_RNTS = probabilities(q_RNTD, k_RNSD, length.reshape(-1), is_causal).astype(qkv_BTd.dtype)
    context_RNTD = jnp.einsum("RNTS,RNSD->RNTD", by_example(dropped, length)(probs_RNTS), v_RNSD)
    return context_RNTD.transpose(0, 2, 1, 3).reshape(*qkv_BTd.shape[:2], -1)


def _by_jax(qkv_BTd: Array, length: Array, model: Model) -> Float[Array, "B T H"]:
    by_part_RSPND = by_text(qkv_BTd, length).reshape(length.size, -1, 3, model.heads, model.width // model.heads)
    q, k, v = (by_part_RSPND[:, :, part] for part in range(3))
    options: Any = {"is_causal": model.causal, "implementation": model.attention}
    context_RSND = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=length.reshape(-1).astype(jnp.int32), **options)
    return context_RSND.reshape(*qkv_BTd.shape[:2], -1)


def attend_backward(
    qkv_BTd: Array, context_BTH: Array, g_BTH: Array, length: Array, model: Model, dropped: Dropped
) -> Float[Array, "B T d"]:
    """Returns the cotangent of qkv. With a fixed mask `dropped` is linear and diagonal, so it is its own transpose.

    The softmax's own term, sum_s g_probs probs, equals g_context . context for each token, so no [T,S] array is reduced for it.
    """
    if model.attention != "explicit":
        return jax.vjp(lambda qkv_BTd: _by_jax(qkv_BTd, length, model), qkv_BTd)[1](g_BTH)[0]
    dropped = by_example(dropped, length)
    q_RNTD, k_RNSD, v_RNSD = heads_of(by_text(qkv_BTd, length), 3, model.heads)
    (g_RNTD,), (context_RNTD,) = (heads_of(by_text(x, length), 1, model.heads) for x in (g_BTH, context_BTH))
    at_least_f32 = jnp.promote_types(qkv_BTd.dtype, jnp.float32)
    probs_RNTS = probabilities(q_RNTD, k_RNSD, length.reshape(-1), model.causal)
    g_v = jnp.einsum("RNTS,RNTD->RNSD", dropped(probs_RNTS.astype(qkv_BTd.dtype)), g_RNTD)
    g_probs_RNTS = dropped(jnp.einsum("RNTD,RNSD->RNTS", g_RNTD, v_RNSD, preferred_element_type=at_least_f32))
    own_RNT1 = jnp.sum(g_RNTD.astype(at_least_f32) * context_RNTD.astype(at_least_f32), axis=-1, keepdims=True)
    g_scores_RNTS = (probs_RNTS * (g_probs_RNTS - own_RNT1) * q_RNTD.shape[-1] ** -0.5).astype(qkv_BTd.dtype)
    g_q = jnp.einsum("RNTS,RNSD->RNTD", g_scores_RNTS, k_RNSD)
    g_k = jnp.einsum("RNTS,RNTD->RNSD", g_scores_RNTS, q_RNTD)
    return jnp.stack([g_q, g_k, g_v]).transpose(1, 3, 0, 2, 4).reshape(qkv_BTd.shape)


# Given: `layers` with `keys` and `values` [L,R,U,G,D], and `embeddings` with `place`, the place [R] of each text's last token.
KEPT = "kept_keys_and_values"
# Returned: `layers` with `keys` and `values` [L,R,S,G,D].
MADE = "made_keys_and_values"


def kept(module: nn.Module) -> Any:
    """Returns the part of `KEPT` that belongs to `module`, or None."""
    return module.variables.get(KEPT)


def places(module: nn.Module, length_R: Array, tokens: int) -> Array:
    """Returns the places in their texts, from 0, of the tokens that a layer reads: [S], or [R,1] if each is its text's last."""
    return jnp.arange(tokens) if kept(module) is None else length_R[:, None] - 1


def seen(module: nn.Module, key: Array, value: Array, length_R: Array, axis: int) -> tuple[Array, Array]:
    """Returns the keys and values of all tokens that a layer sees: the earlier ones that are given, and the tokens that it reads.

    `axis` is that of the tokens; the first axis is that of the texts.
    """
    if not module.is_mutable_collection(MADE):
        return key, value
    own = {name: jnp.moveaxis(one, axis, 1) for name, one in (("keys", key), ("values", value))}
    for name, one in own.items():
        module.sow(MADE, name, one)
    before = kept(module)
    if before is None:
        return key, value
    at = jnp.arange(len(length_R)), length_R - 1
    whole = {name: before[name].at[at].set(one[:, 0]) for name, one in own.items()}
    return jnp.moveaxis(whole["keys"], 1, axis), jnp.moveaxis(whole["values"], 1, axis)
