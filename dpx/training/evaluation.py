"""Evaluates parameters on rows that never take part in training: a run's metrics and baselines, its early end, and a classifier's answers.

The masks of held-out units come from a fixed key, so that metrics are comparable across runs; the task defines the metrics.

A run without noise may end once a held-out metric has stopped growing, and then keeps the weights of its best evaluation, as the code of
Yin and Habernal 2022 does (downstream_tasks/train.py: strictly above the best so far is a gain, and the best weights are tested). A private
run does not do this: `Experiment` refuses it.

A classifier is a run's released parameters, or a checkpoint in the layout of Hugging Face. It answers with classes of texts, a number,
several labels, or the correct one of several texts.

Shape legend: n rows, C choices of a row (an axis that exists only if one of several texts is to be chosen), B rows at once, K classes
or choices.
"""

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dpx.config.experiment import Schedule
from dpx.config.experiment_parts import Receiver
from dpx.data import length_buckets
from dpx.data.declared_data import Data
from dpx.data.length_buckets import widths_of
from dpx.data.prepare import store_of
from dpx.data.rows import marked_examples
from dpx.data.store import Store
from dpx.data.tokenizer import TextTokenizer, of_path
from dpx.data.unit_names import Split
from dpx.declaration import ConfigError, require
from dpx.files import orbax_checkpoints
from dpx.files.orbax_checkpoints import Checkpoints, State, released
from dpx.files.results import Results
from dpx.files.run_folder import read_json
from dpx.files.weights import facts_of_checkpoint, nested
from dpx.interop.checkpoint import Checkpoint
from dpx.models.checkpoint_shape import is_multiple_choice
from dpx.models.shape import AnyModel
from dpx.privacy.declared_privacy import Privacy
from dpx.processes import team
from dpx.sampler.sampler_protocol import share
from dpx.statement import received
from dpx.task.declared_targets import MultiLabel, Regression
from dpx.task.declared_task import Classification, MultipleChoice, Task, label_names
from dpx.task.losses import confusion
from dpx.task.objective import objective as make_objective
from dpx.task.task_protocol import ClassifierObjective, Pooled, TargetObjective
from dpx.training.sharding import EXAMPLE_AXES

BATCH_ROWS = 64
_MASK_KEY = (2024, 2029)  # Any constant: evaluation masks must not change from run to run.
# In the totals of held-out rows: each row's outputs, targets and which of them it has, [n, 3, M].
_VALUES = "values"
_SPREAD = 2029  # Any constant: the evaluated rows must not change from run to run.


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Held-out rows in batches of one fixed shape, with the jitted sums over one batch. Each of several processes has its part of each."""

    batches: list[tuple[dict[str, np.ndarray], np.ndarray]]
    sums: Callable[..., dict[str, Any]]
    baselines: dict[str, float]
    rows: int
    metrics: Callable[[dict[str, Any]], dict[str, float]]

    def __call__(self, params: Any) -> dict[str, float]:
        """Returns the task's metrics of all held-out rows."""
        totals, values = dict[str, Any](), list[np.ndarray]()
        for rows, is_padding_B in self.batches:
            team().note_progress()
            for name, value in jax.device_get(self.sums(params, rows, is_padding_B)).items():
                if name == _VALUES:
                    values.append(np.asarray(value, np.float64))
                    continue
                totals[name] = totals.get(name, 0.0) + (np.asarray(value, np.float64) if np.ndim(value) else float(value))
        return self.metrics(totals | ({_VALUES: np.concatenate(values)} if values else {}))


def evaluations_of(
    objective: Any, store: Store, rows: int, widths: Sequence[int], mesh: Mesh
) -> tuple[HeldOut, Callable[[], HeldOut] | None]:
    """Returns the metrics on `rows` held-out rows, and what reads the test set and returns those on it, if the data has one."""

    def of_split(rows: int | None, split: Split) -> HeldOut:
        return held_out(objective, store, rows, BATCH_ROWS, widths, split, mesh)

    return of_split(rows, "heldout"), partial(of_split, None, "test") if "test" in store.manifest.splits else None


