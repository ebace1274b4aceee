"""Fine-tunes to numbers, or to several labels of a text at once.

A target that a row lacks has a loss of exactly 0, so the row adds nothing to a sum of gradients.

B: examples, M: outputs of a text (1 for a number, one for each label).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dpx.data.schema import UNKNOWN
from dpx.task import classification
from dpx.task.declared_targets import MultiLabel, Regression
from dpx.task.losses import Batch, Counts, Key, Params


@dataclasses.dataclass(frozen=True)
class Objective(classification.Objective):
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
