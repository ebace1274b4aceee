"""Fine-tunes to what is known of a text: its class, the correct one of several texts, a number, or several labels at once.

Texts of one example are scored each by itself. A target that a row lacks has a loss of exactly 0, so the row adds nothing to a sum of
gradients.

B: examples, C: choices of an example, S: tokens of one text, K: classes, M: outputs of a text (1 for a number, one for each label).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dpx.data.schema import UNKNOWN
from dpx.models.networks import AnyDecoder, BertForClassification, DecoderForClassification, Features
from dpx.models.shape import Model
from dpx.task.declared_targets import MultiLabel, Regression
from dpx.task.losses import Batch, Counts, Key, Params, class_losses, dropout_keys
from dpx.task.mlm import segments
from dpx.task.task_protocol import Pooled

Noised = Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class Objective:
    """The objective of classification.

    Rows have `label` [B] beside `tokens`, `segment_start`, `length` and `record`; with choices the first three are [B,C,...].

    Rows with `features` [B,H] or [B,C,H] in place of these three are classified from features that were computed before (`features`).
    """

    model: Model
    task: Pooled
    vocabulary_size: int

    @property
    def module(self) -> BertForClassification | DecoderForClassification:
        """Returns the flax module of the model and its classifier."""
        of_model = DecoderForClassification if isinstance(self.model, AnyDecoder) else BertForClassification
        return of_model(self.model, self.vocabulary_size, self.task.pooled_outputs)  # type: ignore[arg-type]

    def init(self, key: Key) -> Params:
        """Returns new float32 parameters, a nested dict with the paths of the model's `parameter_shapes`."""
        token_BS = jnp.zeros((1, 2), jnp.int32)
        variables: Any = self.module.init(jnp.asarray(key), token_BS, token_BS, jnp.ones((1,), jnp.int32))
        return variables["params"]

    def batch(self, key: Key, rows: dict[str, Any]) -> Batch:
        """Returns the rows unchanged; nothing is drawn from `key`."""
        texts = ("features",) if "features" in rows else ("tokens", "segment_start", "length")
        return {name: jnp.asarray(rows[name]) for name in (*texts, "label", "record")}

    def answers(self, batch: Batch) -> tuple[Array, Array]:
        """Returns the targets, classes [B,1], and a mask of the rows that have a target."""
        return batch["label"][:, None], jnp.ones_like(batch["label"], bool)[:, None]

    def losses(
        self, params: Params, batch: Batch, dropout_key: Key | None = None, noised: Noised | None = None
    ) -> tuple[Float[Array, " B"], Counts]:
        """Returns the per-example cross-entropy of the label and the count `correct`, float32 or wider.

        With `noised` the last map reads `noised(h)` in place of each text's vector h, [B,H]: for encoders (`dpx.mechanism.dp_fp`).
        """
        losses_B, correct_B = class_losses(self.logits(params, batch, dropout_key, noised), batch["label"])
        return losses_B, {"correct": correct_B}

    def logits(self, params: Params, batch: Batch, dropout_key: Key | None = None, noised: Noised | None = None) -> Float[Array, "B K"]:
        """Returns the logit of each class or of each choice, float32 or wider; `noised` as for `losses`."""
        keys_B = dropout_keys(self.model, params, dropout_key, batch["record"])
        texts = (None, None, None) if "features" in batch else _texts(batch)
        inputs = (*texts, keys_B, batch.get("features"), *(() if noised is None else (noised,)))
        logits: Any = self.module.apply({"params": params}, *inputs)
        return logits.reshape(len(batch["record"]), -1)

    @property
    def has_constant_features(self) -> bool:
        """Returns whether the head's input for a text depends on parameters below the head alone."""
        return self.model.dropout == 0.0

    def features(self, params: Params, batch: Batch) -> Float[Array, "B ... H"]:
        """Returns the input of the head for each text, in the compute type, without dropout.

        It depends only on parameters below the head.
        """
        return Features(self.model, self.vocabulary_size).apply({"params": params}, *_texts(batch))  # type: ignore[arg-type, return-value]


@dataclasses.dataclass(frozen=True)
class TargetObjective(Objective):
    """The objective of `regression` and `multi_label`: the model and the head of a classifier with other losses.

    Rows have `target` and `has_target` [B], or `labels` [B,M], in place of `label`.
    """

    task: Regression | MultiLabel

    def batch(self, key: Key, rows: dict[str, Any]) -> Batch:
        """Returns the rows unchanged; nothing is drawn from `key`."""
        texts = ("features",) if "features" in rows else ("tokens", "segment_start", "length")
        own = ("target", "has_target") if isinstance(self.task, Regression) else ("labels",)
        return {name: jnp.asarray(rows[name]) for name in (*texts, *own, "record")}

    def answers(self, batch: Batch) -> tuple[Float[Array, "B M"], Bool[Array, "B M"]]:
        """Returns the targets, numbers or 0 and 1, and a mask of those that the rows have."""
        if isinstance(self.task, Regression):
            return batch["target"][:, None], batch["has_target"][:, None] > 0
        has_BM = batch["labels"] != UNKNOWN
        return jnp.where(has_BM, batch["labels"], 0).astype(jnp.float32), has_BM

    def outputs(self, params: Params, batch: Batch) -> Float[Array, "B M"]:
        """Returns what the targets are compared with: a number in their units, or the logit of each label."""
        logits_BM = self.logits(params, batch)
        return logits_BM * self.task.scale + self.task.mean if isinstance(self.task, Regression) else logits_BM

    def losses(self, params: Params, batch: Batch, dropout_key: Key | None = None, noised: Any = None) -> tuple[Float[Array, " B"], Counts]:
        """Returns the per-example losses and the task's counts, float32 or wider."""
        assert noised is None
        logits_BM, (target_BM, has_BM) = self.logits(params, batch, dropout_key), self.answers(batch)
        target_BM = target_BM.astype(logits_BM.dtype)
        weight_BM = has_BM.astype(logits_BM.dtype)
        if isinstance(self.task, Regression):
            error_B = jnp.where(has_BM, logits_BM - (target_BM - self.task.mean) / self.task.scale, 0)[:, 0]
            losses_B = jnp.square(error_B)
            return losses_B, {"squared_error": jax.lax.stop_gradient(losses_B), "with_target": weight_BM[:, 0]}
        # -log sigmoid of the logit, or of its negative where the label is not true.
        entropy_BM = jnp.where(has_BM, jax.nn.softplus(jnp.where(target_BM > 0, -logits_BM, logits_BM)), 0)
        count_B = weight_BM.sum(1)
        is_right_BM = ((logits_BM > 0) == (target_BM > 0)) | ~has_BM
        counts = {"correct": (is_right_BM.all(1) & (count_B > 0)).astype(logits_BM.dtype), "with_labels": jnp.minimum(count_B, 1)}
        return entropy_BM.sum(1) / jnp.maximum(count_B, 1), counts


def _texts(batch: Batch) -> tuple[Array, Array, Array]:
    """Returns tokens and segments [B,T], with choices side by side, and lengths."""
    tokens, length = batch["tokens"], batch["length"]
    segment, side_by_side = segments(tokens.shape[-1], batch["segment_start"], length), (tokens.shape[0], -1)
    return tokens.reshape(side_by_side), segment.reshape(side_by_side), length
