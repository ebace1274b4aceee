"""Dropout whose masks are a function of (key, record, layer, site) alone, so a backward pass can draw them again.

B: examples.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from dpx.models.shape import Model

# Sites within a layer; the embedding counts as layer -1, a classifier as the layer after the last.
EMBEDDING, ATTENTION, ATTENTION_OUT, OUTPUT = range(4)


def record_keys(key: UInt32[Array, "2"], record_B: Int[Array, " B"]) -> UInt32[Array, "B 2"]:
    """One key per record: the same whatever else is in the batch."""
    return jax.vmap(lambda record: jax.random.fold_in(key, record))(record_B)


def kept(keys_B: UInt32[Array, "B 2"], layer, site: int, rate: float, shape: tuple[int, ...]) -> Bool[Array, "B ..."]:
    """Which entries survive, `shape` per example; `layer` may be traced (it is scanned over)."""

    def one(key):
        # The type of p decides how many bits are drawn: float32 whatever the default is.
        return jax.random.bernoulli(jax.random.fold_in(jax.random.fold_in(key, layer + 1), site), jnp.float32(1.0 - rate), shape)

    return jax.vmap(one)(keys_B)


def dropout(x: Float[Array, "B ..."], keys_B: UInt32[Array, "B 2"] | None, layer, site: int, rate: float) -> Float[Array, "B ..."]:
    """Inverted dropout; the identity, at no cost, without keys or at rate 0."""
    if keys_B is None or rate == 0.0:
        return x
    return jnp.where(kept(keys_B, layer, site, rate, x.shape[1:]), x / (1.0 - rate), 0).astype(x.dtype)


def of_head(x: Float[Array, "B ..."], keys_B: UInt32[Array, "B 2"] | None, model: Model, site: int) -> Float[Array, "B ..."]:
    """Dropout of a classifier: a head counts as the layer after the last."""
    return dropout(x, keys_B, model.layers, site, model.dropout)
