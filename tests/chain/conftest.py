"""A chain of two stages on made-up text and labels, run once; tests work on copies of its folder."""

import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpx.config import recipes, run_name
from dpx.config.instantiate import build
from dpx.files.run_folder import RunFolder
from tests.processes import WIDTH
from tests.training.sharing import shared_programs

SMALL: dict[str, Any] = {
    "steps": 2,
    "microbatch": 8,
    "batch_schedule": {"size": 16},
    "model": {"layers": 1},
    "schedule": {"evaluation_rows": 32},
}
SMALL |= {"accountant": {"value_discretization_interval": WIDTH}}
PRETRAIN: dict[str, Any] = {"options": {"data": "synthetic", "noise": "multiplier", "accountant": "rdp"}}
PRETRAIN |= {"values": {"privacy": {"delta": 1.0e-4}}}
CLASSIFY: dict[str, Any] = {"init": "pretrain", "disjoint_from": ["pretrain"]}
CLASSIFY |= {"options": {"data": "synthetic_labels", "task": "classification", "mechanism": "none"}}
CLASSIFY |= {"values": {"data": {"source": {"examples": 400}}}}


def node(**stages: dict[str, Any]) -> dict[str, Any]:
    """The key `chain` of a config whose stages are micro models; a stage that is given replaces the usual one or is added."""
    usual = {"pretrain": PRETRAIN, "classify": CLASSIFY} if not stages or set(stages) & {"pretrain", "classify"} else {}
    return copy.deepcopy({"common": {"options": {"model": "micro"}, "values": SMALL}, "stages": {**usual, **stages}})


def run(chain: dict[str, Any], job: str = "chain", *overrides: str) -> Path:
    """The folder of the job of a chain, in the folder `outputs` of the working folder."""
    cfg = recipes.compose(["+experiment=two_stages", f"job={job}", "name=two", *overrides], with_hydra=True)
    cfg.chain = chain
    folder = RunFolder(Path("outputs").absolute() / run_name(cfg))
    del cfg.hydra
    experiment, task = build(cfg)
    task(experiment, folder)
    return folder.path


def statement(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "release" / "chain.json").read_text())


@pytest.fixture(scope="module", autouse=True)
def quick_runs() -> Iterator[None]:
    with shared_programs():
        yield


def run_in(root: Path, chain: dict[str, Any]) -> Path:
    """`root`, after the chain has run in it."""
    before = Path.cwd()
    os.chdir(root)
    try:
        with shared_programs():
            run(chain)
    finally:
        os.chdir(before)
    return root


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A folder in which the usual chain has run."""
    return run_in(tmp_path_factory.mktemp("chain"), node())


@pytest.fixture(scope="session")
def swept(finished, tmp_path_factory) -> Path:
    """A folder in which the usual chain has run, and after it one whose second stage has two points."""
    root = shutil.copytree(finished, tmp_path_factory.mktemp("swept") / "copy")
    return run_in(root, node(classify=CLASSIFY | {"sweep": {"lr_schedule.learning_rate": [1e-3, 0.3]}, "choose_by": "macro_f1"}))


@pytest.fixture
def place(finished, tmp_path, monkeypatch) -> Path:
    """The working folder: a copy of `finished`."""
    root = shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(root)
    return root
