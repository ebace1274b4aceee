"""The statement follows from the ledger alone and hides nothing."""

import dataclasses
import json
import os
from types import SimpleNamespace
from typing import Any

import dp_accounting
import pytest
from dp_accounting import pld

from dpx.claim import calibration, caveats, statement
from dpx.claim.calibration import calibrate
from dpx.claim.spent import RunFacts
from dpx.data.declared_data import Vocabulary
from dpx.data.protected_units import unit_facts
from dpx.declaration import ConfigError
from dpx.durable import write_durably
from dpx.files.records import to_json
from dpx.files.run_folder import RunFolder
from dpx.mechanism.declared_mechanism import TargetEpsilon
from dpx.mechanism.discrete_gaussian import DiscreteGaussian
from dpx.mechanism.dp_sgd import DpSgd, NoPrivacy
from dpx.mechanism.mechanism_protocol import REACH
from dpx.privacy import accounting, closed_form, ledger
from dpx.privacy.declared_privacy import Deterministic, GdpClt, Pld, Privacy, Rdp
from dpx.privacy.ledger import Ledger
from dpx.sampler import FixedSize, Poisson, Shuffled, TruncatedPoisson
from dpx.sampler.batch_schedule import Linear
from dpx.statement import received, seals
from tests.made_statement import made_statement

N = 10_000
FIELDS = {
    "guarantee", "reasons", "unit", "rows_per_unit_max", "adjacency", "declared_size", "sampler", "mechanism", "delta", "epsilon",
    "unsupported", "planned", "spent", "assumptions", "not_covered", "ledger",
}  # fmt: skip

NOTHING_RAN = RunFacts.of(None)


def _against(of: Any, manifest: Any) -> list[str]:
    return caveats.reasons_against(of.data, of.privacy, of.sampler, of.seed, of.claim.reasons_of_mechanism, manifest)


def not_covered(experiment):
    return caveats.not_covered(experiment.mechanism, experiment.clipping_method, experiment.data, experiment.privacy)


def run(experiment, tmp_path, steps=None, size=N):
    calibrated = calibrate(experiment.claim, size)
    assert calibrated.noise_multiplier is not None
    ledger = Ledger(tmp_path / "ledger")
    ledger.note_units(unit_facts(experiment.data, experiment.privacy, None))
    for step in range(experiment.steps if steps is None else steps):
        ledger.append(step, calibration.Entries.of(experiment.claim).of_step(size, calibrated.noise_multiplier, 64))
    return to_json(statement.build(experiment.claim, None, calibrated, ledger))


def dp_accounting_alone(event):
    return pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL).compose(event).get_epsilon(1e-6)


def test_every_field_of_the_design_is_there_and_json(small, tmp_path):
    document = run(small(), tmp_path)
    assert document.keys() >= FIELDS and document["guarantee"] == "dp" and document["reasons"] == []
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_epsilon_is_recomputable_by_dp_accounting_alone(small, tmp_path):
    document = json.loads(json.dumps(run(small(steps=7), tmp_path)))
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(64 / N, dp_accounting.GaussianDpEvent(1.0)), 7)
    theirs = dp_accounting_alone(event)
    assert document["epsilon"]["pld"] == pytest.approx(theirs, rel=1e-9)
    listed = received.recompute(document, dp_accounting_alone)
    assert listed == pytest.approx(theirs, rel=1e-9)
    (entered,) = document["ledger"]["segments"]
    assert (entered["q"], entered["noise_multiplier"], entered["steps"]) == (64 / N, 1.0, [[0, 7]])


@pytest.mark.parametrize(
    "privacy",
    [
        {},
        pytest.param({"unit": "document", "rows_per_unit_max": 2}, marks=pytest.mark.slow),
        pytest.param({"adjacency": "replace_one"}, marks=pytest.mark.slow),
    ],
)
def test_a_ramp_is_stated_with_what_rounding_its_rates_up_costs(small, monkeypatch, privacy):
    monkeypatch.setattr(accounting, "RATES_MAX", 2)
    # A coarse grid for all that is compared: units take a second each.
    coarse = Pld(value_discretization_interval=5e-3)
    experiment = small(steps=4, accountant=coarse, batch_schedule=Linear(start=20, end=400, ramp_steps=4), privacy=privacy)
    calibrated = calibrate(experiment.claim, N)
    document = to_json(statement.build(experiment.claim, None, calibrated))
    rounded = document["ledger"]["rates_rounded_up"]
    assert rounded["distinct"] == 4 and rounded["composed"] == 2
    charges = ledger.releases(calibration.Entries.of(experiment.claim).planned(calibrated.batch_stages, N, 1.0))
    by = "rdp" if "rdp" in document["epsilon"] else "pld"
    exact = accounting.compose(charges, by, experiment.privacy.adjacency, coarse=5e-3).epsilon(1e-6)
    assert exact < document["epsilon"][by] <= exact + rounded["epsilon_error_at_most"] and rounded["accountant"] == by


