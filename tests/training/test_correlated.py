"""A run with correlated noise: replay is the same bits, and no noise reaches from one noise epoch or run into another."""

import json

import jax
import numpy as np
import pytest

from dpx.config.experiment import Schedule
from dpx.files.run_folder import RunFolder
from dpx.mechanism.banded import Banded
from dpx.privacy.ledger import Ledger
from dpx.sampler import CyclicPoisson
from dpx.training import loop, session

from .conftest import declare, opened
from .test_adaptive import synthetic

STRATEGY = [0.8, 0.4, 0.2]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    def make(**changes):
        fields = {
            "data": synthetic(str(tmp_path_factory.getbasetemp() / "data")),
            "steps": 4,
            "seed": 6,
            "schedule": Schedule(evaluate_every=100, evaluation_rows=32, checkpoint_every=2),
            "mechanism": Banded(bands=3),
            "sampler": CyclicPoisson(cycle=3),
        }
        return declare(**(fields | changes))

    return make


def place(path, fork=None, strategy=STRATEGY):
    (path / "private").mkdir(parents=True, exist_ok=True)
    (path / "private" / "strategy.json").write_text(json.dumps({"coefficients": strategy}))
    return RunFolder(path, fork=fork)


def train(experiment, path, fork=None):
    with opened(experiment, place(path, fork)) as run:
        return jax.tree.map(np.array, session.train(run).state)


def past_noise_at_start(experiment, path, fork=None, strategy=STRATEGY):
    with opened(experiment, place(path, fork, strategy)) as run:
        return run.start.first_step, max(float(abs(leaf).max()) for leaf in jax.tree.leaves(run.start.state.noise))


def test_replay_is_bit_exact_and_past_noise_stays_within_its_epoch(experiment, tmp_path, monkeypatch):
    whole = train(experiment(), tmp_path / "whole")
    claim = json.loads((tmp_path / "whole" / "release" / "privacy.json").read_text())
    assert [item["count"] for item in claim["ledger"]["events"]] == [2]
    once = loop.one_step

    def mortal(runtime, epoch, secret, step, state):
        if step == 3:
            raise KeyboardInterrupt
        return once(runtime, epoch, secret, step, state)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "one_step", mortal)
        train(experiment(), tmp_path / "killed")
    assert past_noise_at_start(experiment(), tmp_path / "killed") == (2, pytest.approx(0.4, rel=1.0))
    again = train(experiment(), tmp_path / "killed")
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(again), strict=True))
    # A fork, and a run whose microbatch changed, go on under a fresh key: their noise starts from nothing, however often they are opened.
    for _ in range(2):
        assert past_noise_at_start(experiment(steps=6), tmp_path / "fork", fork=f"{tmp_path / 'whole'}@2") == (2, 0.0)
        assert past_noise_at_start(experiment(microbatch=2), tmp_path / "whole") == (4, 0.0)
    # The proof is of one strategy for a whole epoch: under another one the epoch that was begun is left.
    noise_epochs = len(Ledger(tmp_path / "fork" / "private" / "ledger").noise_epochs)
    assert past_noise_at_start(experiment(steps=6), tmp_path / "fork", f"{tmp_path / 'whole'}@2", [0.8, 0.4, 0.3]) == (2, 0.0)
    newest = Ledger(tmp_path / "fork" / "private" / "ledger").noise_epochs
    assert len(newest) == noise_epochs + 1 and newest[-1].why.startswith("strategy changed")
