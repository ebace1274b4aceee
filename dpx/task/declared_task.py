"""Declares the tasks: masked words (with or without next sentence), next words, or the class of a text. `declared_targets.py` has two more,
for a number and for several labels.

Every task names the columns of a row that it reads (`columns`), its counts in a step (`counts`), the metrics that follow from the sums
of those counts, and its headline metric (`metric`): an accuracy, the quotient of `accuracy_counts` (second None: divided by one).
`masked_positions` is the number of positions decoded over the vocabulary, `pooled_outputs` the number of a classifier's values.
`baselines` are the accuracies of one constant answer, which a model has to exceed; they follow from how often each answer is correct
(`answers`, by id or class).

F1 and Matthews' correlation of a classifier follow from its confusion matrix, as scikit-learn defines them. Starts no jax.

K: classes; rows are the true classes, columns the answers.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float

from dpx.data.declared_data import Data
from dpx.data.schema import Schema, classes, running_text, texts
from dpx.declaration import ConfigError, declaration, require
from dpx.models.model_protocol import Shapes
from dpx.models.shape import AnyModel, Bert, Decoder
from dpx.task.declared_targets import MultiLabel, Regression
from dpx.task.task_protocol import PackageTask, Pooled, TextTask, require_columns


def of_confusion(confusion_KK: Float[np.ndarray, "K K"]) -> dict[str, float]:
    """Returns the metrics `macro_f1`, `micro_f1` and `matthews`.

    `macro_f1` is the mean over classes that occur, as truth or as answer; `micro_f1`, for one label a row, is accuracy.
    """
    right_K, true_K, answered_K = np.diag(confusion_KK), confusion_KK.sum(axis=1), confusion_KK.sum(axis=0)
    occurs_K = true_K + answered_K > 0
    f1_K = 2 * right_K[occurs_K] / (true_K + answered_K)[occurs_K]
    count = float(confusion_KK.sum())
    spread = (count**2 - float(true_K @ true_K)) * (count**2 - float(answered_K @ answered_K))
    return {
        "macro_f1": float(f1_K.mean()) if len(f1_K) else 0.0,
        "micro_f1": float(right_K.sum()) / max(count, 1.0),
        # Gorodkin's coefficient for any number of classes; 0 if truth or answers are all one class.
        "matthews": (float(right_K.sum()) * count - float(true_K @ answered_K)) / math.sqrt(spread) if spread > 0 else 0.0,
    }


class _OverVocabulary(TextTask):
    """The common part of tasks that decode over the vocabulary."""

    def baselines(self, answers: np.ndarray, frequent_token: int | None) -> dict[str, float]:
        """Returns the accuracy of always answering the most frequent token of the public split.

        It is 0 without that split, since no token is then known to be frequent.
        """
        return {"most_frequent_token": 0.0 if frequent_token is None else _share(answers, frequent_token)}


@declaration
class MaskedLanguageModel(_OverVocabulary):
    """BERT's pre-training: mean cross-entropy over an example's masked positions (plus next-sentence cross-entropy, weight 1).

    Attributes:
        next_sentence: Whether it also predicts if the second segment follows the first.
        max_masked_positions: Most positions of a row that are predicted.
        masking_rate: Share of the real tokens that are predicted.
        masking: bert replaces them by 80 % [MASK], 10 % random, 10 % unchanged (Devlin et al. 2019); always_mask by [MASK] alone.
    """

    metric: ClassVar[str] = "mlm_accuracy"
    counts: ClassVar[tuple[str, ...]] = ("mlm_correct", "mlm_predicted", "next_sentence_correct")
    accuracy_counts: ClassVar[tuple[str, str | None]] = ("mlm_correct", "mlm_predicted")

    next_sentence: bool
    max_masked_positions: int = 20
    masking_rate: float = 0.15
    masking: Literal["bert", "always_mask"] = "bert"
    name: Literal["mlm"] = "mlm"

    def __post_init__(self) -> None:
        require(
            self.max_masked_positions > 0,
            f"task.max_masked_positions={self.max_masked_positions}",
            "at least one position must be masked",
            "Give a positive number",
        )
        require(
            0 < self.masking_rate < 1,
            f"task.masking_rate={self.masking_rate}",
            "is not a rate between 0 and 1",
            "Use a value between 0 and 1",
        )

    @property
    def pooled_outputs(self) -> int:
        return 2 if self.next_sentence else 0

    def columns(self, sequence_length: int, vocabulary_size: int) -> Schema:
        """Returns the columns of a row that the task reads."""
        return running_text(sequence_length, vocabulary_size, self.next_sentence)

    def masked_positions(self, sequence_length: int) -> int:
        """Returns the largest number of masked positions that a row of that length can have; it sets the size of arrays."""
        return min(self.max_masked_positions, max(1, math.ceil(self.masking_rate * sequence_length)))

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns loss per example, accuracy per masked position and, with that head, accuracy per next-sentence pair."""
        metrics = _loss(totals) | {"mlm_accuracy": totals["mlm_correct"] / max(totals["mlm_predicted"], 1.0)}
        if self.next_sentence:
            metrics["next_sentence_accuracy"] = totals["next_sentence_correct"] / max(totals["examples"], 1.0)
        return metrics

    def parameter_shapes(self, model: AnyModel, vocabulary_size: int) -> Shapes:
        """Returns the model's parameter shapes. Raises `ConfigError` for a model in which no token sees the tokens after it."""
        if isinstance(model, Decoder) or model.causal:
            raise _refused(model, "a causal decoder cannot read words after the masked word", "task=causal_lm, or a BERT")
        return model.parameter_shapes(vocabulary_size, next_sentence=self.next_sentence)

    def require_fits(self, model: AnyModel, data: Data) -> None:
        """Raises `ConfigError` if the model or the rows do not suit this task."""
        self.parameter_shapes(model, 1)
        if self.next_sentence:
            fix = "Use task=mlm, or data.pairs=same_document"
            require(data.pairs != "none", "data.pairs=none", "the next-sentence task needs pairs", fix)
            segments = getattr(model, "segments", 0)
            reason = f"model {model.name} has only one segment, so it cannot distinguish the two texts of a pair"
            require(segments == 2, f"model.segments={segments}", reason, "Use task=mlm")
        require_columns(self, data)
        reason = "words are masked in the whole row, whoever wrote them"
        fix = "Use task=causal_lm, or data.source.loss_on=all"
        require("is_learnt" not in (data.columns or {}), "data.source.loss_on=assistant with task=mlm", reason, fix)


