"""Any combination of declarations gives a consistent statement or one line; none prints an epsilon its sampler does not support."""

import dataclasses
import json
import math
import random

import pytest

from dpx.batch_schedule import Constant, Linear, Staged
from dpx.data.declarations import Vocabulary
from dpx.declaration import Refused
from dpx.mechanism.declarations import DpSgd, Flat, Multiplier, NoiseBatchRatio, NoPrivacy, Normalised, TargetEpsilon
from dpx.privacy import accounting, calibration, events, ledger, statement
from dpx.privacy.calibration import calibrate
from dpx.privacy.declarations import Deterministic as WithoutAmplification
from dpx.privacy.declarations import GdpClt, Pld, Privacy, Rdp
from dpx.privacy.ledger import Ledger
from dpx.sampler import BallsInBins, Deterministic, FixedSize, Poisson, Shuffled, TruncatedPoisson

N = 1_000
STEPS = 12

CHOICES = {
    "sampler": [
        Poisson(),
        TruncatedPoisson(),
        *(kind(assumed=assumed) for kind in (FixedSize, Shuffled, Deterministic, BallsInBins) for assumed in (None, "poisson")),
    ],
    "accountant": [Pld(), Rdp(), WithoutAmplification(), GdpClt()],
    "mechanism": [DpSgd()] * 6 + [NoPrivacy()],
    "clip": [Flat(clipping_norm=0.1), Normalised(clipping_norm=1.0)],
    "noise": [
        Multiplier(noise_multiplier=0.8),
        Multiplier(noise_multiplier=5.0),
        NoiseBatchRatio(noise_batch_ratio=0.05),
        TargetEpsilon(epsilon=3.0),
    ],
    "batch_schedule": [Constant(size=50), Constant(size=N), Staged(sizes=[20, 50], stage_steps=4), Linear(start=10, end=50, ramp_steps=8)],
    "privacy": [
        Privacy(delta=delta, adjacency=adjacency, unit=unit, rows_per_unit_max=rows, allow_large_delta=delta > 1e-3)
        for delta in (1e-5, 1e-2)
        for adjacency in ("zero_out", "add_remove", "replace_one")
        for unit, rows in (("row", 1), ("document", 1), ("document", 3))
    ],
    "seed": [None] * 5 + [1],
}
DATA = [{}, {"declared_size": N}, {"vocabulary": Vocabulary(size=500, fit_on="protected")}]


def drawn(base, seed):
    """One combination; `Refused` where two of its declarations already contradict each other."""
    choose = random.Random(seed)
    changes = {name: choose.choice(options) for name, options in CHOICES.items()}
    return dataclasses.replace(base, steps=STEPS, data=dataclasses.replace(base.data, **choose.choice(DATA)), **changes)


def stated(experiment, path):
    calibrated = calibrate(experiment, N)
    if calibrated.noise_multiplier is None:
        return calibrated, statement.build(experiment, None, calibrated), []
    entered = Ledger(path)
    for step in range(STEPS):
        batch = experiment.batch_schedule.at(step)
        entered.append(step, calibration.entry(experiment, calibrated.size, calibrated.noise_multiplier, batch))
    return calibrated, statement.build(experiment, None, calibrated, entered), entered.runs()


def check(experiment, calibrated, document, runs):
    assert json.loads(json.dumps(document, allow_nan=False))["guarantee"] in ("dp", "none", "not_private")
    assert (document["guarantee"] == "dp") == (not document["reasons"])
    assert bool(document["epsilon"]) == (document["guarantee"] == "dp")
    if document["guarantee"] == "not_private":
        return
    assert document["spent"]["epsilon"] == document["planned"]["epsilon"]
    unsupported = {item["name"] for item in document["unsupported"]}
    assert ("epsilon/gdp_clt" in unsupported) == isinstance(experiment.accountant, GdpClt)
    assert ("epsilon/pld/poisson" in unsupported) == (experiment.sampler.assumed is not None)
    charges = ledger.releases(runs)
    for name, value in document["epsilon"].items():
        # Composing by what the ledger says ran must be allowed, and must give the same number.
        found = accounting.compose(accounting.bucketed(charges), name, experiment.privacy.adjacency).epsilon(experiment.privacy.delta)
        assert value == accounting.finite(found)
    kinds = {release.kind for release, _ in charges}
    assert kinds == {
        "group" if experiment.privacy.rows_per_unit_max > 1 and experiment.sampler.name == "poisson" else experiment.sampler.name
    }
    if isinstance(experiment.noise, TargetEpsilon) and experiment.sampler.assumed is None:
        own = calibration.accountant_of(experiment)[0]
        assert calibrated.epsilon[own] <= experiment.noise.epsilon


def try_one(base, seed, path, monkeypatch):
    # A coarse grid is sound and quick; what is checked here does not depend on it.
    monkeypatch.setattr(accounting, "grid", lambda _: 5e-3)
    try:
        experiment = drawn(base, seed)
        found = stated(experiment, path)
    except Refused as refusal:
        text = str(refusal)
        assert "\n" not in text and len(text) < 400 and refusal.fix
        return False
    check(experiment, *found)
    return True


@pytest.mark.parametrize("seed", range(40))
def test_a_combination_is_consistent_or_refused(small, seed, tmp_path, monkeypatch):
    try_one(small(), seed, tmp_path / "ledger", monkeypatch)


@pytest.mark.soak
def test_five_hundred_combinations(small, tmp_path, monkeypatch):
    stood = sum(try_one(small(), seed, tmp_path / f"ledger{seed}", monkeypatch) for seed in range(500))
    assert 100 < stood < 500


def test_every_event_of_the_table_has_a_kind_the_ledger_can_write():
    kinds = {kind for kind, _, _ in events.TABLE}
    written = {sampler.name for sampler in CHOICES["sampler"]} | {"group", "gaussian"}
    assert kinds == written and math.isfinite(len(kinds))
