"""Masked-language-model pre-training, with or without next sentence: rows in, per-example losses out.

Every loss is normalised within its example, never over the batch, so an example's gradient is a function of that example.

B: examples, T: tokens, M: masked slots, V: vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from dpx.clipping.probes import session_of
from dpx.models import fused_bert
from dpx.models.bert import BertForPreTraining
from dpx.models.dropout import record_keys
from dpx.models.shape import Bert
from dpx.task.declarations import MaskedLanguageModel
from dpx.task.masking import SpecialIds, mask

Params = dict[str, Any]
Batch = dict[str, Array]
Counts = dict[str, Array]
Key = UInt32[Array, "2"] | UInt32[np.ndarray, "2"]


@dataclasses.dataclass(frozen=True)
class Special:
    """Special token ids by name, for callers without a store."""

    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is learnt: initial parameters, batches from rows, and losses. Pure functions of their arguments."""

    model: Bert
    task: MaskedLanguageModel
    vocabulary_size: int
    special: SpecialIds

    @property
    def module(self) -> BertForPreTraining:
        return BertForPreTraining(self.model, self.vocabulary_size, self.task.next_sentence)

    def init(self, key: Key) -> Params:
        """Fresh float32 parameters, a nested dict with the paths of `Bert.parameter_shapes`."""
        token_BT = jnp.zeros((1, 2), jnp.int32)
        variables: Any = self.module.init(jnp.asarray(key), token_BT, token_BT, jnp.ones((1,), jnp.int32), jnp.zeros((1, 1), jnp.int32))
        return variables["params"]

    def batch(self, key: Key, rows: dict[str, Any]) -> Batch:
        """Masks rows as a store gives them; a row's masks are a function of (`key`, its `record`) alone."""
        rows = {name: jnp.asarray(value) for name, value in rows.items()}
        keys_B = record_keys(jnp.asarray(key), rows["record"])
        masked = mask(self.task, self.special, self.vocabulary_size, keys_B, rows["tokens"], rows["length"])
        return {
            "tokens": masked.token_BT,
            "slots": masked.slot_BM,
            "labels": masked.label_BM,
            "is_slot": masked.is_slot_BM,
            "segment_start": rows["segment_start"],
            "length": rows["length"],
            "is_next": rows["is_next"],
            "record": rows["record"],
        }

    def losses(self, params: Params, batch: Batch, dropout_key: Key | None = None) -> tuple[Float[Array, " B"], Counts]:
        """Per-example losses and counts (`mlm_correct`, `mlm_predicted`, `next_sentence_correct`), float32 or wider."""
        keys_B = None if dropout_key is None or self.model.dropout == 0.0 else record_keys(jnp.asarray(dropout_key), batch["record"])
        segment_BT = segments(batch["tokens"].shape[1], batch["segment_start"], batch["length"])
        session = session_of(params)
        losses_of = self._fused if session is not None and session.fused else self._composed
        losses_B, counts, next_B2 = losses_of(params, batch, segment_BT, keys_B)
        if next_B2 is None:
            return losses_B, counts | {"next_sentence_correct": jnp.zeros_like(losses_B)}
        next_losses_B, correct_B = next_sentence_losses(next_B2, batch["is_next"])
        return losses_B + next_losses_B, counts | {"next_sentence_correct": correct_B}

    def _composed(self, params: Params, batch: Batch, segment_BT: Array, keys_B: Array | None) -> tuple[Array, Counts, Array | None]:
        rows = batch["tokens"], segment_BT, batch["length"], batch["slots"]
        logits: Any = self.module.apply({"params": params}, *rows, keys_B)
        losses_B, counts = masked_losses(logits[0], batch["labels"], batch["is_slot"])
        return losses_B, counts, logits[1]

    def _fused(self, params: Params, batch: Batch, segment_BT: Array, keys_B: Array | None) -> tuple[Array, Counts, Array | None]:
        losses_B, correct_B, x_BTH = fused_bert.masked_losses(self.model, params, batch, segment_BT, keys_B)
        counts = {"mlm_correct": correct_B, "mlm_predicted": batch["is_slot"].sum(1).astype(losses_B.dtype)}
        return losses_B, counts, fused_bert.next_sentence_logits(params, x_BTH) if self.task.next_sentence else None


def segments(tokens: int, segment_start_B: Array, length_B: Array) -> Array:
    """[B,T]: 1 within the second segment, 0 before it and in the padding after it."""
    position_T = jnp.arange(tokens)
    return ((position_T >= segment_start_B[:, None]) & (position_T < length_B[:, None])).astype(jnp.int32)


def masked_losses(logits_BMV: Array, label_BM: Array, is_slot_BM: Array) -> tuple[Array, Counts]:
    """Mean cross-entropy over an example's slots; 0 for an example that has none."""
    weight_BM = is_slot_BM.astype(logits_BMV.dtype)
    label_logit_BM = jnp.take_along_axis(logits_BMV, label_BM[:, :, None], axis=2)[:, :, 0]
    loss_BM = jax.nn.logsumexp(logits_BMV, axis=-1) - label_logit_BM
    number_B = weight_BM.sum(1)
    # Right if no logit is larger: argmax would cost a third of a small model's step.
    correct_B = jnp.sum((label_logit_BM >= logits_BMV.max(-1)) * weight_BM, axis=1)
    return jnp.sum(loss_BM * weight_BM, axis=1) / jnp.maximum(number_B, 1), {"mlm_correct": correct_B, "mlm_predicted": number_B}


def next_sentence_losses(logits_B2: Array, is_next_B: Array) -> tuple[Array, Array]:
    """Cross-entropy of class `is_next` and whether the larger logit was right."""
    picked_B = jnp.take_along_axis(logits_B2, is_next_B[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits_B2, axis=-1) - picked_B, (jnp.argmax(logits_B2, axis=-1) == is_next_B).astype(logits_B2.dtype)


def objective(model: Bert, task: MaskedLanguageModel, vocabulary_size: int, special: SpecialIds) -> Objective:
    """The runtime of `task` for `model`; `special` is anything with the five ids, such as a store's manifest."""
    return Objective(model, task, vocabulary_size, Special(special.pad_id, special.unk_id, special.cls_id, special.sep_id, special.mask_id))