@declaration
class CausalLanguageModel(_OverVocabulary):
    """Causal language modelling: every next token is predicted from the tokens before it.

    The loss is the mean cross-entropy over an example's real next tokens; of a prompt and its completion, over those of the completion.
    """

    metric: ClassVar[str] = "next_token_accuracy"
    counts: ClassVar[tuple[str, ...]] = ("next_token_correct", "next_token_predicted", "next_token_nats")
    accuracy_counts: ClassVar[tuple[str, str | None]] = ("next_token_correct", "next_token_predicted")

    name: Literal["causal_lm"] = "causal_lm"

    def masked_positions(self, sequence_length: int) -> int:
        """Returns the number of decoded positions, which is every position; the last one's label is never real."""
        return sequence_length

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns loss per example, and accuracy and perplexity per token."""
        predicted = max(totals["next_token_predicted"], 1.0)
        accuracy = {"next_token_accuracy": totals["next_token_correct"] / predicted}
        # A perplexity beyond float's range says no more than the loss.
        return _loss(totals) | accuracy | {"perplexity": math.exp(min(totals["next_token_nats"] / predicted, 700.0))}

    def parameter_shapes(self, model: AnyModel, vocabulary_size: int) -> Shapes:
        """Returns the model's parameter shapes. Raises `ConfigError` for a model that sees the next token."""
        if isinstance(model, Bert) or not model.causal:
            raise _refused(model, "an encoder can read the token that it should predict", "task=mlm, or model=decoder_tiny")
        return model.parameter_shapes(vocabulary_size)

    def require_fits(self, model: AnyModel, data: Data) -> None:
        """Raises `ConfigError` if the model or the rows do not suit this task."""
        self.parameter_shapes(model, 1)
        reason = "two segments side by side are not running text"
        require(data.pairs == "none", f"data.pairs={data.pairs} with task=causal_lm", reason, "Use data.pairs=none")
        require_columns(self, data)