def test_the_events_listed_are_those_of_the_runs_own_accountant(small, tmp_path):
    document = run(small(accountant=Deterministic(), noise={"noise_multiplier": 20.0}, steps=5), tmp_path)
    listed = received.recompute(document, dp_accounting_alone)
    assert listed == pytest.approx(document["epsilon"]["deterministic"], rel=2e-3)
    assert listed > 2 * document["epsilon"]["pld"], "the other accountants know of the sampling"


def test_planned_and_spent_differ_until_the_end(small, tmp_path):
    document = run(small(), tmp_path, steps=5)
    assert document["planned"]["steps"] == 20 and document["spent"]["steps"] == 5
    assert document["epsilon"] == document["planned"]["epsilon"], "the headline is that of the planned end"
    assert "depends neither on the data" in document["spent"]["valid_only_if"]
    assert 0 < document["spent"]["epsilon"]["pld"] < document["planned"]["epsilon"]["pld"]


def test_a_finished_run_spends_what_was_planned(small, tmp_path):
    document = run(small(), tmp_path)
    assert document["spent"]["epsilon"] == document["planned"]["epsilon"]


def test_the_plan_is_stated_and_nothing_spent_before_the_first_step(small):
    experiment = small()
    document = to_json(statement.build(experiment.claim, None, calibrate(experiment.claim, N)))
    assert document["epsilon"] == document["planned"]["epsilon"] and document["epsilon"]["pld"] > 0
    assert document["spent"]["epsilon"] == {"pld": 0.0, "rdp": 0.0} and document["spent"]["steps"] == 0


def test_epsilon_at_several_deltas_falls(small, tmp_path):
    rows = run(small(), tmp_path)["epsilon_at"]
    values = [row["epsilon"]["pld"] for row in rows]
    assert len(rows) >= 6 and values == sorted(values, reverse=True)
    assert 1e-6 in [row["delta"] for row in rows] and 1 / N in [row["delta"] for row in rows]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seed": 3}, "fixed_seed"),
        ({"data": {"vocabulary": Vocabulary(size=500, fit_on="protected")}}, "vocabulary"),
    ],
)
def test_reasons_take_the_guarantee_and_every_epsilon(small, tmp_path, change, reason):
    document = run(small(**change), tmp_path)
    assert document["guarantee"] == "none" and document["reasons"][0].startswith(reason)
    assert document["epsilon"] == {} and document["epsilon_at"] == []
    assert {item["name"] for item in document["unsupported"]} >= {"epsilon/pld"}


def test_what_the_data_room_found_outranks_the_declaration(small):
    experiment = small()
    manifest = SimpleNamespace(vocabulary_source="protected", vocabulary_checksum="pieces", rows={"protected": N})
    assert to_json(statement.build(experiment.claim, manifest, calibrate(experiment.claim, N)))["guarantee"] == "none"


def test_cross_document_pairs_take_the_guarantee_of_documents(small):
    experiment = small(data={"pairs": "cross_document"})
    # The data room refuses this pair of declarations; the statement must not depend on that.
    object.__setattr__(experiment, "privacy", dataclasses.replace(experiment.privacy, unit="document"))
    (reason,) = _against(experiment, None)
    assert reason.startswith("pairs")


def test_an_assumed_sampler_is_reported_as_unsupported_only(small, tmp_path):
    claim = {"privacy": {"adjacency": "replace_one"}, "accountant": Rdp(), "noise": TargetEpsilon(epsilon=2.0)}
    document = run(small(sampler=FixedSize(assumed="poisson"), **claim), tmp_path)
    (pld_entry, rdp_entry) = document["unsupported"]
    assert pld_entry["name"] == "epsilon/pld/poisson" and "fixed_size ran" in pld_entry["reason"]
    assert 1.99 < rdp_entry["value"] <= 2.0 and document["epsilon"]["rdp"] > 3.0
    assert document["sampler"]["name"] == "fixed_size" and document["sampler"]["assumed"] == "poisson"


def test_a_shuffled_run_shows_the_epsilon_of_random_allocation_as_unsupported_only(small, tmp_path):
    of = {"noise": {"noise_multiplier": 1.0}, "accountant": Rdp(value_discretization_interval=5e-3)}
    document = run(small(sampler=Shuffled(assumed="random_allocation"), **of), tmp_path)
    values = {one["name"]: one["value"] for one in document["unsupported"]}
    assert set(values) == {"epsilon/pld/random_allocation", "epsilon/rdp/random_allocation"}
    assert values["epsilon/pld/random_allocation"] < document["epsilon"]["pld"]
    with pytest.raises(ConfigError, match="in several steps"):
        Shuffled(assumed="random_allocation").check(Privacy(delta=1e-6, unit="document", rows_per_unit_max=2), Rdp())


def test_shuffled_passes_are_not_amplified(small, tmp_path):
    document = run(small(sampler=Shuffled(), steps=5, noise={"noise_multiplier": 4.0}), tmp_path)
    assert document["epsilon"]["pld"] == pytest.approx(closed_form.epsilon(1 / 4, 1e-6), rel=2e-3)


def test_the_central_limit_never_stands_under_epsilon(small, tmp_path):
    document = run(small(accountant=GdpClt()), tmp_path)
    (item,) = document["unsupported"]
    assert item["name"] == "epsilon/gdp_clt" and item["value"] < document["epsilon"]["pld"]
    assert list(document["epsilon"]) == ["pld", "rdp"] and document["accountant"] == "pld"


