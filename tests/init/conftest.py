"""Texts that share nothing, a vocabulary for all of them, and runs on them that share what they compile."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from dpx.config.experiment import Experiment
from dpx.data.tokenizer import SPECIAL_TOKENS
from tests.processes import COARSE

from ..composed import composed
from ..training.sharing import run_job, shared_programs

MICRO = [
    "model=micro",
    "model.layers=1",
    "data=text",
    "data.source.document_per=line",
    "data.vocabulary.size=128",
    "data.sequence_length=32",
]
MICRO += ["data.public_fraction=0.1", "data.heldout_fraction=0.1", "steps=2", "microbatch=8", "batch_schedule.size=8"]
MICRO += ["noise=multiplier", "noise.noise_multiplier=2.0", "accountant=rdp", "privacy.delta=1e-3", "schedule.evaluation_rows=16"]
MICRO += ["schedule.checkpoint_every=1", COARSE]
WORDS = [f"{first}{second}" for first in "bdfgklmnprst" for second in "aeiou"]


@dataclasses.dataclass(frozen=True)
class Place:
    """A folder of runs, with texts beside it."""

    root: Path

    def composed(self, *overrides: str, text: str = "one") -> tuple[Experiment, Any, str]:
        lies = [f"data.source.paths={self.root}/{text}.txt", f"data.vocabulary.path={self.root}/vocabulary.txt"]
        return composed(*MICRO, *lies, f"data.directory={self.root}/data", *overrides)

    def declared(self, *overrides: str, text: str = "one") -> Experiment:
        return self.composed(*overrides, text=text)[0]

    def train(self, name: str, *overrides: str, text: str = "one", fork: str | None = None, until: int | None = None) -> Path:
        """The folder of a run to its end, or killed before step `until`."""
        path = self.root / "outputs" / name
        with shared_programs():
            run_job(self.composed(*overrides, text=text), path, fork, until)
        return path


def statement(path: Path) -> dict[str, Any]:
    return json.loads((path / "release" / "privacy.json").read_text())


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Place:
    root = tmp_path_factory.mktemp("init")
    draw = random.Random(1)
    for name in ("one", "other"):
        lines = [" ".join(draw.choices(WORDS, k=26)) for _ in range(60)]
        (root / f"{name}.txt").write_text("\n".join(lines) + "\n")
    both = (root / "one.txt").read_text().splitlines()[:50] + (root / "other.txt").read_text().splitlines()[:5]
    (root / "both.txt").write_text("\n".join(both) + "\n")
    few = (root / "other.txt").read_text().splitlines() + (root / "one.txt").read_text().splitlines()[:8]
    (root / "few.txt").write_text("\n".join(few) + "\n")
    (root / "vocabulary.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]) + "\n")
    return Place(root)


@pytest.fixture(scope="module", autouse=True)
def quick_runs():
    with shared_programs():
        yield


@pytest.fixture(scope="session")
def parent(place) -> Path:
    return place.train("parent")
