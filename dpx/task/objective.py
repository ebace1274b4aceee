"""Makes the objective of a task for a model; no other module knows which module belongs to which declaration.

An objective has `init(key) -> params`, `batch(key, rows) -> batch` (rows as a store gives them: the task's `columns`, and `record`),
`losses(params, batch, dropout_key) -> (losses_B, counts)`: the task's `counts`, one value an example, and `answers(batch)`.

Of a model of one example (`dpx.models.model_protocol`), rows and counts are the task's, logits the model's. It is mapped over the examples
of a batch, so that no example depends on another.

B: examples, T: tokens, V: vocabulary, K: classes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpx.clipping.norms import at_least_float32
from dpx.data.tokenizer import SpecialIds
from dpx.declaration import ConfigError, require
from dpx.models.model_protocol import ExampleModel
from dpx.models.shape import AnyModel, Bert, Decoder, RotaryDecoder
from dpx.models.trainable import whole
from dpx.task import causal_lm, classification, mlm
from dpx.task.declared_targets import MultiLabel, Regression
from dpx.task.declared_task import CausalLanguageModel, Classification, MaskedLanguageModel, MultipleChoice, Task
from dpx.task.losses import Batch, Counts, Key, Params, class_losses, token_losses
from dpx.task.mlm import Marks
from dpx.task.task_protocol import Objective, PackageTask


@dataclasses.dataclass(frozen=True)
class OfExamples:
    """The common part of objectives for a model of one example; `one` returns the loss of one example and its counts."""

    model: ExampleModel
    task: Any
    vocabulary_size: int

    def init(self, key: Key) -> Params:
        return self.model.init(jnp.asarray(key), self.vocabulary_size, self.task.pooled_outputs)

    def one(self, params: Params, example: Batch) -> tuple[Array, Counts]:
        raise NotImplementedError

    def losses(self, params: Params, batch: Batch, dropout_key: Key | None = None) -> tuple[Array, Counts]:
        """Returns per-example losses and counts; no dropout is applied."""
        del dropout_key
        params = params if self.model.runs_layers_below else whole(params)
        return jax.vmap(lambda example: self.one(params, example))(batch)

    def _tokens(self, params: Params, example: Batch) -> tuple[Array, Array, Array]:
        """Returns (loss, correct, predicted) of the positions that are predicted, float32 or wider."""
        logits_TV = at_least_float32(self.model.token_logits(params, example["tokens"], example["length"]))
        if "masked_positions" in example:
            logits_TV = logits_TV[example["masked_positions"]]
        losses_1, correct_1 = token_losses(logits_TV[None], example["labels"][None], example["has_label"][None])
        return losses_1[0], correct_1[0], example["has_label"].sum().astype(losses_1.dtype)


@dataclasses.dataclass(frozen=True)
class NextTokens(OfExamples):
    """The objective of `causal_lm`, with the same rows and counts as `causal_lm.Objective`."""

    batch, answers = causal_lm.Objective.batch, causal_lm.Objective.answers

    def one(self, params: Params, example: Batch) -> tuple[Array, Counts]:
        loss, correct, predicted = self._tokens(params, example)
        return loss, {"next_token_correct": correct, "next_token_predicted": predicted, "next_token_nats": loss * predicted}


@dataclasses.dataclass(frozen=True)
class MaskedTokens(OfExamples):
    """The objective of `mlm` without next sentence, with the same rows and counts as `mlm.Objective`."""

    special: SpecialIds

    batch, answers = mlm.Objective.batch, mlm.Objective.answers

    def one(self, params: Params, example: Batch) -> tuple[Array, Counts]:
        loss, correct, predicted = self._tokens(params, example)
        return loss, {"mlm_correct": correct, "mlm_predicted": predicted, "next_sentence_correct": jnp.zeros_like(loss)}


@dataclasses.dataclass(frozen=True)
class Classes(OfExamples):
    """The objective of `classification`, with the same rows and counts as `classification.Objective`."""

    batch, answers = classification.Objective.batch, classification.Objective.answers

    def one(self, params: Params, example: Batch) -> tuple[Array, Counts]:
        tokens_T, length = example["tokens"], example["length"]
        segment_T = mlm.segments(len(tokens_T), example["segment_start"], length)
        logits_K = at_least_float32(self.model.class_logits(params, tokens_T, segment_T, length))
        losses_1, correct_1 = class_losses(logits_K[None], example["label"][None])
        return losses_1[0], {"correct": correct_1[0]}


def objective_of_example(model: ExampleModel, task: Any, vocabulary_size: int, special: Marks) -> NextTokens | MaskedTokens | Classes:
    """Returns the objective of `task`. Raises `ConfigError` for a task that needs more than a model of one example gives."""
    match task:
        case CausalLanguageModel():
            return NextTokens(model, task, vocabulary_size)
        case MaskedLanguageModel():
            require(not task.next_sentence, f"model={model.name}", "has no next-sentence classifier", "Use task=mlm")
            return MaskedTokens(model, task, vocabulary_size, mlm.Special.from_ids(special))
        case Classification():
            return Classes(model, task, vocabulary_size)
    raise ConfigError(
        f"model={model.name}", f"a model of one example has no head for task={task.name}", "Use causal_lm, mlm or classification"
    )


def objective(model: AnyModel, task: Task, vocabulary_size: int, special: Marks) -> Objective:
    """Returns the objective of `task` for `model`; `special` is any object with the five ids, such as a store's manifest.

    Raises `ConfigError` if task and model do not fit.
    """
    task.parameter_shapes(model, vocabulary_size)
    if isinstance(task, PackageTask):
        return task.objective(model, vocabulary_size, special)
    match model, task:
        case ExampleModel(), _:
            return objective_of_example(model, task, vocabulary_size, special)
        case Bert(), MaskedLanguageModel():
            return mlm.objective(model, task, vocabulary_size, special)
        case Decoder() | RotaryDecoder(), CausalLanguageModel():
            return causal_lm.Objective(model, task, vocabulary_size)
        case _, Classification() | MultipleChoice():
            return classification.Objective(model, task, vocabulary_size)
        case _, Regression() | MultiLabel():
            return classification.TargetObjective(model, task, vocabulary_size)
    raise TypeError(f"{type(task).__name__} of {type(model).__name__}")
