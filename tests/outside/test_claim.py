"""What rests on a package is that package's word by every road: statement, plan, ledger, fork, search, account, explanation."""

import dataclasses
import json

import dp_accounting
import pytest
from dp_accounting import rdp

from dpx import config
from dpx.claim import calibration, statement
from dpx.claim.study import Study
from dpx.config import recipes
from dpx.config.experiment import Experiment
from dpx.data.protected_units import unit_facts
from dpx.declaration import ConfigError
from dpx.files.records import to_json
from dpx.job import account, explain
from dpx.launch.search import search_of
from dpx.privacy import events
from dpx.privacy.ledger import Ledger
from dpx.privacy.segments import LedgerEntry, Segment, join
from dpx.statement import outside_code, received
from dpx.training import fingerprint
from tests.outside.made_up import as_if_unimported, on_path, pond
from tests.planned import plan
from tests.privacy.test_ledger import forked
from tests.processes import COARSE
from tests.sealed import sealed_anew
from tests.tuning import made_up as trials

SIZE, BATCH, SIGMA = 1000, 16, 2.0
BY = "dp_by_dpx_pond"
OWN = [
    "steps=3",
    "accountant=rdp",
    COARSE,
    "noise=multiplier",
    f"noise.noise_multiplier={SIGMA}",
    "privacy.delta=1e-4",
    "batch_schedule.size=16",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    path = pond(tmp_path_factory.mktemp("site"))
    with on_path(path):
        yield path


def built(*overrides: str) -> Experiment:
    return config.build(recipes.compose([*overrides, f"data.declared_size={SIZE}"]))[0]


def entered(experiment: Experiment, path, steps: int = 3) -> Ledger:
    """The ledger that so many steps leave."""
    found = Ledger(path / "ledger")
    found.note_units(unit_facts(experiment.data, experiment.privacy, None))
    for step in range(steps):
        found.append(step, calibration.Entries.of(experiment.claim).of_step(SIZE, SIGMA, BATCH))
    return found


def stated(experiment: Experiment, held: Ledger | None = None) -> dict:
    return to_json(statement.build(experiment.claim, None, calibration.calibrate(experiment.claim, SIZE), held))


def no_bound(document: dict) -> None:
    """Nothing under any `epsilon`, the numbers elsewhere, each with the package's name."""
    assert document["guarantee"] == BY and document["epsilon"] == {} and document.get("epsilon_at", []) == []
    assert document["unsupported"] and all("dpx_pond" in one["reason"] for one in document["unsupported"])
    assert not any((document.get(name) or {}).get("epsilon") for name in ("planned", "spent"))


@pytest.mark.parametrize("part", ["clip=smooth", "sampler=coins", "mechanism=echo", "model=brook", "task=every_other", "data=pebbles"])
def test_any_one_part_makes_the_claim_its_packages(site, part, tmp_path):
    beside = {"model=brook": ["task=every_other"], "task=every_other": ["model=brook"], "data=pebbles": ["task=mlm", "model=micro"]}
    experiment = built(*OWN, part, *beside.get(part, []), *([] if part.startswith("data") else ["data=synthetic", "data.pairs=none"]))
    document = stated(experiment, entered(experiment, tmp_path))
    no_bound(document)
    (facts,) = document["outside_code"]
    key = {"data": "data.source"}.get(part.partition("=")[0], part.partition("=")[0])
    assert (facts["package"], facts["version"]) == ("dpx_pond", "0.3.1") and facts["parts"][key].startswith("dpx_pond.")
    assert {run["by"] for run in document["ledger"]["segments"]} == {"dpx_pond"}
    no_bound(plan(experiment) | {"planned": {}, "spent": {}})


@pytest.fixture
def unimported():
    with as_if_unimported():
        yield


def test_dpx_alone_is_dp_and_its_ledger_says_nothing_of_packages(site, unimported, tmp_path):
    document = stated(experiment := built(*OWN), entered(experiment, tmp_path))
    assert document["guarantee"] == "dp" and document["epsilon"]["rdp"] > 0 and document["outside_code"] == []
    assert {run[name] for run in document["ledger"]["segments"] for name in ("by", "event")} == {None}
    assert '"by": null' in (tmp_path / "ledger").read_text()


def test_no_reason_is_hidden_behind_a_package(site):
    document = stated(built(*OWN, "clip=smooth", "seed=1"))
    assert document["guarantee"] == "none" and "fixed_seed" in document["unsupported"][0]["reason"]


def test_an_epsilon_that_trusts_a_package_is_named_with_its_condition_and_other_numbers_as_no_bound():
    assert (
        outside_code.heading("epsilon/pld", "dp_by_dpx_pond+dpx_reed")
        == "epsilon (pld), if the code of dpx_pond and dpx_reed does what it declares"
    )
    assert outside_code.heading("epsilon/rdp/one_copy", "dp") == "not a bound: epsilon (rdp, of one copy)"
    assert outside_code.heading("epsilon/rdp/poisson", "dp_by_dpx_pond") == "not a bound: epsilon (rdp, as if by sampler=poisson)"
    assert {outside_code.heading("epsilon/pld", guarantee) for guarantee in ("dp", "none")} == {"not a bound: epsilon (pld)"}


def test_an_own_event_is_composed_as_it_was_given(site, tmp_path):
    experiment = built(*OWN, "mechanism=echo")
    document = stated(experiment, entered(experiment, tmp_path))
    once = dp_accounting.GaussianDpEvent(2**0.5 * SIGMA)
    event = dp_accounting.PoissonSampledDpEvent(BATCH / SIZE, dp_accounting.ComposedDpEvent([once, once]))
    theirs = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    expected = theirs.compose(dp_accounting.SelfComposedDpEvent(event, 3)).get_epsilon(1e-4)
    assert document["unsupported"][0]["value"] == pytest.approx(expected, rel=1e-6)
    # Two releases at sqrt(2) sigma are worth one at sigma.
    with as_if_unimported():
        assert expected == pytest.approx(stated(built(*OWN))["epsilon"]["rdp"], rel=1e-6)
    again = received.recompute(json.loads(json.dumps(document)), lambda event: theirs_of(event))
    assert again == pytest.approx(expected, rel=1e-6)


def theirs_of(event) -> float:
    found = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL).compose(event)
    return float(found.get_epsilon(1e-4))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["mechanism=mute"], "does not state the privacy cost of its steps"),
        (["mechanism=echo", "sampler=shuffled"], "dpx has no event for the noise of echo under this sampler"),
        (["mechanism=echo", "noise=target_epsilon", "noise.epsilon=3"], "dpx cannot compute the noise from epsilon"),
        (["mechanism=echo", "accountant=pld"], "dp-accounting cannot compose PoissonSampledDpEvent"),
        (["mechanism=echo", "accountant=deterministic"], "dpx knows no closed form"),
        (["mechanism=echo", "telemetry=released"], "covers one clipped sum a step"),
    ],
)
def test_what_has_no_event_is_refused(site, overrides, reason):
    own = [one for one in OWN if not one.startswith("noise") or "noise=target_epsilon" not in overrides]
    with pytest.raises(ConfigError, match=reason):
        calibration.calibrate(built(*own, *overrides).claim, SIZE)


