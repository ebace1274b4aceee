"""Deliberately broken claims, each with the check that catches it; the sound claim passes the same check."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import dp_accounting
import numpy as np
import pytest

from dpx import sampler
from dpx.claim import calibration, statement
from dpx.claim.calibration import calibrate
from dpx.data.protected_units import unit_facts
from dpx.declaration import ConfigError
from dpx.files.records import to_json
from dpx.privacy import accounting, closed_form, events, ledger
from dpx.privacy.events import Release
from dpx.privacy.ledger import Ledger
from dpx.randomness import RootSecret
from dpx.sampler import Poisson, Shuffled

N = 10_000
SECRET = RootSecret.from_seed(0)


def caught(check):
    accounting._composed_losses.cache_clear()  # what the sound code composed says nothing of the broken one
    with pytest.raises((AssertionError, ConfigError)):
        check()


def entered(experiment, path, steps, noise_multiplier=1.0):
    found = Ledger(path)
    found.note_units(unit_facts(experiment.data, experiment.privacy, None))
    for step in range(steps):
        found.append(step, calibration.Entries.of(experiment.claim).of_step(N, noise_multiplier, 64))
    return found


def test_shuffled_but_charged_as_poisson(small, tmp_path):
    experiment = small(sampler=Shuffled())

    def check():
        # Whatever the accountant says, one pass without amplification costs at least one Gaussian release.
        charges = ledger.releases(entered(experiment, tmp_path / str(len(list(tmp_path.iterdir()))), 20).segments())
        assert accounting.compose(charges).epsilon(1e-6) >= closed_form.epsilon(1.0, 1e-6) * 0.999

    check()
    object.__setattr__(experiment.sampler, "name", "poisson")
    caught(check)


def test_surplus_rows_dropped_under_poisson(monkeypatch):
    def check():
        drawn = [sampler.draw(Poisson(), 1_000, 0.1, lambda *place: SECRET.generator("sample", *place), step) for step in range(400)]
        counts = np.array([len(part) for part in drawn])
        # The draw's variance is that of a binomial: a cap, at any height that matters, takes it away.
        assert abs(counts.var() / 90 - 1) < 0.3 and counts.max() > 120

    check()
    # `dpx.sampler.poisson` is the function for loops of users too.
    module = sys.modules[Poisson.__module__]
    whole = module.independent
    monkeypatch.setattr(module, "independent", lambda *given: whole(*given)[:105])
    caught(check)


def test_ledger_reset_on_resume(small, tmp_path):
    experiment = small()

    def check(path):
        entered(experiment, path, 10)
        resumed = Ledger(path)
        resumed.append(10, calibration.Entries.of(experiment.claim).of_step(N, 1.0, 64))
        assert sum(count for _, count in ledger.releases(Ledger(path).segments())) == 11

    check(tmp_path / "sound")

    class Forgetful(Ledger):
        def __init__(self, path):
            Path(path).unlink(missing_ok=True)
            super().__init__(path)

    def broken():
        entered(experiment, tmp_path / "broken", 10)
        Forgetful(tmp_path / "broken").append(10, calibration.Entries.of(experiment.claim).of_step(N, 1.0, 64))
        assert sum(count for _, count in ledger.releases(Ledger(tmp_path / "broken").segments())) == 11

    caught(broken)


def test_ledger_not_synced_before_release(small, tmp_path, monkeypatch):
    import os

    def check():
        synced = []
        fsync = os.fsync
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda handle: (synced.append(handle), fsync(handle)))
            found = Ledger(tmp_path / "ledger")
            synced.clear()
            found.append(0, calibration.Entries.of(small().claim).of_step(N, 1.0, 64))
        assert synced

    check()
    monkeypatch.setattr(Ledger, "append", lambda self, step, entry: self._entered.append((self.identity, step, entry)))
    caught(check)


DOCUMENT = {"unit": "document", "rows_per_unit_max": 3}


@pytest.mark.parametrize("mutant", ["entry without the cap", "mixture event replaced"])
def test_row_event_for_a_document_unit(small, tmp_path, monkeypatch, mutant):
    experiment = small(privacy=DOCUMENT)

    def check():
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        charges = ledger.releases(entered(experiment, path, 3).segments())
        # A document of three rows is at least as exposed as one row of three times the rate, and more than a row.
        row = accounting.compose([(Release(noise_multiplier=1.0, sampling_probability=64 / N), 3)], interval=1e-2).epsilon(1e-6)
        assert accounting.compose(charges, interval=1e-2).epsilon(1e-6) > 1.3 * row

    check()
    if mutant == "entry without the cap":
        sound = calibration.Entries.of_step
        monkeypatch.setattr(calibration.Entries, "of_step", lambda *given: dataclasses.replace(sound(*given), rows_per_unit=1))
    else:
        monkeypatch.setitem(events.TABLE, ("group", "zero_out", "pld"), events.TABLE[("poisson", "zero_out", "pld")])
    caught(check)


@pytest.mark.parametrize("kind", ["gaussian", "fixed_size"])
def test_renyi_of_replaced_units_without_the_factor_2(monkeypatch, kind):
    def check():
        release = Release(noise_multiplier=4.0, kind=kind, size=100, sample_size=100)
        found = accounting.compose([(release, 5)], "rdp", "replace_one").epsilon(1e-6)
        assert found >= closed_form.epsilon(2 * 5**0.5 / 4.0, 1e-6)

    check()

    def once(release):
        event = dp_accounting.GaussianDpEvent(release.noise_multiplier)
        return dp_accounting.SampledWithoutReplacementDpEvent(100, 100, event) if kind == "fixed_size" else event

    monkeypatch.setitem(events.TABLE, (kind, "replace_one", "rdp"), once)
    caught(check)


def test_counted_size_used_under_add_remove(small, monkeypatch):
    experiment = small(privacy={"adjacency": "add_remove"}, data={"declared_size": 20_000})

    def check():
        # Neighbours differ in the count: nothing that is released may follow it.
        assert calibrate(experiment.claim, N) == calibrate(experiment.claim, N + 1)

    check()
    monkeypatch.setattr(calibration, "check_claim", lambda _, size: size)
    caught(check)


def test_an_approximation_under_epsilon(small, tmp_path):
    from dpx.privacy.declared_privacy import GdpClt

    experiment = small(accountant=GdpClt())
    document = to_json(
        statement.build(
            experiment.claim,
            SimpleNamespace(vocabulary_source="public_split", vocabulary_checksum="pieces", rows={"protected": N}),
            calibrate(experiment.claim, N),
            entered(experiment, tmp_path / "l", 20),
        )
    )

    def check(found):
        assert not {"gdp_clt"} & found["epsilon"].keys()
        # No value under epsilon may lie below what the tightest accountant proves, to its grid.
        assert min(found["epsilon"].values()) >= document["epsilon"]["pld"] * 0.999

    check(document)
    value = document["unsupported"][0]["value"]
    caught(lambda: check(document | {"epsilon": document["epsilon"] | {"gdp_clt": value}}))
    caught(lambda: check(document | {"epsilon": {"pld": value}}))
