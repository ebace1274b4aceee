"""Fine-tuning to labels: the class of a text (or of a pair), or the right one of several texts, each scored by itself.

B: examples, C: choices of an example, S: tokens of one text, K: classes.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from dpx.models.bert import BertForClassification
from dpx.models.decoder import DecoderForClassification
from dpx.models.shape import Decoder, Model
from dpx.task.declarations import Classification, MultipleChoice
from dpx.task.losses import Batch, Counts, Key, Params, class_losses, dropout_keys
from dpx.task.mlm import segments


@dataclasses.dataclass(frozen=True)
class Objective:
    """Rows carry `label` [B] beside `tokens`, `segment_start`, `length` and `record`; with choices the first three are [B,C,...]."""

    model: Model
    task: Classification | MultipleChoice
    vocabulary_size: int

    @property
    def module(self) -> BertForClassification | DecoderForClassification:
        of_model = DecoderForClassification if isinstance(self.model, Decoder) else BertForClassification
        return of_model(self.model, self.vocabulary_size, self.task.pooled_outputs)  # type: ignore[arg-type]

    def init(self, key: Key) -> Params:
        """Fresh float32 parameters, a nested dict with the paths of the model's `parameter_shapes`."""
        token_BS = jnp.zeros((1, 2), jnp.int32)
        variables: Any = self.module.init(jnp.asarray(key), token_BS, token_BS, jnp.ones((1,), jnp.int32))
        return variables["params"]

    def batch(self, key: Key, rows: dict[str, Any]) -> Batch:
        """Rows as they are; nothing is drawn from `key`."""
        return {name: jnp.asarray(rows[name]) for name in ("tokens", "segment_start", "length", "label", "record")}

    def answers(self, batch: Batch) -> tuple[Array, Array]:
        """What has to be found, classes [B,1], and where there is something to find."""
        return batch["label"][:, None], jnp.ones_like(batch["label"], bool)[:, None]

    def losses(self, params: Params, batch: Batch, dropout_key: Key | None = None) -> tuple[Float[Array, " B"], Counts]:
        """Per-example cross-entropy of the label and the count `correct`, float32 or wider."""
        losses_B, correct_B = class_losses(self.logits(params, batch, dropout_key), batch["label"])
        return losses_B, {"correct": correct_B}

    def logits(self, params: Params, batch: Batch, dropout_key: Key | None = None) -> Float[Array, "B K"]:
        """Of each class, or of each choice, float32 or wider."""
        tokens, length = batch["tokens"], batch["length"]
        segment = segments(tokens.shape[-1], batch["segment_start"], length)
        side_by_side = (tokens.shape[0], -1)
        keys_B = dropout_keys(self.model, params, dropout_key, batch["record"])
        logits: Any = self.module.apply({"params": params}, tokens.reshape(side_by_side), segment.reshape(side_by_side), length, keys_B)
        return logits.reshape(side_by_side)
