"""What a run of dp_fp states: nothing where anything below the noise is trained, else the text alone, and joint accounts likewise."""

import functools
import json

import pytest

from dpx.claim import spent, statement
from dpx.claim.calibration import Entries, calibrate
from dpx.data.protected_units import unit_facts
from dpx.declaration import ConfigError
from dpx.files.records import to_json
from dpx.files.run_folder import RunFolder
from dpx.job.account import Account
from dpx.job.explain import explain
from dpx.privacy import accounting, events
from dpx.privacy.events import Release
from dpx.privacy.ledger import Ledger
from dpx.statement import seals
from dpx.statement.statement_records import RunStatement
from tests.composed import composed
from tests.planned import plan
from tests.privacy.test_unit_facts import MANIFEST

SIZE, STEPS, MICRO = 2000, 30, 4
FP = ("model=micro", "task=classification", "data=synthetic_labels", "mechanism=dp_fp", f"mechanism.micro_batches={MICRO}")
FP += ("privacy.adjacency=zero_out_text", "privacy.delta=1e-4", f"data.declared_size={SIZE}", "batch_schedule.size=40", f"steps={STEPS}")
# What is compared here is composed on the same coarse grid.
COARSE = 5e-3
FP += (f"+accountant.value_discretization_interval={COARSE}",)
LIMIT = ("noise=target_clt", "noise.epsilon=2")


def stated(tmp_path, *given):
    """(experiment, calibrated, statement) of a run whose steps were all entered."""
    experiment, *_ = composed(*FP, *given)
    calibrated = calibrate(experiment.claim, SIZE)
    assert calibrated.noise_multiplier is not None
    ledger = Ledger(tmp_path / "ledger")
    ledger.note_units(unit_facts(experiment.data, experiment.privacy, MANIFEST))
    for step in range(STEPS):
        ledger.append(step, Entries.of(experiment.claim).of_step(SIZE, calibrated.noise_multiplier, 40))
    document = statement.build(experiment.claim, None, calibrated, ledger)
    return experiment, calibrated, json.loads(json.dumps(to_json(document), allow_nan=False))


def bound(sigma):
    charges = [(Release(noise_multiplier=sigma, sampling_probability=40 / SIZE / MICRO, kind="slot_revealed"), STEPS * MICRO)]
    return accounting.compose(charges, "pld", "zero_out_text", coarse=COARSE).epsilon(1e-4)


def hidden(sigma, accountant):
    charges = [(Release(noise_multiplier=sigma, sampling_probability=40 / SIZE / MICRO), STEPS * MICRO)]
    return accounting.compose(charges, accountant, coarse=COARSE).epsilon(1e-4)


def test_with_everything_below_the_noise_frozen_the_text_is_protected(tmp_path):
    _, calibrated, document = stated(tmp_path, *LIMIT, "train=last_layer")
    sigma = calibrated.noise_multiplier
    assert (document["guarantee"], document["reasons"], document["adjacency"]) == ("dp", [], "zero_out_text")
    assert document["epsilon"] == {"pld": pytest.approx(bound(sigma))} and document["train"] == "last_layer"
    assert document["planned"]["epsilon"] == document["spent"]["epsilon"] == document["epsilon"]
    numbers = {one["name"]: one for one in document["unsupported"]}
    assert set(numbers) == {"epsilon/pld/poisson", "epsilon/rdp/poisson", "epsilon/gdp_clt"}
    assert numbers["epsilon/gdp_clt"]["value"] == pytest.approx(2.0) and "small privacy losses" in numbers["epsilon/gdp_clt"]["reason"]
    for accountant in ("pld", "rdp"):
        one = numbers[f"epsilon/{accountant}/poisson"]
        assert one["value"] == pytest.approx(hidden(sigma, accountant)) and one["value"] < document["epsilon"]["pld"]
        assert "taking part stays hidden" in one["reason"]
    assert sum("mechanism=dp_fp" in line for line in document["not_covered"]) == 2
    assert any("same label in the same place" in line for line in document["assumptions"])
    facts = document["mechanism"]
    assert facts["micro_batches"] == MICRO and facts["noise_batch_ratio"] is None and facts["noise_multiplier"] == sigma
    (listed,) = document["ledger"]["events"]
    assert listed["count"] == STEPS * MICRO and events.restore(listed["event"]).noise_multiplier == sigma


@pytest.mark.parametrize("train", [("train=all",), ("train=bias", "train.head=true"), ("train=top", "train.layers=1")])
def test_with_anything_below_the_noise_trained_there_is_no_guarantee(tmp_path, train):
    _, calibrated, document = stated(tmp_path, *LIMIT, *train)
    assert document["guarantee"] == "none" and document["epsilon"] == {} and document["epsilon_at"] == []
    (reason,) = document["reasons"]
    assert "read the texts again" in reason
    numbers = {one["name"]: one for one in document["unsupported"]}
    assert (
        numbers["epsilon/pld"]["value"] == pytest.approx(bound(calibrated.noise_multiplier)) and reason in numbers["epsilon/pld"]["reason"]
    )
    assert {"epsilon/pld/poisson", "epsilon/rdp/poisson", "epsilon/gdp_clt"} < set(numbers)


