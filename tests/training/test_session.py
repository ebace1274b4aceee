"""Whole runs in one process: replay, a new noise epoch, forks, and what is refused with nothing lost."""

import dataclasses
import json
import re
import shutil
from typing import Any

import jax
import numpy as np
import pytest

from dpx.config.declared_tuning import Tune
from dpx.config.experiment import Schedule
from dpx.data.declared_data import Data, Synthetic, Vocabulary
from dpx.data.store import Store
from dpx.declaration import ConfigError
from dpx.files import orbax_checkpoints
from dpx.files.records import to_json
from dpx.files.run_folder import RunFolder
from dpx.mechanism.dp_sgd import NoPrivacy
from dpx.privacy.declared_privacy import Pld, Privacy
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import TrialOf
from dpx.processes.mesh import Mesh
from dpx.sampler import CyclicPoisson, Poisson, RandomAllocation, Shuffled, TruncatedPoisson
from dpx.sampler.batch_schedule import Constant
from dpx.training import loop, session

from ..processes import WIDTH
from .conftest import declare, opened


class Killed(Exception):
    """Stands for a SIGKILL at a chosen moment; the real ones are in test_kill.py."""


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    def make(**changes):
        source = Synthetic(documents=60, words_per_document=80, states=16)
        directory = str(tmp_path_factory.getbasetemp() / "data")
        data = Data(
            name="synthetic",
            source=source,
            vocabulary=Vocabulary(size=256),
            sequence_length=16,
            directory=directory,
            heldout_fraction=0.2,
            public_fraction=0.2,
        )
        fields = {"data": data, "steps": 6, "schedule": Schedule(evaluate_every=3, evaluation_rows=32, checkpoint_every=2)}
        return declare(**(fields | changes))

    return make


def _train(experiment, path, fork=None, die_after=None, monkeypatch: Any = None):
    """Runs to the end, or raises `Killed` once `die_after` steps have been computed; returns final parameters."""
    folder = RunFolder(path, fork=fork)
    if die_after is not None:
        whole = loop.one_step

        def mortal(runtime, epoch, secret, step, state):
            found = whole(runtime, epoch, secret, step, state)
            if step == die_after:
                raise Killed
            return found

        monkeypatch.setattr(loop, "one_step", mortal)
    try:
        with opened(experiment, folder) as run:
            return jax.tree.map(np.array, session.train(run).state.params)
    finally:
        if die_after is not None:
            monkeypatch.setattr(loop, "one_step", whole)


def _runs(path):
    return [
        {key: value for key, value in to_json(run).items() if key not in ("origin", "epoch_name")}
        for run in Ledger(path / "private" / "ledger").segments()
    ]


def _equal(first, second):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))