@pytest.mark.parametrize(("sampler", "adjacency"), [(TruncatedPoisson(), "zero_out"), (FixedSize(), "replace_one")])
def test_a_sampler_accounted_at_another_size_has_no_guarantee(small, sampler, adjacency):
    experiment = small(sampler=sampler, data={"declared_size": N}, privacy={"adjacency": adjacency})
    manifest = SimpleNamespace(vocabulary_source="public_split", vocabulary_checksum="pieces", rows={"protected": N + 1})
    assert _against(experiment, manifest)[0].startswith("sampler")
    manifest.rows["protected"] = N
    assert _against(experiment, manifest) == []


def test_cross_document_pairs_are_sound_for_rows(small, tmp_path):
    assert run(small(data={"pairs": "cross_document"}), tmp_path)["guarantee"] == "dp"


def test_a_large_delta_is_listed(small, tmp_path):
    document = run(small(privacy={"delta": 1e-3, "allow_large_delta": True}), tmp_path)
    assert any("allow_large_delta" in line for line in document["assumptions"])


def test_plain_training_claims_nothing(small):
    experiment = small(mechanism=NoPrivacy())
    document = to_json(statement.build(experiment.claim, None, calibrate(experiment.claim, N)))
    assert document["guarantee"] == "not_private" and document["epsilon"] == {}


def test_seeded_noise_has_no_strength(small, tmp_path):
    assert run(small(), tmp_path)["mechanism"]["generator_strength_bits"] == 64
    assert run(small(seed=0), tmp_path / "seeded")["mechanism"]["generator_strength_bits"] == 0


def test_how_far_noise_reaches_is_said_where_it_ends(small, tmp_path):
    assert run(small(), tmp_path)["mechanism"]["noise_reach_in_deviations"] == REACH
    on_a_grid = run(small(mechanism=DiscreteGaussian(), accountant=Rdp()), tmp_path / "grid")["mechanism"]
    assert on_a_grid["noise_reach_in_deviations"] is None and on_a_grid["grid_margin"] > 0


def test_own_accountant_comes_first(small, tmp_path):
    document = run(small(accountant=Rdp()), tmp_path)
    assert document["accountant"] == "rdp" and list(document["epsilon"]) == ["rdp", "pld"]


def test_writing_is_atomic(small, tmp_path, monkeypatch):
    folder, entered = RunFolder(tmp_path), Ledger(tmp_path / "private" / "ledger")
    seals.write_statement(folder, entered, made_statement(entered))
    path = folder.release / "privacy.json"
    before = path.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        write_durably(path, '{"a": 2}')
    assert path.read_text() == before and os.listdir(folder.release) == ["privacy.json"]


def test_sampler_and_mechanism_are_those_that_ran(small, tmp_path):
    document = run(small(), tmp_path)
    assert document["sampler"]["name"] == Poisson().name
    assert document["mechanism"]["noise_batch_ratio"] == 1.0 / 64
    mechanism = document["mechanism"]
    assert dataclasses.asdict(small().clip) == {"clipping_norm": mechanism["clipping_norm"], "kind": mechanism["clip"]}


def test_what_is_public_and_what_is_not_covered_is_said(small):
    plain, grouped = small(), small(privacy={"unit": "document", "rows_per_unit_max": 3})
    assert any(
        "the number of rows of each document is public too" in line
        for line in caveats.assumptions(grouped.data, grouped.privacy, grouped.train, grouped.audit, None, N, NOTHING_RAN)
    )
    assert not any(
        "is public too" in line for line in caveats.assumptions(plain.data, plain.privacy, plain.train, plain.audit, None, N, NOTHING_RAN)
    )
    declared = small(data={"declared_size": N}, privacy={"adjacency": "add_remove"})
    assert any(f"above the declared {N}" in line for line in not_covered(declared))
    assert any("forged ledger" in line for line in not_covered(small()))
    for method, mechanism, expected in (("ghost", DpSgd(), True), ("vmap", DpSgd(), False), ("ghost", NoPrivacy(), False)):
        limits = not_covered(small(clipping_method={"name": method}, mechanism=mechanism))
        assert (caveats.TWO_PASSES in limits) == expected


HIDDEN = "the noise may be larger than the signal in the gradients"


@pytest.mark.parametrize(
    ("size", "batch", "delta", "words"),
    [
        (355, 64, 1e-6, f"only 355 rows are protected: {HIDDEN}. Use more text."),
        (1000, 500, 1e-6, f"only 1,000 rows are protected and a step draws 50% of the rows: {HIDDEN}. Use more text."),
        (118_611, 1024, 1e-6, None),
        (10_000, 64, 5e-5, "delta is 0.5 of 1/N: the guarantee is weak. Use a smaller privacy.delta."),
    ],
)
def test_little_data_is_hinted_at_in_one_sentence(size, batch, delta, words):
    hints = caveats.little_data(size, "row", batch, delta)
    assert (hints == []) if words is None else (len(hints) == 1 and words in hints[0])
