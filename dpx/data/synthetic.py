"""Generates a corpus from a known Markov chain of words, whose best possible masked-word loss can be computed, and labelled texts of its
words.

The labelled texts are the smallest data that a classifier can be trained and measured on.

Shape legend: S states (words), W words of one text.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from dpx.data.declared_data import Synthetic, SyntheticLabels
from dpx.data.documents import Document, Example

WORDS_PER_SENTENCE = 12
_SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou")
_STEPS = ((1, 0.55), (2, 0.25), (5, 0.15), (7, 0.05))  # step 1 visits every state; 1 and 2 together rule out a period


class _Drawn:
    """Is the base class of sources of made-up words; each record is drawn from its number, so none depends on how many there are."""

    def __init__(self, declared: Any):
        self._declared, self._words = declared, words(declared.states, declared.seed)

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self._declared), sort_keys=True, default=list).encode()).hexdigest()


class SyntheticSource(_Drawn):
    """Yields documents of a stationary chain."""

    def documents(self) -> Iterator[Document]:
        declared: Synthetic = self._declared
        cumulative_SS = np.cumsum(transition(declared), axis=1)
        for number in range(declared.documents):
            draws = random.Random(f"document {declared.seed} {number}")
            states = [int(draws.random() * declared.states)]  # the stationary distribution is uniform: see `transition`
            for _ in range(declared.words_per_document - 1):
                row_S = cumulative_SS[states[-1]]
                states.append(min(int(np.searchsorted(row_S, draws.random(), side="right")), declared.states - 1))
            sentences = [states[start : start + WORDS_PER_SENTENCE] for start in range(0, len(states), WORDS_PER_SENTENCE)]
            paragraphs = tuple(" ".join(self._words[state] for state in sentence) for sentence in sentences)
            yield Document(paragraphs=paragraphs, unit_id=f"synthetic/{number}")


def words(states: int, seed: int) -> list[str]:
    """Returns a word for each of `states`: two syllables or more, all different, in an order drawn from the seed."""
    made = [first + second for first in _SYLLABLES for second in _SYLLABLES]
    while len(made) < states:
        made += [word + syllable for word in made for syllable in _SYLLABLES]
    made = list(dict.fromkeys(made))
    random.Random(f"words {seed}").shuffle(made)
    return made[:states]


def transition(declared: Synthetic) -> np.ndarray:
    """Returns P[a, b], float64[S, S], the probability that word b follows word a.

    P is a mixture of cyclic shifts, so its columns sum to one as its rows do, and the stationary distribution is uniform.
    """
    size = declared.states
    chain_SS = np.zeros((size, size))
    for step, chance in _STEPS:
        chain_SS[np.arange(size), (np.arange(size) + step) % size] += chance
    return chain_SS


def best_masked_loss(chain_SS: np.ndarray) -> float:
    """Returns the least possible cross-entropy (nats) of a masked word whose two neighbours are visible: H(X1 | X0, X2).

    For a stationary chain H(X1 | X0, X2) = 2 H(X1 | X0) - H(X2 | X0). A model that sees fewer neighbours cannot do better.
    """
    size = len(chain_SS)
    equations = np.vstack([chain_SS.T - np.eye(size), np.ones(size)])
    stationary_S = np.linalg.lstsq(equations, np.append(np.zeros(size), 1.0), rcond=None)[0]
    return 2 * _conditional_entropy(stationary_S, chain_SS) - _conditional_entropy(stationary_S, chain_SS @ chain_SS)


def _conditional_entropy(weights_S: np.ndarray, chain_SS: np.ndarray) -> float:
    logs_SS = np.log(chain_SS, out=np.zeros_like(chain_SS), where=chain_SS > 0)
    return float(-(weights_S @ (chain_SS * logs_SS).sum(axis=1)))


class SyntheticLabelsSource(_Drawn):
    """Yields labelled examples."""

    def documents(self) -> Iterator[Example]:
        declared: SyntheticLabels = self._declared
        for number in range(declared.examples):
            draws = random.Random(f"example {declared.seed} {number}")
            label = int(draws.random() * len(declared.labels))
            own = self._words[label :: len(declared.labels)]
            count = declared.shortest + int(draws.random() * (declared.longest - declared.shortest + 1))
            text = []
            for _ in range(count):
                among = own if draws.random() < 0.5 else self._words
                text.append(among[int(draws.random() * len(among))])
            yield Example(texts=((" ".join(text),),), label=label, unit_id=f"synthetic/{number}")
