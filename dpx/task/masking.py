"""Masks words on the device, with one key for each record, so that a record's masks do not depend on its batch.

B: examples, T: tokens, M: masked positions.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from dpx.data.store import Manifest
from dpx.data.vocabulary import SpecialIds
from dpx.task.declarations import MaskedLanguageModel

# Any object with the ids that are never predicted and never a random replacement.
Marks = SpecialIds | Manifest


class Masked(NamedTuple):
    """Masked tokens, the positions that are predicted, their labels, and a mask of the positions that are real (the others are filling)."""

    token_BT: Int[Array, "B T"]
    masked_position_BM: Int[Array, "B M"]
    label_BM: Int[Array, "B M"]
    has_label_BM: Bool[Array, "B M"]


def special_ids(special: SpecialIds) -> tuple[int, ...]:
    """Returns the five ids, ascending, each once."""
    return tuple(sorted({special.pad_id, special.unk_id, special.cls_id, special.sep_id, special.mask_id}))


def ordinary_id(draw: Array, specials: tuple[int, ...]) -> Array:
    """Returns the draw-th id that is not special, for 0 <= draw < vocabulary size - len(specials)."""
    for special in specials:
        draw = draw + (draw >= special)
    return draw


def mask(
    task: MaskedLanguageModel,
    special: SpecialIds,
    vocabulary_size: int,
    key_B: UInt32[Array, "B 2"],
    token_BT: Int[Array, "B T"],
    length_B: Int[Array, " B"],
) -> Masked:
    """Chooses round(masking_rate * length) ordinary tokens (at least 1, at most `max_masked_positions` or all there are) and hides them.

    Places beyond an example's number point at position 0, have label 0 and `has_label_BM` false.
    """
    return Masked(*jax.vmap(partial(_mask_one, task, special, vocabulary_size))(key_B, token_BT, length_B))


def _mask_one(task: MaskedLanguageModel, special: SpecialIds, vocabulary_size: int, key, token_T, length):
    choose, how, replace = jax.random.split(key, 3)
    specials = special_ids(special)
    T, M = token_T.shape[0], task.masked_positions(token_T.shape[0])
    is_candidate_T = (jnp.arange(T) < length) & ~jnp.isin(token_T, jnp.asarray(specials))
    wanted = jnp.clip(jnp.round(task.masking_rate * length).astype(jnp.int32), 1, M)
    number = jnp.minimum(wanted, is_candidate_T.sum())

    # Distinct positions in a random order, candidates first; argsort is stable, so equal draws still give distinct positions.
    order_T = jnp.argsort(jnp.where(is_candidate_T, jax.random.uniform(choose, (T,)), 2.0))
    order_M = order_T[:M].astype(jnp.int32)
    has_label_M = jnp.arange(M) < number
    masked_position_M = jnp.where(has_label_M, order_M, 0)
    original_M = token_T[masked_position_M]

    if task.masking == "always_mask":
        shown_M = jnp.full((M,), special.mask_id, token_T.dtype)
    else:
        random_M = ordinary_id(jax.random.randint(replace, (M,), 0, vocabulary_size - len(specials), token_T.dtype), specials)
        fate_M = jax.random.uniform(how, (M,))
        shown_M = jnp.where(fate_M < 0.8, special.mask_id, jnp.where(fate_M < 0.9, random_M, original_M))
    # An unused slot writes out of range, and that write is dropped.
    shown_T = token_T.at[jnp.where(has_label_M, masked_position_M, T)].set(shown_M.astype(token_T.dtype), mode="drop")
    return shown_T, masked_position_M, jnp.where(has_label_M, original_M, 0), has_label_M
