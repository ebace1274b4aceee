"""What a task that a package brings answers, and what every task is run by.

Shape legend: B examples, M answers of an example.
"""

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dpx.data.schema import Schema, require_gives, texts


@runtime_checkable
class Objective(Protocol):
    """A task for a model, running: pure functions of their arguments. It has `model`, `task` and `vocabulary_size` too.

    `init(key)` gives fresh parameters, a nested dict of float32 arrays. `batch(key, rows)` makes a batch of rows as a store gives them:
    arrays [B, ...], `record` among them. `losses(params, batch, dropout_key)` gives (losses_B, counts): one float and the task's `counts`,
    float [B] each; an example's loss depends on its own row alone, and not on how far a row was padded. `answers(batch)` gives what has to
    be found, int [B, M], and where there is something to find, bool [B, M].
    """

    def init(self, key: Any) -> Any: ...
    def batch(self, key: Any, rows: Any) -> Any: ...
    def losses(self, params: Any, batch: Any, dropout_key: Any = None) -> Any: ...
    def answers(self, batch: Any) -> Any: ...


@runtime_checkable
class ClassifierObjective(Objective, Protocol):
    """`logits(params, batch)` gives one value a class [B, K]: where it is there, held-out predictions are counted class by class, for
    measures such as F1."""

    def logits(self, params: Any, batch: Any, dropout_key: Any = None) -> Any: ...


@runtime_checkable
class TwoPartObjective(Objective, Protocol):
    """`features(params, batch)` gives what the head reads of each row, [B, ...], by parameters below the head alone and without dropout;
    `has_constant_features` where training drops nothing of it either. Rows that hold `features` in place of text are made into a batch, and
    have losses, like any others."""

    @property
    def has_constant_features(self) -> bool: ...
    def features(self, params: Any, batch: Any) -> Any: ...


def require_columns(task: Any, data: Any) -> None:
    """Raises `ConfigError` where the rows of `data` lack a column that `task` reads, or hold it in another form."""
    if data.columns is not None:
        require_gives(data.columns, task.columns(data.sequence_length, data.vocabulary.size), data.name, task.name)


class OneText:
    """What tasks share that read a text of one segment and decode over the vocabulary."""

    @property
    def pooled_outputs(self) -> int:
        """How many values a classifier gives; 0 for a head over the vocabulary."""
        return 0

    def columns(self, sequence_length: int, vocabulary_size: int) -> Schema:
        """What is read of a row."""
        of_text = texts(sequence_length, vocabulary_size)
        return {name: of_text[name] for name in ("tokens", "length")}


class PackageTask(OneText):
    """A task from outside: it makes its own objective, for the models that `require_fits` lets through."""

    if TYPE_CHECKING:

        @property
        def name(self) -> str: ...
        @property
        def metric(self) -> str:
            """The headline among `metrics`: an accuracy."""
            ...

        @property
        def counts(self) -> tuple[str, ...]:
            """What `losses` counts for every example, by name."""
            ...

        @property
        def accuracy_counts(self) -> tuple[str, str | None]:
            """The two counts whose quotient is `metric`; the second `None`: of one."""
            ...

    def baselines(self, answers: Any, frequent_token: int | None) -> dict[str, float]:
        """Accuracies, by name, of answering without a model. `answers` int [values] counts how often each value was right among held-out
        rows; `frequent_token` is the public split's most frequent one."""
        return {}

    def masked_positions(self, sequence_length: int) -> int:
        """Positions of a row that are decoded over the vocabulary."""
        return sequence_length

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """What is reported, from sums over examples: of `loss`, of `examples` and of every count."""
        raise NotImplementedError

    def parameter_shapes(self, model: Any, vocabulary_size: int) -> dict[str, tuple[int, ...]]:
        """Every parameter's path and shape for `model`."""
        return model.parameter_shapes(vocabulary_size, outputs=self.pooled_outputs)

    def require_fits(self, model: Any, data: Any) -> None:
        """Raises `ConfigError` where the model or the rows cannot be learnt from in this way."""
        require_columns(self, data)

    def objective(self, model: Any, vocabulary_size: int, special: Any) -> Objective:
        """The task for `model`; `special` has the ids `pad_id`, `unk_id`, `cls_id`, `sep_id` and `mask_id`."""
        raise NotImplementedError
