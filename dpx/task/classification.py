"""Fine-tunes to labels: the class of a text (or of a pair), or the correct one of several texts, each scored by itself.

B: examples, C: choices of an example, S: tokens of one text, K: classes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from dpx.models.networks import AnyDecoder, BertForClassification, DecoderForClassification, Features
from dpx.models.shape import Model
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


def _texts(batch: Batch) -> tuple[Array, Array, Array]:
    """Returns tokens and segments [B,T], with choices side by side, and lengths."""
    tokens, length = batch["tokens"], batch["length"]
    segment, side_by_side = segments(tokens.shape[-1], batch["segment_start"], length), (tokens.shape[0], -1)
    return tokens.reshape(side_by_side), segment.reshape(side_by_side), length
