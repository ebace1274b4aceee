"""Computes per-example losses of the next tokens from rows (causal language modelling).

B: examples, T: tokens.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from dpx.models.networks import AnyDecoder, DecoderForCausalLM
from dpx.task.declared_task import CausalLanguageModel
from dpx.task.losses import Batch, Counts, Key, Params, decode_losses, dropout_keys


@dataclasses.dataclass(frozen=True)
class Objective:
    """The objective of causal language modelling, as pure functions of their arguments.

    It makes initial parameters, batches from rows, and losses.
    """

    model: AnyDecoder
    task: CausalLanguageModel
    vocabulary_size: int

    @property
    def module(self) -> DecoderForCausalLM:
        """Returns the flax module of the model and its head."""
        return DecoderForCausalLM(self.model, self.vocabulary_size)

    def init(self, key: Key) -> Params:
        """Returns new float32 parameters, a nested dict with the paths of the model's `parameter_shapes`."""
        variables: Any = self.module.init(jnp.asarray(key), jnp.zeros((1, 2), jnp.int32), jnp.ones((1,), jnp.int32))
        return variables["params"]

    def batch(self, key: Key, rows: dict[str, Any]) -> Batch:
        """Returns the batch of rows, in which each position's label is the token after it.

        The last real token has no label. In a row with a second segment, a completion, only that segment's tokens are labels, and in rows
        with `is_learnt` only the tokens that it marks. Nothing is drawn from `key`.
        """
        tokens, length = jnp.asarray(rows["tokens"]), jnp.asarray(rows["length"])
        start = jnp.asarray(rows.get("segment_start", length))
        next_T = jnp.arange(1, tokens.shape[1] + 1)
        has_label_BT = (next_T < length[:, None]) & ((next_T >= start[:, None]) | (start >= length)[:, None])
        if "is_learnt" in rows:
            has_label_BT &= jnp.roll(jnp.asarray(rows["is_learnt"]), -1, axis=1) > 0
        label_BT = jnp.where(has_label_BT, jnp.roll(tokens, -1, axis=1), 0)
        return {"tokens": tokens, "labels": label_BT, "has_label": has_label_BT, "length": length, "record": jnp.asarray(rows["record"])}

    def answers(self, batch: Batch) -> tuple[Array, Array]:
        """Returns the targets, ids [B,T], and a mask of the positions that have a target."""
        return batch["labels"], batch["has_label"]

    def losses(self, params: Params, batch: Batch, dropout_key: Key | None = None) -> tuple[Float[Array, " B"], Counts]:
        """Returns per-example losses and counts (`next_token_correct`, `_predicted`, `_nats`: the summed loss), float32 or wider."""
        rows = batch["tokens"], batch["length"], dropout_keys(self.model, params, dropout_key, batch["record"])
        decode = decode_losses(params, batch["labels"], batch["has_label"], getattr(self.model, "logit_cap", None))
        decoded: Any = self.module.apply({"params": params}, *rows, decode)
        losses_B, correct_B = decoded
        predicted_B = batch["has_label"].sum(1).astype(losses_B.dtype)
        counts = {"next_token_correct": correct_B, "next_token_predicted": predicted_B, "next_token_nats": losses_B * predicted_B}
        return losses_B, counts
