"""Computes per-example losses of masked-language-model pre-training from rows, with or without next sentence.

Words are masked on the device, with one key for each record, so that a record's masks do not depend on its batch.

B: examples, T: tokens, M: masked positions.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from dpx.data.store import Manifest
from dpx.data.tokenizer import SpecialIds
from dpx.models.dropout import record_keys
from dpx.models.networks import BertForPreTraining
from dpx.models.shape import Bert
from dpx.task.declared_task import MaskedLanguageModel
from dpx.task.losses import Batch, Counts, Key, Params, class_losses, decode_losses, dropout_keys

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


# For callers without a store.
Special = SpecialIds


@dataclasses.dataclass(frozen=True)
class Objective:
    """The objective of BERT's pre-training, as pure functions of their arguments.

    It makes initial parameters, batches from rows, and losses.
    """

    model: Bert
    task: MaskedLanguageModel
    vocabulary_size: int
    special: SpecialIds

    @property
    def module(self) -> BertForPreTraining:
        """Returns the flax module of the model and its heads."""
        return BertForPreTraining(self.model, self.vocabulary_size, self.task.next_sentence)

    def init(self, key: Key) -> Params:
        """Returns new float32 parameters, a nested dict with the paths of `Bert.parameter_shapes`."""
        token_BT = jnp.zeros((1, 2), jnp.int32)
        variables: Any = self.module.init(jnp.asarray(key), token_BT, token_BT, jnp.ones((1,), jnp.int32), jnp.zeros((1, 1), jnp.int32))
        return variables["params"]

    def batch(self, key: Key, rows: dict[str, Any]) -> Batch:
        """Masks rows of a store (`tokens` int32 [B,T], `length`, `segment_start` and `record` int32 [B]).

        Returns `tokens` [B,T] with `masked_positions`, `labels` and `has_label` [B,M]. A row's masks depend on `key` (uint32 [2]) and its
        `record` alone.
        """
        rows = {name: jnp.asarray(value) for name, value in rows.items()}
        keys_B = record_keys(jnp.asarray(key), rows["record"])
        masked = mask(self.task, self.special, self.vocabulary_size, keys_B, rows["tokens"], rows["length"])
        kept = ("segment_start", "length", "record", *(("is_next",) if self.task.next_sentence else ()))
        return {name: rows[name] for name in kept} | {
            "tokens": masked.token_BT,
            "masked_positions": masked.masked_position_BM,
            "labels": masked.label_BM,
            "has_label": masked.has_label_BM,
        }

    def answers(self, batch: Batch) -> tuple[Array, Array]:
        """Returns the targets, ids [B,M], and a mask of the positions that have a target."""
        return batch["labels"], batch["has_label"]

    def losses(self, params: Params, batch: Batch, dropout_key: Key | None = None) -> tuple[Float[Array, " B"], Counts]:
        """Returns per-example losses and counts (`mlm_correct`, `mlm_predicted`, `next_sentence_correct`), float32 or wider."""
        segment_BT = segments(batch["tokens"].shape[1], batch["segment_start"], batch["length"])
        rows = (
            batch["tokens"],
            segment_BT,
            batch["length"],
            batch["masked_positions"],
            dropout_keys(self.model, params, dropout_key, batch["record"]),
        )
        decoded: Any = self.module.apply({"params": params}, *rows, decode_losses(params, batch["labels"], batch["has_label"]))
        (losses_B, correct_B), next_B2 = decoded
        counts = {"mlm_correct": correct_B, "mlm_predicted": batch["has_label"].sum(1).astype(losses_B.dtype)}
        if next_B2 is None:
            return losses_B, counts | {"next_sentence_correct": jnp.zeros_like(losses_B)}
        next_losses_B, correct_B = class_losses(next_B2, batch["is_next"])
        return losses_B + next_losses_B, counts | {"next_sentence_correct": correct_B}


def segments(tokens: int, segment_start: Array, length: Array) -> Array:
    """Returns an array [..., T] that is 1 within the second segment, and 0 before it and in the padding after it.

    Lengths may be [B] or [B,C].
    """
    position_T = jnp.arange(tokens)
    return ((position_T >= segment_start[..., None]) & (position_T < length[..., None])).astype(jnp.int32)


def objective(model: Bert, task: MaskedLanguageModel, vocabulary_size: int, special: Marks) -> Objective:
    """Returns the objective of `task` for `model`; `special` is any object with the five ids, such as a store's manifest."""
    return Objective(model, task, vocabulary_size, Special.from_ids(special))
