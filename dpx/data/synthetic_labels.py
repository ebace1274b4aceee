"""Labelled texts of made-up words: the least that a classifier can be trained and measured on."""

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict

from dpx.data.declarations import SyntheticLabels
from dpx.data.documents import Example
from dpx.data.synthetic import words


class SyntheticLabelsSource:
    """Each example is drawn from its own number, so none depends on how many there are."""

    def __init__(self, declared: SyntheticLabels):
        self._declared = declared
        self._words = words(declared.states, declared.seed)

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self._declared), sort_keys=True, default=list).encode()).hexdigest()

    def documents(self) -> Iterator[Example]:
        for number in range(self._declared.examples):
            draws = random.Random(f"example {self._declared.seed} {number}")
            label = int(draws.random() * len(self._declared.labels))
            yield Example(texts=((self._text(label, draws),),), label=label, unit_id=f"synthetic/{number}")

    def _text(self, label: int, draws: random.Random) -> str:
        declared = self._declared
        own = self._words[label :: len(declared.labels)]
        count = declared.shortest + int(draws.random() * (declared.longest - declared.shortest + 1))
        return " ".join(_one(own if draws.random() < 0.5 else self._words, draws) for _ in range(count))


def _one(of: list[str], draws: random.Random) -> str:
    return of[int(draws.random() * len(of))]
