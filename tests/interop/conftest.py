"""A checkpoint with its tokenizer, a table that it has never seen, and runs from the one on the other."""

from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from dpx import config
from dpx.config import recipes
from dpx.data.tokenizer import SPECIAL_TOKENS
from tests.processes import COARSE

from ..training.sharing import run_job, shared_programs
from .cases import Case

WORDS = [f"{first}{second}" for first in "bdfgklm" for second in "aeiou"]


@pytest.fixture(scope="module", autouse=True)
def quick_runs():
    with shared_programs():
        yield


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hf")
    folder = Case.read("bert_body_a").write(root / "model")
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]) + "\n")
    draws = np.random.RandomState(1)
    rows = [f"{' '.join(draws.choice(WORDS, 6))},{number % 2}" for number in range(80)]
    (root / "rows.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    (root / "test.csv").write_text("\n".join(["text,label", *rows[:10]]) + "\n")
    return root


def composed(place: Path, *overrides: str):
    given = ["init=hf", f"init.path={place}/model", "train=all", "data=table", f"data.source.paths={place}/rows.csv"]
    given += ["data.source.labels=[0,1]", "data.heldout_fraction=0.2"]
    given += ["data.sequence_length=12", f"data.directory={place}/data", "steps=2", "microbatch=8", "batch_schedule.size=8"]
    given += [
        "noise=multiplier",
        "noise.noise_multiplier=2.0",
        "accountant=rdp",
        "privacy.delta=1e-3",
        "schedule.evaluation_rows=16",
        COARSE,
    ]
    return recipes.compose([*given, *overrides])


def train(place: Path, name: str, *overrides: str) -> Path:
    cfg = composed(place, *overrides)
    experiment, job = config.build(cfg)
    run_job((experiment, job, OmegaConf.to_yaml(OmegaConf.create(config.resolved(cfg)))), place / "outputs" / name, None, None)
    return place / "outputs" / name