def held_out(
    objective: Any,
    store: Store,
    rows_wanted: int | None,
    batch_rows: int,
    widths: Sequence[int],
    split: Split = "heldout",
    mesh: Mesh | None = None,
) -> HeldOut:
    """Cuts `rows_wanted` rows of a split into batches of `batch_rows`, padded to one of `widths`.

    It takes all rows if the split has fewer, or for `None`. The rows are spread over the whole split and are the same in every run: files
    are often sorted by label, so the first rows would be of one class. Several processes need their `mesh`: each evaluates the rows of its
    devices, and one sum over all devices follows each batch.
    """
    there = store.manifest.rows[split]
    count = there if rows_wanted is None else min(rows_wanted, there)
    key, task = jnp.asarray(_MASK_KEY, jnp.uint32), objective.task

    def sums(params: Any, rows: dict[str, Any], is_padding_B: Any) -> dict[str, Any]:
        batch = objective.batch(key, rows)
        losses_B, counts = objective.losses(params, batch)
        total = lambda values_B: jnp.sum(jnp.where(is_padding_B, 0.0, values_B))  # noqa: E731
        totals = {"loss": total(losses_B), "examples": total(jnp.ones_like(losses_B)), **{name: total(v) for name, v in counts.items()}}
        if isinstance(objective, TargetObjective):
            target_BM, has_BM = objective.answers(batch)
            has_BM = has_BM & ~is_padding_B[:, None]
            totals[_VALUES] = jnp.stack([objective.outputs(params, batch), target_BM, has_BM.astype(target_BM.dtype)], axis=1)
        elif isinstance(objective, ClassifierObjective):
            # The same logits again: the compiler computes them once.
            logits_BK = objective.logits(params, batch)
            totals["confusion"] = confusion(jnp.argmax(logits_BK, axis=-1), batch["label"], is_padding_B, logits_BK.shape[-1])
        return totals

    together: dict[str, Any] = {}
    placed: Callable[[Any], Any] = np.asarray
    if mesh is not None and not team().is_alone:
        devices = mesh.shape["data"] * mesh.shape["fsdp"]
        batch_rows = -(-batch_rows // devices) * devices
        over_rows, together = NamedSharding(mesh, P(EXAMPLE_AXES)), {"out_shardings": NamedSharding(mesh, P())}
        placed = partial(jax.make_array_from_process_local_data, over_rows)
    batches, counted, targets = [], np.zeros(1, np.int64), list[np.ndarray]()
    answers = jax.jit(lambda rows: objective.answers(objective.batch(key, rows)))
    for rows, is_padding_B in in_batches(store, split, count, batch_rows, widths):
        if isinstance(objective, TargetObjective):
            answer_BM, has_BM = jax.device_get(answers(rows))
            is_asked_BM = has_BM & ~is_padding_B[:, None]
            targets.append(np.where(is_asked_BM, answer_BM, np.nan)[is_asked_BM.any(1)])
        elif team().is_owner:
            answer_BM, is_asked_BM = jax.device_get(answers(rows))
            grown = np.bincount(answer_BM[is_asked_BM & ~is_padding_B[:, None]], minlength=len(counted))
            grown[: len(counted)] += counted
            counted = grown
        batches.append(jax.tree.map(lambda values: share(values, team().part), (rows, is_padding_B)))
    # Rows without any target are not judged.
    given: Any = np.concatenate(targets) if targets else counted
    count = len(given) if targets else count
    # Only process 0 reports them.
    baselines = task.baselines(given, store.manifest.most_frequent_public_token_id) if team().is_owner else {}
    of_batch = jax.jit(sums, **together)
    return HeldOut(batches, lambda params, *batch: of_batch(params, *jax.tree.map(placed, batch)), baselines, count, task.metrics)


def in_batches(
    store: Store, split: Split, count: int, batch_rows: int, widths: Sequence[int]
) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Yields `count` rows of a split (`spread`) in batches; the last batch of a width is filled up with its last row, as padding."""
    record_n = spread(store.manifest.rows[split], count)
    longest_n = store.lengths(split, record_n, 1)
    for width, places, is_padding_B in length_buckets.in_batches(longest_n, widths, batch_rows):
        yield store.rows(split, record_n[places], width), is_padding_B


def spread(there: int, count: int) -> np.ndarray:
    """Returns the numbers of `count` of `there` rows, ascending: one row from each of `count` equal parts.

    The position within a part is pseudorandom, so that no pattern in the file can coincide with it. If `count` equals the number of rows,
    it returns all.
    """
    if count == there:
        return np.arange(count)
    start_n = np.arange(count + 1, dtype=np.int64) * there // max(count, 1)
    return start_n[:-1] + (np.random.RandomState(_SPREAD).random_sample(count) * np.diff(start_n)).astype(np.int64)


def of_released(run: Receiver, steps: int, params: Path, rows: int, widths: Sequence[int], split: Split = "heldout") -> Results:
    """Returns metrics of the parameters in `release/params` of a run of `steps` steps on `rows` of a split, with the task's baselines."""
    store = store_of(run.data, run.privacy, params)
    objective = make_objective(run.model, run.task, run.vocabulary_size, store.manifest)
    evaluate = held_out(objective, store, rows, BATCH_ROWS, widths, split)
    metrics = evaluate(orbax_checkpoints.released(params))
    return Results(steps=steps, metric=run.task.metric, heldout=metrics, baselines=evaluate.baselines, rows=evaluate.rows)


# Under private/: checkpoints of the best evaluations.
FOLDER = "best"
_HELDOUT = "heldout"


class Ended(Exception):
    """Says that the run ended early, after `done` steps, with `state`."""

    def __init__(self, done: int, state: State):
        super().__init__(done)
        self.done, self.state = done, state


@dataclasses.dataclass(frozen=True)
class Best:
    """The best evaluation so far: steps done, and the metrics."""

    steps_done: int
    metrics: dict[str, float]


class EarlyStopping:
    """Counts evaluations without gain in `metric`; the states of the best ones are in `kept`.

    A run that is resumed after `first_step` steps reads there how good it was and when. States of later steps are removed: these steps are
    run again.
    """

    def __init__(self, schedule: Schedule, metric: str, kept: Checkpoints, first_step: int):
        assert schedule.stop_after_evaluations_without_gain is not None
        self.allowed, self.metric = schedule.stop_after_evaluations_without_gain, metric
        self._every, self._kept, self._first = schedule.evaluate_every, kept, first_step
        self.best: Best | None = None
        for steps_done in kept.steps:
            facts = facts_of_checkpoint(kept.directory / str(steps_done))
            if steps_done > first_step or facts is None:
                shutil.rmtree(kept.directory / str(steps_done))
            else:
                self.best = Best(steps_done, facts[_HELDOUT])

    def note(self, done: int, metrics: dict[str, float], state: State) -> None:
        """Keeps the state after `done` steps if its metrics are the best so far."""
        value, best = metrics[self.metric], self.best
        if not math.isnan(value) and (best is None or value > best.metrics[self.metric]):
            self.best = Best(done, metrics)
            self._kept.save(done, state, {_HELDOUT: metrics})
            # A checkpoint of the run that is newer than the one here would be resumed without it.
            self._kept.wait()

    def is_over(self, done: int) -> bool:
        """Returns whether the run ends after `done` steps, because its last evaluations brought no gain."""
        since = self._first if self.best is None else self.best.steps_done
        return (done - since) // self._every >= self.allowed

    def state(self, done: int, last: State, like: State) -> State:
        """Returns the state of the best evaluation, laid out as `like`; `last`, that after `done` steps, if it is the best or none is."""
        if self.best is None or self.best.steps_done == done:
            return last
        return self._kept.load(self.best.steps_done, like).state


@contextlib.contextmanager
def early_stopping(schedule: Schedule, metric: str, private: Path, first_step: int) -> Iterator[EarlyStopping | None]:
    """Yields what ends a run early, with the states that it kept in `private`; `None` for a run that takes all its steps."""
    if schedule.stop_after_evaluations_without_gain is None:
        yield None
        return
    with contextlib.closing(Checkpoints(private / FOLDER, schedule.checkpoints_kept)) as kept:
        yield EarlyStopping(schedule, metric, kept, first_step)


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
            for width, own, _ in length_buckets.in_batches(longest_n, widths_of("auto", self.sequence_length), _BATCH):
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
