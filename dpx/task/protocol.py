"""The interface of a task from another package, and the objective by which every task is run.

Shape legend: B examples, M answers of an example.
"""

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dpx.data.schema import Schema, require_gives, texts


@runtime_checkable
class Objective(Protocol):
    """A task for a model, as pure functions of their arguments. It also has `model`, `task` and `vocabulary_size`.

    `init(key)` returns new parameters, a nested dict of float32 arrays. `batch(key, rows)` makes a batch from the rows of a store: arrays
    [B, ...], including `record`. `losses(params, batch, dropout_key)` returns (losses_B, counts): the losses, float [B], and the task's
    `counts`, float [B] each; an example's loss depends on its own row alone, and not on how far a row was padded. `answers(batch)` returns
    the correct answers, int [B, M], and a mask of the places that have an answer, bool [B, M].
    """

    def init(self, key: Any) -> Any: ...
    def batch(self, key: Any, rows: Any) -> Any: ...
    def losses(self, params: Any, batch: Any, dropout_key: Any = None) -> Any: ...
    def answers(self, batch: Any) -> Any: ...


@runtime_checkable
class ClassifierObjective(Objective, Protocol):
    """`logits(params, batch)` returns one value per class, [B, K]: if it is defined, held-out predictions are counted for each class, for
    metrics such as F1."""

    def logits(self, params: Any, batch: Any, dropout_key: Any = None) -> Any: ...


@runtime_checkable
class TwoPartObjective(Objective, Protocol):
    """`features(params, batch)` returns the head's input for each row, [B, ...], computed by only the parameters below the head and without
    dropout; `has_constant_features` is true if training applies no dropout to it either. Rows that hold `features` in place of text are
    made into a batch, and have losses, like all other rows."""

    @property
    def has_constant_features(self) -> bool: ...
    def features(self, params: Any, batch: Any) -> Any: ...


def require_columns(task: Any, data: Any) -> None:
    """Raises `ConfigError` if the rows of `data` lack a column that `task` reads, or hold it in another form."""
    if data.columns is not None:
        require_gives(data.columns, task.columns(data.sequence_length, data.vocabulary.size), data.name, task.name)


class OneText:
    """The common part of tasks that read a text of one segment and decode over the vocabulary."""

    @property
    def pooled_outputs(self) -> int:
        """How many values a classifier returns; 0 for a head over the vocabulary."""
        return 0

    def columns(self, sequence_length: int, vocabulary_size: int) -> Schema:
        """The columns of a row that the task reads."""
        of_text = texts(sequence_length, vocabulary_size)
        return {name: of_text[name] for name in ("tokens", "length")}


class PackageTask(OneText):
    """A task from another package: it makes its own objective, for the models that `require_fits` accepts."""

    if TYPE_CHECKING:

        @property
        def name(self) -> str: ...
        @property
        def metric(self) -> str:
            """The headline among `metrics`: an accuracy."""
            ...

        @property
        def counts(self) -> tuple[str, ...]:
            """The names of the counts that `losses` returns for every example."""
            ...

        @property
        def accuracy_counts(self) -> tuple[str, str | None]:
            """The two counts whose quotient is `metric`; if the second is `None`, the divisor is one per example."""
            ...

    def baselines(self, answers: Any, frequent_token: int | None) -> dict[str, float]:
        """Accuracies, by name, of answers without a model. `answers`, int [values], counts how often each value was correct among held-out
        rows; `frequent_token` is the most frequent token of the public split."""
        return {}

    def masked_positions(self, sequence_length: int) -> int:
        """Positions of a row that are decoded over the vocabulary."""
        return sequence_length

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """The reported metrics, from sums over examples of `loss`, of `examples` and of every count."""
        raise NotImplementedError

    def parameter_shapes(self, model: Any, vocabulary_size: int) -> dict[str, tuple[int, ...]]:
        """Every parameter's path and shape for `model`."""
        return model.parameter_shapes(vocabulary_size, outputs=self.pooled_outputs)

    def require_fits(self, model: Any, data: Any) -> None:
        """Raises `ConfigError` if the task does not fit the model or the rows."""
        require_columns(self, data)

    def objective(self, model: Any, vocabulary_size: int, special: Any) -> Objective:
        """The task for `model`; `special` has the ids `pad_id`, `unk_id`, `cls_id`, `sep_id` and `mask_id`."""
        raise NotImplementedError