def test_a_claim_is_not_inherited(site):
    from dpx.mechanism.dp_sgd import DpSgd
    from dpx.sampler import Poisson

    class Quieter(DpSgd):
        """Draws otherwise, under DpSgd's release."""

    class Luckier(Poisson):
        """Draws otherwise, under Poisson's release."""

    for change in ({"mechanism": Quieter()}, {"sampler": Luckier()}):
        with pytest.raises(ConfigError, match="does not define"):
            calibration.calibrate(dataclasses.replace(built(*OWN), **change).claim, SIZE)


def test_a_class_that_says_it_is_dpxs_is_not(site):
    from dpx.mechanism.clip import Flat

    class Loose(Flat):
        pass

    Loose.__module__, Loose.__qualname__ = Flat.__module__, Flat.__qualname__
    found = outside_code.parts(dataclasses.replace(built(*OWN), clip=Loose(clipping_norm=1.0)))
    assert [(part.key, part.package) for part in found] == [("clip", "unknown")]


def test_a_fork_by_dpx_alone_keeps_its_parents_word(site, tmp_path):
    (tmp_path / "parent").mkdir()
    parent = entered(built(*OWN, "clip=smooth"), tmp_path / "parent")
    child = forked(tmp_path / "ledger", parent)
    with as_if_unimported():
        no_bound(stated(built(*OWN), child))
    assert outside_code.packages_of_segments(join(entered(built(*OWN), tmp_path / "parent").segments())) == ("dpx_pond",)


