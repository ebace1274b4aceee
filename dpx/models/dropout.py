"""Applies dropout whose masks are a function of (key, record, layer, site) alone, so that a backward pass can draw them again.

B: examples.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from dpx.models.shape import Model

# Sites within a layer; the embedding counts as layer -1, a classifier as the layer after the last. Adapters have sites from the last on.
EMBEDDING, ATTENTION, ATTENTION_OUT, OUTPUT, ADAPTERS = range(5)


def record_keys(key: UInt32[Array, "2"], record_B: Int[Array, " B"]) -> UInt32[Array, "B 2"]:
    """Returns one key for each record, which does not depend on the other records of the batch."""
    return jax.vmap(lambda record: jax.random.fold_in(key, record))(record_B)


def dropout(
    x: Float[Array, "B ..."], keys_B: UInt32[Array, "B 2"] | None, layer, site: int, rate: float | Array, places: int = 0
) -> Float[Array, "B ..."]:
    """Applies inverted dropout; `layer` may be traced (it is scanned over).

    Without keys, or at a constant rate of 0, it returns `x` at no cost. Each place along the first `places` axes of an example has its own
    key. Whether an entry is kept depends on its position and, of the sizes, only on those behind the first axis without keys: a text's
    masks are the same whatever length it is padded to.
    """
    if keys_B is None or (isinstance(rate, float) and rate == 0.0):
        return x

    def entries(key, shape, places):
        if places:
            return jax.vmap(lambda place: entries(jax.random.fold_in(key, place), shape[1:], places - 1))(jnp.arange(shape[0]))
        # The type of p decides how many bits are drawn: float32 whatever the default is.
        return jax.random.bernoulli(key, jnp.float32(1.0 - rate), shape)

    own = jax.vmap(lambda key: entries(jax.random.fold_in(jax.random.fold_in(key, layer + 1), site), x.shape[1:], places))
    return jnp.where(own(keys_B), x / (1.0 - rate), 0).astype(x.dtype)


def of_tokens(x_BTH: Array, keys_B: UInt32[Array, "B 2"] | None, layer, site: int, rate: float | Array, length: Array) -> Array:
    """Applies dropout to the values of tokens, [B,T,H]; with `length` [B,C] the tokens of C texts lie side by side."""
    if keys_B is None or length.ndim == 1:
        return dropout(x_BTH, keys_B, layer, site, rate)
    by_text = x_BTH.reshape(*length.shape, -1, x_BTH.shape[-1])
    return dropout(by_text, keys_B, layer, site, rate, places=1).reshape(x_BTH.shape)


def of_head(x: Float[Array, "B ..."], keys_B: UInt32[Array, "B 2"] | None, model: Model, site: int) -> Float[Array, "B ..."]:
    """Applies dropout in a classifier; a head counts as the layer after the last."""
    return dropout(x, keys_B, model.layers, site, model.dropout)
