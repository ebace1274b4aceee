"""Computes per-example losses of masked-language-model pre-training from rows, with or without next sentence.

B: examples, T: tokens, M: masked positions.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from dpx.data.vocabulary import SpecialIds
from dpx.models.bert import BertForPreTraining
from dpx.models.dropout import record_keys
from dpx.models.shape import Bert
from dpx.task.declarations import MaskedLanguageModel
from dpx.task.losses import Batch, Counts, Key, Params, class_losses, decode_losses, dropout_keys
from dpx.task.masking import Marks, mask

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