def test_two_packages_are_both_named():
    names = ("dpx_reed", None, "dpx_pond+dpx_reed")
    cost = {"q": 0.1, "noise_multiplier": 1.0, "sampler": "poisson", "expected_batch_size": 8, "clipping_norm": 1.0}
    runs = [Segment(origin="a", steps=((0, 1),), epoch=0, by=by, **cost) for by in names]
    by = outside_code.packages_of_segments(runs)
    assert (
        outside_code.guarantee(True, [], by) == "dp_by_dpx_pond+dpx_reed"
        and outside_code.packages_of_guarantee("dp_by_dpx_pond+dpx_reed") == by
    )
    assert outside_code.guarantee(True, ["why"], by) == "none" and outside_code.guarantee(False, [], by) == "not_private"
    assert (
        outside_code.packages_of_guarantee("dp") == ()
        and outside_code.packages_of_guarantee("none") is outside_code.packages_of_guarantee("not_private") is None
    )


@pytest.mark.parametrize("charge", ["composition", "repeat_and_select"])
def test_a_search_keeps_its_trials_word(site, tmp_path, charge):
    of = trials.experiment(charge, 1, "clip=smooth")
    study = Study(tmp_path, of.name)
    trials.trial(study, of, 0, 0.5)
    from dpx.claim import search_claim
    from dpx.claim.search_record import opened

    with opened(study.outputs, study.path) as record:
        no_bound(to_json(search_claim.build(search_of(of), record, record.trials[0])))


def test_a_trial_whose_own_statement_says_so_is_enough(site, unimported, tmp_path):
    of = trials.experiment("composition", 1)
    study = Study(tmp_path, of.name)
    folder = trials.trial(study, of, 0, 0.5)
    assert trials.stated(study)["guarantee"] == "dp"
    path = folder / "release" / "privacy.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"guarantee": BY}))
    sealed_anew(folder)
    study.close(search_of(of))
    no_bound(trials.stated(study))


def test_an_account_of_its_ledger_needs_no_package_and_says_whose_word_it_is(site, tmp_path, capsys):
    from dpx.files.run_folder import RunFolder

    held = entered(built(*OWN, "mechanism=echo"), tmp_path)
    text = next(run.event for run in held.segments())
    job = account.Account(ledgers=[str(tmp_path / "ledger")], accountant="rdp")
    job(built(*OWN), RunFolder(tmp_path / "own"))
    assert "NO BOUND" in capsys.readouterr().out
    assert json.loads((tmp_path / "own" / "release" / "account.json").read_text())["outside_code"] == ["dpx_pond"]
    with pytest.raises(ConfigError, match="for zero_out only"):
        events.from_text(text, "replace_one")
    with pytest.raises(ConfigError, match="is not an event of dp-accounting"):
        events.restore({"class": "attr"})


def test_an_explanation_says_whose_word_it_is(site):
    found = explain.explain(built(*OWN, "clip=smooth"), SIZE, None)
    assert any("dpx_pond" in line and line.startswith("GUARANTEE") for line in found.words)
    assert all("dpx_pond" in table.title for table in found.tables)


def test_another_version_is_other_code_and_another_class_another_claim(site, tmp_path_factory, monkeypatch):
    experiment = built(*OWN, "clip=smooth")
    noted = fingerprint.code_of_parts(experiment)["packages"]
    assert noted["dpx_pond"]["version"] == "0.3.1" and len(noted["dpx_pond"]["code"]) == 64
    with on_path(pond(tmp_path_factory.mktemp("newer"), "0.4")):
        assert fingerprint.code_of_parts(experiment)["packages"] != noted
    with as_if_unimported():
        assert fingerprint.code_of_parts(built(*OWN))["packages"] == {}
    noted = experiment.claim_checksum
    monkeypatch.setattr(calibration.outside_code, "parts", lambda declared: [])
    assert experiment.claim_checksum != noted


def test_an_old_entry_reads_as_dpxs_own():
    plain = {"epoch": 0, "q": 0.1, "noise_multiplier": 1.0, "sampler": "poisson", "expected_batch_size": 1, "clipping_norm": 1.0}
    assert LedgerEntry(**plain).by is None
