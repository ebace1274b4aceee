"""Lets a decoder read one token of a text at a time: the keys and values of the tokens before it are given in place of the tokens.

A decoder that is applied with the collection `KEPT` reads one token of each text, its last. With `MADE` mutable, each layer returns in that
collection the keys and values of the tokens that it read. Without these collections, as in training, this module computes nothing.

R: texts, S: tokens read, U: tokens of a text whose keys and values are kept, G: key-value heads, D: numbers of a head.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array

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
