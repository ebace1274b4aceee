"""Predicts classes of texts, a number, several labels, or the correct one of several texts, by a trained classifier.

The classifier is a run's released parameters, or a checkpoint in the layout of Hugging Face.

Shape legend: n rows, C choices of a row (an axis that exists only if one of several texts is to be chosen), B rows at once, K classes
or choices.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dpx.data.declared_data import Data
from dpx.data.length_buckets import in_batches, widths_of
from dpx.data.prepare import store_of
from dpx.data.rows import marked_examples
from dpx.data.tokenizer import TextTokenizer, of_path
from dpx.declaration import ConfigError, require
from dpx.files.orbax_checkpoints import released
from dpx.files.run_folder import read_json
from dpx.files.weights import nested
from dpx.interop.checkpoint import Checkpoint
from dpx.models.checkpoint_shape import is_multiple_choice
from dpx.models.shape import AnyModel
from dpx.privacy.declared_privacy import Privacy
from dpx.statement import received
from dpx.task.declared_targets import MultiLabel, Regression
from dpx.task.declared_task import Classification, MultipleChoice, Task, label_names
from dpx.task.objective import objective as make_objective
from dpx.task.task_protocol import Pooled

Texts = tuple[tuple[str, ...], ...]  # of a row: one text, alone or as a pair, or one for each choice
# What is predicted for a text: one of several classes, which of several labels are true, or a number.
Answers = Literal["class", "labels", "number"]
_ANSWERS: dict[type, Answers] = {Regression: "number", MultiLabel: "labels"}
_PROBLEMS: dict[str, Answers] = {"regression": "number", "multi_label_classification": "labels"}
_AT_ONCE = 4096
_BATCH = 64


@dataclasses.dataclass(frozen=True)
class Classifier:
    """A trained classifier.

    `labels` are by class; `logits` of a batch of rows [B, ...] are [B, K]. `choices` is the number of texts of a row, `None` if a row is
    one text.
    """

    labels: Sequence[str]
    choices: int | None
    tokenizer: TextTokenizer
    sequence_length: int
    logits: Callable[[dict[str, Any]], Any]
    answers: Answers = "class"
    # A number is the output times the second, and the first added.
    units: tuple[float, float] = (0.0, 1.0)

    def scores(self, texts: Iterator[Texts]) -> Iterator[np.ndarray]:
        """Yields [K] for one text after another: the probabilities of the classes, or of each label, or a number."""
        while some := list(islice(texts, _AT_ONCE)):
            rows = self._rows(some)
            longest_n = rows["length"].reshape(len(some), -1).max(axis=1)
            found = np.zeros((len(some), len(self.labels)))
            for width, own, _ in in_batches(longest_n, widths_of("auto", self.sequence_length), _BATCH):
                batch = {name: values[own] for name, values in rows.items()}
                batch |= {"record": np.arange(_BATCH, dtype=np.int32)}
                batch["tokens"] = batch["tokens"][..., :width]
                found[own] = self._answered(self.logits(batch))
            yield from found

    def _answered(self, logits_BK: Any) -> np.ndarray:
        if self.answers == "number":
            mean, scale = self.units
            return np.asarray(logits_BK) * scale + mean
        return np.asarray(jax.nn.softmax(logits_BK, axis=-1) if self.answers == "class" else jax.nn.sigmoid(logits_BK))

    def _rows(self, texts: Sequence[Texts]) -> dict[str, np.ndarray]:
        """Returns `tokens` [n, T] or [n, C, T], and `segment_start` and `length` [n] or [n, C]."""
        singles = [one for row in texts for one in row]
        encodings = iter(self.tokenizer.tokenizer.encode_batch_fast([text for one in singles for text in one], add_special_tokens=False))
        ids = [[next(encodings).ids for _ in one] for one in singles]
        marked = marked_examples(self.tokenizer, ids, self.sequence_length)
        empty = next((one for one, length in zip(singles, marked["length"], strict=True) if length == 0), None)
        require(empty is None, f"the text {(empty or [''])[0][:40]!r}", "has no token that the model reads", "Remove it")
        of_row = () if self.choices is None else (self.choices,)
        return {name: values.reshape(len(texts), *of_row, *values.shape[1:]) for name, values in marked.items()}


def of_run(model: AnyModel, task: Task, vocabulary_size: int, data: Data, privacy: Privacy, params: Path) -> Classifier:
    """Returns the classifier of a run and its released parameters `params`.

    Raises `ConfigError` if the run did not train a classifier, or if its data has another vocabulary now.
    """
    if not isinstance(task, Pooled):
        raise ConfigError(f"task={task.name}", "does not predict labels", "Name a run of task=classification or task=multiple_choice")
    store = store_of(data, privacy, params)
    objective: Any = make_objective(model, task, vocabulary_size, store.manifest)
    choices = task.choices if isinstance(task, MultipleChoice) else None
    labels = label_names(task, data.labels)
    units = (task.mean, task.scale) if isinstance(task, Regression) else (0.0, 1.0)
    length, answers = store.manifest.sequence_length, _ANSWERS.get(type(task), "class")
    return Classifier(labels, choices, store.tokenizer(), length, _logits(objective, released(params)), answers, units)


def of_checkpoint(path: str) -> Classifier:
    """Returns the classifier in a checkpoint's folder or hub id.

    Raises `ConfigError` if it is not a complete classifier, or has no tokenizer.
    """
    checkpoint = Checkpoint(path, "job.checkpoint")
    received.read(checkpoint.folder)
    named = checkpoint.config.get("id2label")
    problem = checkpoint.config.get("problem_type")
    answers = _PROBLEMS.get(problem, "class") if isinstance(problem, str) else "class"
    require(
        isinstance(named, dict) and len(named) > (answers == "class"),
        checkpoint.asked,
        "does not name its labels in its config.json",
        "Name a checkpoint of a classifier",
    )
    assert isinstance(named, dict)
    are_places = sorted(map(str, named)) == sorted(map(str, range(len(named)))) and len({str(label) for label in named.values()}) == len(
        named
    )
    require(are_places, checkpoint.asked, "does not name each class once under id2label in its config.json", "Correct it: 0, 1, ...")
    labels, model = [str(named[number]) for number in sorted(named, key=int)], checkpoint.model
    tokenizer = of_path(checkpoint.folder, model.vocabulary_size or 0)
    choices = len(labels) if is_multiple_choice(checkpoint.config) else None
    is_number = f"declares problem_type=regression and {len(labels)} outputs, and dpx predicts one number"
    require(answers != "number" or len(labels) == 1, checkpoint.asked, is_number, "Name a checkpoint with one output")
    task: Any = (
        MultipleChoice(choices=choices) if choices is not None else Classification(classes=len(labels)) if answers == "class" else None
    )
    task = task or (Regression(mean=0.0, scale=1.0) if answers == "number" else MultiLabel(labels=len(labels)))
    objective: Any = make_objective(model, task, model.vocabulary_size or 0, tokenizer.special)
    selected = checkpoint.select(objective.task.parameter_shapes(model, objective.vocabulary_size))
    require(
        not selected.made_new,
        checkpoint.asked,
        f"has no {', '.join(selected.made_new[:1])}",
        "Name a checkpoint of a classifier that includes its head",
    )
    params = jax.tree.map(jnp.asarray, nested(checkpoint.leaves(selected)))
    return Classifier(labels, choices, tokenizer, _length(checkpoint), _logits(objective, params), answers)


def _length(checkpoint: Checkpoint) -> int:
    """Returns the length in tokens to which texts are cut: that of its training where its tokenizer says so, else at most 512."""
    place = checkpoint.folder / "tokenizer_config.json"
    named = read_json(place).get("model_max_length") if place.is_file() else None
    return min(512, checkpoint.model.positions, named if isinstance(named, int) and named > 0 else 512)


def _logits(objective: Any, params: Any) -> Callable[[dict[str, Any]], Any]:
    compiled = jax.jit(objective.logits)
    return lambda rows: compiled(params, {name: jnp.asarray(values) for name, values in rows.items()})
