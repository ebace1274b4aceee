"""Runs in which only some parameters are trained: frozen ones keep their initial values through restarts, forks and fresh noise."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import dpx
from dpx import config
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.files.weights import FROZEN
from dpx.job.released_jobs import Evaluate
from dpx.randomness import path_name
from dpx.training import frozen
from tests.processes import COARSE

from ..composed import composed
from .sharing import run_job

PLAIN = ["model=micro", "model.layers=2", "data=synthetic", "steps=4", "microbatch=8", "batch_schedule.size=16", "seed=7"]
PLAIN += ["schedule.evaluation_rows=32", "noise=multiplier", "noise.noise_multiplier=2.0", "accountant=rdp", "privacy.delta=1e-4", COARSE]
TRAINED = {
    "train=bias": "bias",
    "train=last_layer": "mlm/",
    "train=top train.layers=1": "mlm/ layers/",
    "train=lora train.rank=2": "lora/",
    "train=lora_ffa train.rank=2 train.dropout=0.2": "/b",
    "train=matching train.paths=[layers/qkv/*] train.layers=2 model.layers=3": "layers/qkv/",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


def train(data: Path, path: Path, *overrides: str, fork: str | None = None, until: int | None = None) -> dict[str, np.ndarray]:
    """The released parameters by path, of a run in `path`, killed before step `until` (then none)."""
    parts = composed(*PLAIN, f"data.directory={data}", "schedule.checkpoint_every=2", *overrides)
    return by_path(dpx.load(path).params) if run_job(parts, path, fork, until) else {}


def by_path(tree) -> dict[str, np.ndarray]:
    return {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


# Selections are of one kind; in the default suite the run that other tests of this file read represents them.
ADAPTED = "train=lora train.rank=2"
EACH = [pytest.param(line, id=line.split()[0].removeprefix("train="), marks=[pytest.mark.slow] * (line != ADAPTED)) for line in TRAINED]


@pytest.fixture(scope="module")
def adapted(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("adapted") / "run"
    return path, train(data, path, *ADAPTED.split())


@pytest.fixture(scope="module", params=EACH)
def finished(request, data, adapted, tmp_path_factory):
    """(overrides, folder, released parameters) of one run to its end."""
    if request.param == ADAPTED:
        return request.param, *adapted
    path = tmp_path_factory.mktemp("frozen") / "run"
    return request.param, path, train(data, path, *request.param.split())


def test_frozen_parameters_are_released_as_it_was_drawn_and_all_else_has_moved(finished):
    line, path, released = finished
    newest = max((path / "private" / "checkpoints").iterdir(), key=lambda folder: int(folder.name))
    saved = ocp.metadata(str(newest.absolute())).metadata["params"]
    trained = {path_name(place) for place, _ in jax.tree_util.tree_leaves_with_path(saved)}
    assert trained and all(any(part in name for part in TRAINED[line].split()) for name in trained)
    metrics = json.loads((path / "private" / "metrics.jsonl").read_text().splitlines()[-1])
    measured = {name.removeprefix("gradients/").partition("/layer_")[0] for name in metrics if name.startswith("gradients/")}
    assert measured == trained
    rests = by_path(frozen.loaded(path / "private"))
    for name, leaf in rests.items():
        # Layers below the trained ones come first in the ordinary stack.
        whole = released[name.replace("layers_below/", "layers/")]
        assert np.array_equal(whole[: len(leaf)] if name.startswith("layers_below/") else whole[len(whole) - len(leaf) :], leaf)
    # Biases and B begin as zeros: noise reaches every number that is trained.
    assert all(np.all(released[name][-1] != 0) for name in trained if name.endswith(("bias", "/b")))


@pytest.mark.slow
def test_a_run_that_was_killed_ends_with_the_same_bits(adapted, data, tmp_path):
    train(data, tmp_path / "run", "train=lora", "train.rank=2", until=3)
    found = train(data, tmp_path / "run", "train=lora", "train.rank=2")
    assert found.keys() == adapted[1].keys() and all(np.array_equal(found[name], leaf) for name, leaf in adapted[1].items())


def test_a_copy_of_frozen_parameters_that_was_cut_short_is_made_anew(tmp_path, monkeypatch):
    parent, private, step = tmp_path / "parent", tmp_path / "private", SimpleNamespace(has_frozen=True)
    (parent / "resting").mkdir(parents=True)
    for name in ("one", "two"):
        (parent / "resting" / name).write_text(name)
    private.mkdir()

    def cut_short(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "one").write_text("o")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "copytree", cut_short)
        frozen.inherit(private, parent, step)
    assert not (private / "resting").exists()
    frozen.inherit(private, parent, step)
    assert {path.name: path.read_text() for path in private.rglob("*") if path.is_file()} == {"one": "one", "two": "two"}


def test_a_fork_keeps_the_frozen_parameters_of_its_parent(adapted, data, tmp_path):
    found = train(data, tmp_path / "fork", "train=lora", "train.rank=2", "seed=8", fork=f"{adapted[0]}@2")
    assert all(np.array_equal(found[name], leaf) == ("lora" not in name or "scale" in name) for name, leaf in adapted[1].items())


def test_frozen_parameters_are_not_drawn_again_where_it_was_lost(adapted, data, tmp_path):
    train(data, tmp_path / "run", "train=lora", "train.rank=2", until=3)
    shutil.rmtree(tmp_path / "run" / "private" / FROZEN)
    with pytest.raises(ConfigError, match="private/resting: this run's frozen parameters are missing"):
        train(data, tmp_path / "run", "train=lora", "train.rank=2")


def test_another_part_is_another_run(adapted, data, tmp_path):
    path = shutil.copytree(adapted[0], tmp_path / "run")
    with pytest.raises(ConfigError, match="the config differs from the config that this run began with"):
        train(data, path, "train=bias")


def test_a_released_run_is_evaluated_whole(adapted, capsys):
    cfg, path = config.load(str(adapted[0]))
    experiment, _ = config.build(cfg)
    Evaluate()(experiment, RunFolder(path))
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.slow
def test_canaries_of_an_audit_train_beside_any_part(data, tmp_path):
    found = train(data, tmp_path / "run", "train=bias", "audit=canaries", "audit.gradients=40", "audit.primary.guesses=20")
    assert found and "canaries/table" not in found
    stated = json.loads((tmp_path / "run" / "release" / "privacy.json").read_text())
    assert stated["train"] == "bias" and any("frozen parameters were drawn at random" in line for line in stated["assumptions"])


def test_a_plan_counts_what_is_trained(tmp_path):
    experiment, job, _ = composed(*PLAIN, "train=lora", "train.rank=2", "job=plan", "data.declared_size=5000")
    document = job.document(experiment)
    width, layers = experiment.model.width, experiment.model.layers
    # Two targets, each of two factors.
    assert document.trained_parameters == 2 * 2 * layers * 2 * width < document.parameters


@pytest.mark.parametrize(
    "line, words",
    [
        ("train=matching train.paths=[layers/qvk/kernel]", "layers/qvk/kernel: matches no parameter. The nearest are layers/qkv/kernel"),
        ("train=top train.layers=9", "top 9 layers: is too many: the model has 2 layers"),
        ("train=lora train.rank=1000", "rank=1000: is not possible for a matrix of shape"),
        ("train=lora train.targets=[keys]", "keys: does not match any target of adapters. The nearest are key"),
        ("train=top train.layers=0", "train.layers=0: at least one layer must be trained"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_drawn(line, words, data, tmp_path):
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        train(data, tmp_path / "run", *line.split())
    assert not (tmp_path / "run" / "private" / "ledger").exists()
