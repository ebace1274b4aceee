"""Classes of texts by a trained classifier: a run's released parameters, or a checkpoint in the layout of Hugging Face.

Shape legend: B texts at once, K classes.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpx.data.length_buckets import by_width, widths_of
from dpx.data.prepare import prepare
from dpx.data.rows import marked_examples
from dpx.data.store import VOCABULARY
from dpx.data.tokenizer import DEFINITION, TextTokenizer, of_path
from dpx.data.vocabulary import SpecialIds
from dpx.declaration import ConfigError, require
from dpx.experiment import Experiment
from dpx.init.weights import nested
from dpx.interop.checkpoint import Checkpoint
from dpx.task.declarations import Classification
from dpx.task.objective import objective as make_objective
from dpx.training.checkpoint import released

Texts = tuple[str, ...]  # one, or a pair
_AT_ONCE = 4096
_BATCH = 64


@dataclasses.dataclass(frozen=True)
class Classifier:
    """`labels` by class; `logits` of a batch of rows [B, ...] are [B, K]."""

    labels: Sequence[str]
    tokenizer: TextTokenizer
    sequence_length: int
    logits: Callable[[dict[str, Any]], Any]

    def scores(self, texts: Iterator[Texts]) -> Iterator[np.ndarray]:
        """The probability of each class [K], text by text."""
        while some := list(islice(texts, _AT_ONCE)):
            yield from self._of_some(some)

    def _of_some(self, texts: Sequence[Texts]) -> np.ndarray:
        encodings = iter(self.tokenizer.tokenizer.encode_batch_fast([one for text in texts for one in text], add_special_tokens=False))
        ids = [[next(encodings).ids for _ in text] for text in texts]
        rows = marked_examples(self.tokenizer, [(one[0], one[1] if len(one) > 1 else []) for one in ids], self.sequence_length)
        found = np.zeros((len(texts), len(self.labels)))
        for width, places in by_width(rows["length"], widths_of("auto", self.sequence_length)):
            for start in range(0, len(places), _BATCH):
                # The last batch is filled up with its last row, so that every width has one compiled program.
                own = places[np.minimum(np.arange(start, start + _BATCH), len(places) - 1)]
                batch = {"tokens": rows["tokens"][own, :width], "segment_start": rows["segment_start"][own], "length": rows["length"][own]}
                batch |= {"label": np.zeros(_BATCH, np.int32), "record": np.arange(_BATCH, dtype=np.int32)}
                scores_BK = np.asarray(jax.nn.softmax(self.logits(batch), axis=-1))
                found[own] = scores_BK
        return found


def of_run(experiment: Experiment, params: Path) -> Classifier:
    """Raises `ConfigError` for a run that is no classifier."""
    task = _classification(experiment.task)
    store = prepare(experiment.data, experiment.privacy)
    vocabulary = experiment.model.vocabulary_size or store.manifest.vocabulary_size
    objective: Any = make_objective(experiment.model, task, vocabulary, store.manifest)
    definition = store.folder / DEFINITION
    tokenizer = of_path(definition if definition.is_file() else store.folder / VOCABULARY, store.manifest.vocabulary_size)
    # A definition by itself does not say what the marks are; the store does.
    marks = {field.name: getattr(store.manifest, field.name) for field in dataclasses.fields(SpecialIds)}
    tokenizer = dataclasses.replace(tokenizer, special=SpecialIds(**marks))
    labels = list(experiment.data.labels) or [str(number) for number in range(task.classes)]
    return Classifier(labels, tokenizer, store.manifest.sequence_length, _logits(objective, released(params)))


def of_checkpoint(path: str) -> Classifier:
    """Raises `ConfigError` for a checkpoint that is no whole classifier, or has no tokenizer."""
    checkpoint = Checkpoint(path)
    named = checkpoint.config.get("id2label")
    require(isinstance(named, dict) and len(named) > 1, checkpoint.asked, "names no labels in its config.json", "Name a classifier")
    assert isinstance(named, dict)
    labels, model = [str(named[number]) for number in sorted(named, key=int)], checkpoint.model
    tokenizer = of_path(checkpoint.folder, model.vocabulary_size or 0)
    objective: Any = make_objective(model, Classification(classes=len(labels)), model.vocabulary_size or 0, tokenizer.special)
    taken = checkpoint.taken(objective.task.parameter_shapes(model, objective.vocabulary_size))
    require(not taken.made_new, checkpoint.asked, f"has no {', '.join(taken.made_new[:1])}", "Name a classifier, with its head")
    params = jax.tree.map(jnp.asarray, nested(checkpoint.leaves(taken)))
    return Classifier(labels, tokenizer, min(512, model.positions), _logits(objective, params))


def _classification(task: Any) -> Classification:
    if not isinstance(task, Classification):
        raise ConfigError(f"task={task.name}", "gives no classes of texts", "Name a run of task=classification")
    return task


def _logits(objective: Any, params: Any) -> Callable[[dict[str, Any]], Any]:
    compiled = jax.jit(objective.logits)
    return lambda rows: compiled(params, {name: jnp.asarray(values) for name, values in rows.items()})
