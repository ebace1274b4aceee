"""Defines the interface of a task from another package, and the objective by which every task is run.

Shape legend: B examples, M answers of an example.
"""

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dpx.data.schema import Schema, require_gives, texts


@runtime_checkable
class Objective(Protocol):
    """The objective of a task for one model, as pure functions. It also has the attributes `model`, `task` and `vocabulary_size`."""

    def init(self, key: Any) -> Any:
        """Returns new parameters, a nested dict of float32 arrays; `key` is a random key, uint32 [2]."""
        ...

    def batch(self, key: Any, rows: Any) -> Any:
        """Makes a batch from rows of a store: arrays [B, ...], including `record`. `key` decides what is random in it, such as masks."""
        ...

    def losses(self, params: Any, batch: Any, dropout_key: Any = None) -> Any:
        """Returns (losses_B, counts): the losses, float [B], and the task's `counts`, a dict of float [B].

        The loss of an example depends on its own row alone, and not on how far the row was padded.
        """
        ...

    def answers(self, batch: Any) -> Any:
        """Returns the correct answers, int [B, M], and which places have an answer, bool [B, M]."""
        ...


@runtime_checkable
class ClassifierObjective(Objective, Protocol):
    """An objective that also defines `logits(params, batch)`: one value for each class, [B, K].

    Held-out predictions are then counted for each class, for metrics such as F1.
    """

    def logits(self, params: Any, batch: Any, dropout_key: Any = None) -> Any: ...


@runtime_checkable
class TargetObjective(Objective, Protocol):
    """An objective whose targets are no single class: numbers, or several labels of a row. Its `answers` are float [B, M].

    `outputs(params, batch)` returns what is compared with the targets, float [B, M]. Held-out outputs are kept for each row, for metrics
    such as a rank correlation.
    """

    def outputs(self, params: Any, batch: Any) -> Any: ...


@runtime_checkable
class TwoPartObjective(Objective, Protocol):
    """An objective whose model is a head on features.

    `features(params, batch)` returns the head's input for each row, [B, ...], computed by only the parameters below the head and without
    dropout; `has_constant_features` is true if training applies no dropout to it either. Rows that hold `features` in place of text are
    made into a batch, and have losses, like all other rows.
    """

    @property
    def has_constant_features(self) -> bool: ...
    def features(self, params: Any, batch: Any) -> Any: ...


def require_columns(task: Any, data: Any) -> None:
    """Raises `ConfigError` if the rows of `data` lack a column that `task` reads, or hold it in another form."""
    if data.columns is not None:
        require_gives(data.columns, task.columns(data.sequence_length, data.vocabulary.size), data.name, task.name)


class TextTask:
    """The common part of tasks; by default one reads a text of one segment and decodes over the vocabulary."""

    @property
    def pooled_outputs(self) -> int:
        """Returns the number of values that a classifier returns; 0 for a head over the vocabulary."""
        return 0

    def columns(self, sequence_length: int, vocabulary_size: int) -> Schema:
        """Returns the columns of a row that the task reads."""
        of_text = texts(sequence_length, vocabulary_size)
        return {name: of_text[name] for name in ("tokens", "length")}

    def parameter_shapes(self, model: Any, vocabulary_size: int) -> dict[str, tuple[int, ...]]:
        """Returns the path and shape of every parameter of `model` for this task."""
        return model.parameter_shapes(vocabulary_size, outputs=self.pooled_outputs)

    def require_fits(self, model: Any, data: Any) -> None:
        """Raises `ConfigError` if the task does not fit the model or the rows."""
        require_columns(self, data)


class Pooled(TextTask):
    """The common part of tasks that read the values of a classifier, and decode nothing over the vocabulary."""

    if TYPE_CHECKING:

        @property
        def name(self) -> str: ...

    def masked_positions(self, sequence_length: int) -> int:
        return 0


class PackageTask(TextTask):
    """The base class of tasks of packages, which make an objective for the models that `require_fits` accepts.

    A task must define `metric`, `counts`, `accuracy_counts`, `metrics` and `objective`.
    """

    if TYPE_CHECKING:

        @property
        def name(self) -> str: ...
        @property
        def metric(self) -> str:
            """Returns the name of the headline among `metrics`, an accuracy."""
            ...

        @property
        def counts(self) -> tuple[str, ...]:
            """Returns the names of the counts that `losses` returns for every example."""
            ...

        @property
        def accuracy_counts(self) -> tuple[str, str | None]:
            """Returns the two counts whose quotient is `metric`; if the second is `None`, the divisor is one for each example."""
            ...

    def baselines(self, answers: Any, frequent_token: int | None) -> dict[str, float]:
        """Returns, by name, the accuracies of answers that need no model and that a model should exceed.

        Args:
            answers: int [values]; how often each value was the correct answer among the held-out rows.
            frequent_token: The id of the most frequent token of the public split, if known.
        """
        return {}

    def masked_positions(self, sequence_length: int) -> int:
        """Returns how many positions of a row are decoded over the vocabulary."""
        return sequence_length

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the reported metrics, by name.

        Args:
            totals: Sums over all examples of `loss`, of every count, and of `examples` (their number).
        """
        raise NotImplementedError

    def objective(self, model: Any, vocabulary_size: int, special: Any) -> Objective:
        """Returns the objective of the task for `model`.

        Args:
            model: The declared model.
            vocabulary_size: V.
            special: The ids of special tokens, as attributes: `pad_id`, `unk_id`, `cls_id`, `sep_id` and `mask_id`.
        """
        raise NotImplementedError
