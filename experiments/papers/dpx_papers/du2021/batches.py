"""Declares what the demonstrations share, and makes the rows of their steps: a made-up batch, and Poisson steps of labelled rows if their
files exist."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dpx.config.declared_init import FromCheckpoint, RandomStart
from dpx.data.declared_data import Data
from dpx.data.labelled import Table as Labelled
from dpx.data.tokenizer import SPECIAL_TOKENS, TextTokenizer, fit, of_path, of_vocabulary
from dpx.files.weights import folder_of
from dpx.models.checkpoint_shape import OfCheckpoint
from dpx.models.shape import Bert
from dpx_papers.du2021 import labelled_rows
from dpx_papers.du2021.one_step import NoisyClassifier, batch_of, shape_of, standard_normal

# [CLS], [SEP] and other marks.
_MARKS = 3


@dataclasses.dataclass(frozen=True)
class Step:
    """Holds the rows of one step: the padded `batch`, the labels without padding, and the ids of their `words`, without marks."""

    batch: dict[str, np.ndarray]
    labels: np.ndarray
    words: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Steps:
    """Holds the steps of one set of rows, `name`, and the tokenizer of their ids."""

    name: str
    tokenizer: TextTokenizer
    steps: tuple[Step, ...]

    @property
    def classes(self) -> int:
        return max(2, max(int(step.labels.max()) for step in self.steps) + 1)


def marks(tokenizer: TextTokenizer) -> frozenset[int]:
    """Returns the ids of what is not text: padding and the marks around a text."""
    special = tokenizer.special
    return frozenset((special.pad_id, special.cls_id, special.sep_id))


def step_of(tokenizer: TextTokenizer, texts: Sequence[Sequence[str]], labels: Sequence[int], length: int, rows: int) -> Step:
    """Returns one step on `texts`, padded to `rows` rows of `length` tokens."""
    batch = batch_of(tokenizer, texts, labels, length, rows)
    tokens = [batch["tokens"][row, : batch["length"][row]] for row in range(len(texts))]
    words = frozenset(np.unique(np.concatenate(tokens)).tolist()) - marks(tokenizer)
    return Step(batch, np.asarray(labels), words)


def made_up(sentences: Sequence[Sequence[str | int]], init: RandomStart | FromCheckpoint, data: Data, others: Sequence[str] = ()) -> Steps:
    """Returns one step on (text, label) pairs. Without a checkpoint the vocabulary is their words and `others`."""
    texts = [(str(text),) for text, _ in sentences]
    words = sorted({word for text in (*(text for (text,) in texts), *others) for word in text.lower().split()})
    tokenizer = _of_checkpoint(init, data) or of_vocabulary([*SPECIAL_TOKENS, *words])
    longest = max(len(tokenizer.tokenizer.encode(text, add_special_tokens=False).ids) for (text,) in texts)
    labels = [int(label) for _, label in sentences]
    return Steps("made up", tokenizer, (step_of(tokenizer, texts, labels, longest + _MARKS, len(texts) + 1),))


def drawn(data: Data, init: RandomStart | FromCheckpoint, steps: int, batch_size: int, micro_batches: int, seed: int) -> Steps | None:
    """Returns `steps` steps of `batch_size` expected rows, drawn as M Poisson micro-batches; `None` if the files of `data` do not exist.

    Without a checkpoint the vocabulary is fitted on these rows.
    """
    source = data.source
    if not isinstance(source, Labelled) or not labelled_rows.is_present(source):
        return None
    texts, labels = labelled_rows.texts_and_labels(source)
    parts = [part for text in texts for part in text]
    tokenizer = _of_checkpoint(init, data) or of_vocabulary(fit(parts, data.vocabulary.size))
    draws = np.random.default_rng(seed)
    # M draws of D rows at B / (M D): the number of rows of a step is nearly Poisson, and a row can be in it twice.
    tries = micro_batches * len(texts)
    counts = np.maximum(draws.binomial(tries, batch_size / tries, steps), 1)
    made = []
    for count in counts:
        places = draws.integers(len(texts), size=count)
        own = [texts[place] for place in places], [labels[place] for place in places]
        made.append(step_of(tokenizer, *own, data.sequence_length, int(counts.max())))
    return Steps(data.name, tokenizer, tuple(made))


def _of_checkpoint(init: RandomStart | FromCheckpoint, data: Data) -> TextTokenizer | None:
    """Returns the tokenizer of the checkpoint that parameters come from."""
    return of_path(folder_of(init.path), data.vocabulary.size) if isinstance(init, FromCheckpoint) else None


def classifier_of(model: Bert | OfCheckpoint, subject: Steps) -> NoisyClassifier:
    """Returns the classifier of the rows of a subject."""
    return NoisyClassifier(shape_of(model), len(subject.tokenizer.vocabulary), subject.classes)


def noise_of(classifier: NoisyClassifier, seed: int, number: int, step: Step) -> np.ndarray:
    """Returns the standard normal noise [B,H] of step `number`, in float64."""
    return standard_normal(seed, number, len(step.batch["label"]), classifier.model.width)