def test_a_target_for_epsilon_is_met_by_what_holds(tmp_path):
    _, calibrated, document = stated(tmp_path, "noise=target_epsilon", "noise.epsilon=12", "train=last_layer")
    assert document["epsilon"]["pld"] <= 12 < 1.001 * bound(0.999 * calibrated.noise_multiplier)
    assert document["epsilon"]["pld"] == pytest.approx(12, rel=1e-3)


def test_the_limit_is_listed_once_whatever_the_accountant(tmp_path):
    _, _, document = stated(tmp_path, *LIMIT, "train=last_layer", "accountant=gdp_clt")
    assert [one["name"] for one in document["unsupported"]].count("epsilon/gdp_clt") == 1 and list(document["epsilon"]) == ["pld"]


@pytest.mark.parametrize(("train", "guarantee"), [("last_layer", "dp"), ("all", "none")])
def test_plan_and_explanation_say_the_same(train, guarantee):
    experiment, *_ = composed(*FP, *LIMIT, f"train={train}")
    planned = plan(experiment)
    assert planned["guarantee"] == guarantee and planned["noise_batch_ratio"] is None and planned["adjacency"] == "zero_out_text"
    names = [one["name"] for one in planned["unsupported"]]
    assert names[-3:] == ["epsilon/pld/poisson", "epsilon/rdp/poisson", "epsilon/gdp_clt"]
    assert names[:-3] == ([] if guarantee == "dp" else ["epsilon/pld"]) and bool(planned["epsilon"]) == (guarantee == "dp")
    words = "\n".join(explain(experiment, SIZE, None).words)
    assert ("GUARANTEE: NONE. dp_fp: train=all" in words) == (guarantee == "none")
    for part in (
        "What is protected: the text of one row, not its label.",
        "with the text of one row blanked out; its label, and that it is there, stay as they are",
        "How: the pooled vector of each drawn row is clipped to norm 1;",
        "times that norm is added to each of them, before the loss",
        f"A step is {MICRO} micro-batches",
        "sampling amplifies nothing",
    ):
        assert part in words, part
    assert "that the draw stays hidden" not in words and "to each sum" not in words


def folder_of(place, *given):
    """A run folder with ledger and statement, as a run leaves them."""
    experiment, *_ = composed(*given)
    calibrated = calibrate(experiment.claim, SIZE)
    assert calibrated.noise_multiplier is not None
    entered = Ledger(place / "private" / "ledger")
    entered.note_units(unit_facts(experiment.data, experiment.privacy, MANIFEST))
    for step in range(STEPS):
        entered.append(step, Entries.of(experiment.claim).of_step(SIZE, calibrated.noise_multiplier, 40))
    document = statement.build(experiment.claim, None, calibrated, entered)
    assert isinstance(document, RunStatement) and list(document.ledger.segments) == entered.segments() and spent.CHAIN_SHOWS
    seals.write_statement(RunFolder(place), entered, document)
    segments = entered.segments()
    entered.close()
    return place, segments


@pytest.fixture
def both(tmp_path):
    rows, of_rows = folder_of(tmp_path / "rows", *FP, *LIMIT, "train=last_layer")
    sums, of_sums = folder_of(
        tmp_path / "sums",
        *(one for one in FP if not one.startswith(("mechanism", "privacy.adj"))),
        "noise=multiplier",
        "noise.noise_multiplier=1.0",
    )
    return (rows, sums), of_rows + of_sums


def test_a_joint_account_with_whole_rows_states_the_text_alone(both, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dpx.job.account.POINTS", 2)
    monkeypatch.setattr(accounting, "compose", functools.partial(accounting.compose, coarse=COARSE))
    folders, _ = both
    named = [str(one) for one in folders]
    experiment = composed(FP[-1])[0]
    for adjacency, words in ((None, "job.adjacency"), ("zero_out", "label and place are released")):
        with pytest.raises(ConfigError, match=words):
            Account(ledgers=named, adjacency=adjacency, delta=1e-4)(experiment, RunFolder(tmp_path / "no"))
    Account(ledgers=named, adjacency="zero_out_text", delta=1e-4)(experiment, RunFolder(tmp_path / "joint"))
    document = json.loads((tmp_path / "joint" / "release" / "account.json").read_text())
    assert document["adjacency"] == document["unit"]["adjacency"] == "zero_out_text"
    assert "What is protected: the text of one row, not its label or that it is there, under zero_out_text." in capsys.readouterr().out
    (at,) = [table for table in document["tables"] if table["name"] == "epsilon_of_delta"]
    epsilon = dict(tuple(row) if isinstance(row, list) else (row["delta"], row["epsilon"]) for row in at["rows"])[1e-4]
    alone = composed(*FP, *LIMIT, "train=last_layer")[0]
    sigma = calibrate(alone.claim, SIZE).noise_multiplier
    sums = accounting.compose([(Release(noise_multiplier=1.0, sampling_probability=40 / SIZE), STEPS)]).epsilon(1e-4)
    assert max(bound(sigma), sums) < epsilon < bound(sigma) + sums