class _OneClass(Pooled):
    """The common part of all tasks whose rows have one class."""

    metric: ClassVar[str] = "accuracy"
    counts: ClassVar[tuple[str, ...]] = ("correct",)
    accuracy_counts: ClassVar[tuple[str, str | None]] = ("correct", None)

    def metrics(self, totals: dict[str, Any]) -> dict[str, float]:
        """Returns loss and accuracy per example; if answers were counted too (`confusion`), also F1 and Matthews' correlation."""
        metrics = _loss(totals) | {"accuracy": totals["correct"] / max(totals["examples"], 1.0)}
        return metrics | (of_confusion(np.asarray(totals["confusion"], np.float64)) if "confusion" in totals else {})


@declaration
class Classification(_OneClass):
    """Classification of texts: mean cross-entropy of a text's class; the text may be a pair of segments.

    Attributes:
        classes: Number of classes.
    """

    classes: int
    name: Literal["classification"] = "classification"

    def __post_init__(self) -> None:
        require(self.classes >= 2, f"task.classes={self.classes}", "a classifier needs at least two classes", "Use 2 or more")

    @property
    def pooled_outputs(self) -> int:
        return self.classes

    def columns(self, sequence_length: int, vocabulary_size: int) -> Schema:
        """Returns the columns of a row that the task reads."""
        return texts(sequence_length, vocabulary_size) | {"label": classes(self.classes)}

    def baselines(self, answers: np.ndarray, frequent_token: int | None) -> dict[str, float]:
        """Returns the accuracy of always answering the most frequent class of the evaluated rows: no other constant answer is better."""
        return {"most_frequent_class": _share(answers, int(np.argmax(answers[: self.classes])))}


@declaration
class MultipleChoice(_OneClass):
    """Multiple choice: cross-entropy of the correct one of several texts, each scored separately; all texts of a row are one example.

    Attributes:
        choices: Number of texts of a row.
    """

    choices: int
    name: Literal["multiple_choice"] = "multiple_choice"

    def __post_init__(self) -> None:
        require(self.choices >= 2, f"task.choices={self.choices}", "a choice needs at least two options", "Use 2 or more")

    @property
    def pooled_outputs(self) -> int:
        return 1

    def columns(self, sequence_length: int, vocabulary_size: int) -> Schema:
        """Returns the columns of a row that the task reads."""
        return texts(sequence_length, vocabulary_size, self.choices) | {"label": classes(self.choices)}

    def baselines(self, answers: np.ndarray, frequent_token: int | None) -> dict[str, float]:
        """Returns the accuracy of always answering the position that is correct most often among the evaluated rows."""
        return {"most_frequent_choice": _share(answers, int(np.argmax(answers[: self.choices])))}


def label_names(task: Pooled, declared: Sequence[str]) -> list[str]:
    """Returns the labels by number: as `declared` by the data, or the numbers themselves if the data declares no labels."""
    count = task.choices if isinstance(task, MultipleChoice) else task.pooled_outputs
    return list(declared) or [str(number) for number in range(count)]


Task = MaskedLanguageModel | CausalLanguageModel | Classification | MultipleChoice | Regression | MultiLabel | PackageTask


def _share(answers: np.ndarray, answer: int) -> float:
    return float(answers[answer : answer + 1].sum()) / max(float(answers.sum()), 1.0)


def _loss(totals: dict[str, Any]) -> dict[str, float]:
    return {"loss": totals["loss"] / max(totals["examples"], 1.0)}


def _refused(model: AnyModel, reason: str, fix: str) -> ConfigError:
    return ConfigError(f"model={model.name}", reason, f"Use {fix}")