@pytest.fixture(scope="module")
def uninterrupted(experiment, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    return path, _train(experiment(seed=5), path)


@pytest.mark.parametrize("die_after", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_replayed_run_ends_with_the_same_bits_and_ledger(experiment, uninterrupted, tmp_path, monkeypatch, die_after):
    with pytest.raises(Killed):
        _train(experiment(seed=5), tmp_path, die_after=die_after, monkeypatch=monkeypatch)
    # The step it died in was charged before it was computed.
    assert Ledger(tmp_path / "private" / "ledger").steps(0) == set(range(die_after + 1))
    assert _equal(_train(experiment(seed=5), tmp_path), uninterrupted[1])
    assert _runs(tmp_path) == _runs(uninterrupted[0])
    steps = [json.loads(line)["step"] for line in (tmp_path / "private" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 7))


# Slow: rows of an epoch are drawn in tests/test_sampler.py, and read in tests/data.
@pytest.mark.slow
def test_one_row_of_each_document_and_epoch_is_read_and_read_again_after_an_interruption(experiment, tmp_path, monkeypatch):
    """Two passes in three steps each; the run dies in the second, whose number decides the rows."""
    declared = experiment(
        seed=5,
        data=dataclasses.replace(experiment().data, cuts=2),
        privacy=Privacy(delta=1e-4, unit="document", rows_per_unit_max=2, unit_mode="one_row"),
        sampler=Shuffled(),
        batch_schedule=Constant(size=13),
    )
    read: dict[int, list[int]] = {}
    examples = Store.examples

    def watched(store, split, indices, rows_per_example, width=None, epoch=None):
        found = examples(store, split, indices, rows_per_example, width, epoch)
        read.setdefault(epoch, []).extend(found["record"].tolist())
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Store, "examples", watched)
        whole = _train(declared, tmp_path / "whole")
    # Documents have two rows, one behind the other: the first of each in one epoch, the second in the next.
    assert sorted(read[0]) == list(range(0, 2 * len(read[0]), 2)) and sorted(read[1]) == list(range(1, 2 * len(read[0]), 2))
    with pytest.raises(Killed):
        _train(declared, tmp_path / "again", die_after=4, monkeypatch=monkeypatch)
    assert _equal(_train(declared, tmp_path / "again"), whole)


def test_a_finished_run_states_everything_and_releases_no_telemetry(uninterrupted):
    path = uninterrupted[0]
    claim = json.loads((path / "release" / "privacy.json").read_text())
    assert claim["guarantee"] == "none" and any("fixed_seed" in reason for reason in claim["reasons"])
    assert claim["spent"]["steps"] == 6
    assert sorted(found.name for found in (path / "release").iterdir()) == ["config.yaml", "dpx_manifest.json", "params", "privacy.json"]
    last = json.loads((path / "private" / "metrics.jsonl").read_text().splitlines()[-1])
    for name in (
        "train/loss",
        "train/mlm_accuracy",
        "train/next_sentence_accuracy",
        "grad/snr",
        "grad/clipped_fraction",
        "train/learning_rate",
        "train/expected_batch_size",
        "train/examples_per_s",
        "heldout/mlm_accuracy",
        "weights/layers/qkv/kernel/layer_00",
        "weights/embeddings/word",
    ):
        assert np.isfinite(last[name]), name
    assert oct((path / "private").stat().st_mode)[-3:] == "700"


def _released(path):
    """Every value of the released texts by its place; random names, tags and checksums as the same word.

    The manifest holds sizes and checksums of the other released files alone.
    """

    def leaves(place, node):
        if isinstance(node, dict | list):
            for key, value in node.items() if isinstance(node, dict) else enumerate(node):
                yield from leaves((*place, key), value)
        else:
            yield place, re.sub(r"\b[0-9a-f]{16,}\b", "name", node) if isinstance(node, str) else node

    documents = {file.name: json.loads(file.read_text()) for file in (path / "release").glob("*.json") if file.name != "dpx_manifest.json"}
    return dict(leaves((), documents))


@pytest.mark.parametrize(
    "sampler",
    [RandomAllocation(), *(pytest.param(one, marks=pytest.mark.slow) for one in (Poisson(), TruncatedPoisson(), CyclicPoisson(cycle=2)))],
    ids=lambda one: one.name,
)
def test_no_released_text_depends_on_who_was_drawn(experiment, tmp_path, sampler):
    """Two runs that differ in their draws alone: batch sizes, microbatches, padding and times differ, and are told under private/ alone."""
    counts = []
    for seed in (5, 6):
        _train(experiment(seed=seed, steps=3, sampler=sampler, accountant=Pld(value_discretization_interval=WIDTH)), tmp_path / str(seed))
        lines = (tmp_path / str(seed) / "private" / "metrics.jsonl").read_text().splitlines()
        counts.append([json.loads(line).get("train/examples") for line in lines])
    assert counts[0] != counts[1]
    first, second = (_released(tmp_path / str(seed)) for seed in (5, 6))
    assert first.keys() == second.keys() and len(first) > 50
    assert [place for place in first if first[place] != second[place]] == []


def test_two_unseeded_runs_share_no_noise(experiment, tmp_path):
    first, second = (_train(experiment(steps=1), tmp_path / name) for name in ("a", "b"))
    assert not _equal(first, second)
    claim = json.loads((tmp_path / "a" / "release" / "privacy.json").read_text())
    assert claim["guarantee"] == "dp" and claim["epsilon"]["rdp"] > 0


def test_another_microbatch_starts_a_new_noise_epoch_and_charges_again(experiment, tmp_path, monkeypatch):
    with pytest.raises(Killed):
        _train(experiment(), tmp_path, die_after=3, monkeypatch=monkeypatch)
    before = (tmp_path / "private" / "root_secret_0").read_bytes()
    _train(experiment(microbatch=3), tmp_path)
    assert (tmp_path / "private" / "root_secret_1").read_bytes() != before
    # Steps 0..3 under the first key, then 2..5 from the checkpoint at 2 under the second.
    assert [(run["epoch"], run["steps"]) for run in _runs(tmp_path)] == [(0, [[0, 4]]), (1, [[2, 4]])]
    claim = json.loads((tmp_path / "release" / "privacy.json").read_text())
    assert claim["spent"]["charged_steps"] == 8
    assert claim["epsilon"]["rdp"] > claim["planned"]["epsilon"]["rdp"]


def test_a_fork_takes_a_fresh_key_and_the_whole_parents_ledger(experiment, uninterrupted, tmp_path):
    parent, final = uninterrupted
    forked = _train(experiment(seed=5), tmp_path, fork=f"{parent}@4")
    assert not _equal(forked, final)
    assert sum(count for run in _runs(tmp_path) for _, count in run["steps"]) == 6 + 2
    with pytest.raises(ConfigError, match="no checkpoint at step 3. Use one of"):
        _train(experiment(seed=5), tmp_path / "other", fork=f"{parent}@3")
    with pytest.raises(ConfigError, match="not of the form"):
        _train(experiment(seed=5), tmp_path / "other2", fork=str(parent))


def test_a_changed_config_is_refused_on_resume(experiment, uninterrupted, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(uninterrupted[0], path)
    ledger = (path / "private" / "ledger").read_bytes()
    with pytest.raises(ConfigError, match="the config differs from the config that this run began with"):
        _train(experiment(seed=5, steps=7), path)
    assert (path / "private" / "ledger").read_bytes() == ledger


def test_two_processes_cannot_hold_one_folder(experiment, tmp_path):
    with RunFolder(tmp_path).claimed():
        with pytest.raises(ConfigError, match="another process is running in this folder"):
            _train(experiment(seed=5), tmp_path)


def test_the_checkpoint_before_a_damaged_one_serves_by_itself(experiment, uninterrupted, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(uninterrupted[0], path)
    newest = path / "private" / "checkpoints" / "6"
    (array,) = (newest / "state" / "d").iterdir()
    content = bytearray(array.read_bytes())
    content[len(content) // 2] ^= 1
    array.write_bytes(content)
    assert _equal(_train(experiment(seed=5), path), uninterrupted[1])
    said = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line or "resuming" in line]
    assert said == ["checkpoint 6 is damaged: it was moved to damaged-6", "resuming from step 4"]
    assert _runs(path) == _runs(uninterrupted[0]), "its steps are repeated under their own key, and charged once"
    assert newest.is_dir() and (newest.parent / "damaged-6").is_dir()


def test_a_fork_of_a_damaged_checkpoint_is_refused_in_one_line(experiment, uninterrupted, tmp_path):
    path = shutil.copytree(uninterrupted[0], tmp_path / "run")
    metadata = path / "private" / "checkpoints" / "4" / "_CHECKPOINT_METADATA"
    metadata.write_text(metadata.read_text().replace('"epoch": "', '"epoch": "0'))
    with pytest.raises(ConfigError, match=r"checkpoints/4: this checkpoint is damaged\. Use one of \[2, 6\]\.$"):
        _train(experiment(seed=5), tmp_path / "fork", fork=f"{path}@4")
    assert not (tmp_path / "fork" / "private" / "root_secret_0").exists()


# tests/job/test_accidents.py fills the disk in the default suite and holds the charges.
@pytest.mark.slow
def test_a_full_disk_stops_the_run_with_one_line_and_it_goes_on_afterwards(experiment, uninterrupted, tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(orbax_checkpoints.ocp.training.Checkpointer, "save_async", full)
        with pytest.raises(ConfigError, match="the disk is full"):
            _train(experiment(seed=5), tmp_path)
    assert _equal(_train(experiment(seed=5), tmp_path), uninterrupted[1])
    assert _runs(tmp_path) == _runs(uninterrupted[0])


@pytest.mark.slow
def test_a_plain_run_enters_nothing_and_claims_nothing(experiment, tmp_path):
    _train(experiment(mechanism=NoPrivacy(), steps=2), tmp_path)
    claim = json.loads((tmp_path / "release" / "privacy.json").read_text())
    assert claim["guarantee"] == "not_private" and claim["epsilon"] == {}
    assert _runs(tmp_path) == []
    last = json.loads((tmp_path / "private" / "metrics.jsonl").read_text().splitlines()[-1])
    assert "grad/snr" not in last and "privacy/epsilon" not in last


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
@pytest.mark.slow
def test_a_mesh_of_simulated_devices_trains_to_the_same_parameters(experiment, uninterrupted, tmp_path):
    mesh = Mesh(name="simulated", data=4, fsdp=2, flops_per_s=1e10, memory_bytes=1 << 30)
    spread = _train(experiment(seed=5, mesh=mesh, microbatch=1), tmp_path)
    for one, other in zip(jax.tree.leaves(uninterrupted[1]), jax.tree.leaves(spread), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)


def test_a_trial_that_goes_on_without_its_search_stays_a_trial_in_its_ledger_and_statement(experiment, tmp_path, monkeypatch):
    declared = experiment(tune=Tune(charge="composition"))
    with pytest.raises(Killed):
        _train(declared, tmp_path, die_after=2, monkeypatch=monkeypatch)
    _train(experiment(tune=None), tmp_path)
    assert Ledger(tmp_path / "private" / "ledger").trials == [TrialOf(study=declared.name, charge="composition")]
    said = json.loads((tmp_path / "release" / "privacy.json").read_text())
    assert said["tuning"]["charge"] == "composition" and said["tuning"]["meaning"] in said["not_covered"]
