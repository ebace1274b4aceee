"""Charges of several ledgers are added up only for one unit, and under another relation only where they are proved there."""

import contextlib
import dataclasses
import io
import json
import shutil
from pathlib import Path

import pytest

from dpx import config
from dpx.claim import calibration, caveats, claim_checks, statement
from dpx.claim.combined_ledgers import read, stated_at, together
from dpx.claim.spent import RunFacts
from dpx.config import recipes
from dpx.console import Console, figure
from dpx.data.protected_units import unit_facts
from dpx.declaration import ConfigError
from dpx.durable import put_in_place
from dpx.files.records import to_json
from dpx.files.run_folder import RunFolder
from dpx.job.account import Account
from dpx.launch.sweep_tables import Outcome, show_together
from dpx.privacy import accounting, events, ledger
from dpx.privacy.declared_privacy import Privacy, UnitFacts
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import NoiseEpoch, Part, Plan, PlanParts
from dpx.privacy.segments import LedgerEntry
from dpx.statement import seals
from tests.composed import composed
from tests.made_statement import made_plain, made_statement
from tests.privacy.test_ledger import forked
from tests.privacy.test_unit_facts import MANIFEST, changed, facts_of
from tests.sealed import refuting

ENTRY = LedgerEntry(epoch=0, q=0.01, noise_multiplier=2.0, sampler="poisson", expected_batch_size=64, clipping_norm=0.5)
FACTS, DOCUMENTS = facts_of(), facts_of("privacy.unit=document", "privacy.rows_per_unit_max=4")
PLACES = ("", "private/ledger", "release/privacy.json")
OTHERS = {**{f"rows, {path}": (FACTS, other) for path, other in changed(FACTS)}, **{path: (DOCUMENTS, o) for path, o in changed(DOCUMENTS)}}
EXPERIMENT = composed()[0]


@pytest.fixture(autouse=True)
def without_tables(monkeypatch):
    """Tests what is refused and what is reported first; `test_account` tests the numbers."""
    monkeypatch.setattr("dpx.job.account.account", lambda *given: [])
    monkeypatch.setattr("dpx.job.account._in_a_terminal", lambda tables: [])
    monkeypatch.setattr("dpx.job.account.pictures.write", lambda *given: "")


def source(folder, facts: UnitFacts | None, entry: LedgerEntry = ENTRY, steps: int = 2):
    """A run folder's ledger and statement, as a run leaves them, of steps that protect `facts`; `None` where nobody noted what."""
    entered = Ledger(folder / "private" / "ledger")
    if facts is not None:
        entered.note_units(facts)
    for step in range(steps):
        entered.append(step, entry)
    stated = {} if facts is None else {"adjacency": facts.adjacency}
    seals.write_statement(RunFolder(folder), entered, made_statement(entered, **stated))
    entered.close()
    return folder


def refusal(tmp_path, sources, **options) -> str:
    """The one line that refuses a joint account, with nothing written."""
    with pytest.raises(ConfigError) as refused:
        Account(ledgers=[str(one) for one in sources], **options)(EXPERIMENT, RunFolder(tmp_path / "joint"))
    assert not (tmp_path / "joint").exists()
    return str(refused.value)


def accounted(tmp_path, sources, **options) -> dict:
    Account(ledgers=[str(one) for one in sources], accountant="rdp", **options)(EXPERIMENT, RunFolder(tmp_path / "joint"))
    return json.loads((tmp_path / "joint" / "release" / "account.json").read_text())


@pytest.mark.parametrize("field", OTHERS)
def test_sources_that_differ_in_any_field_of_the_record_are_refused_naming_both_and_it(field, tmp_path):
    one, other = OTHERS[field]
    sources = [source(tmp_path / "one", one) / PLACES[0], source(tmp_path / "other", other) / PLACES[2]]
    line = refusal(tmp_path, sources)
    assert all(str(path) in line for path in sources) and "protect different units" in line
    assert field.split(".")[-1].split(", ")[-1].removesuffix("_source").removesuffix("_sha256") in line
    assert all(difference in line for difference in one.differences(other))


@pytest.mark.parametrize("places", [(one, other) for one in PLACES for other in PLACES])
def test_the_same_units_are_added_up_and_others_refused_from_wherever_they_are_read(places, tmp_path, capsys):
    for name, facts in (("one", FACTS), ("alike", FACTS), ("other", DOCUMENTS)):
        source(tmp_path / name, facts)
    said = accounted(tmp_path / "a", [tmp_path / "one" / places[0], tmp_path / "alike" / places[1]])
    assert said["no_guarantee"] == [] and said["unit"] == to_json(FACTS.as_released(tells_words=False))
    assert "What is protected: one row, under zero_out." in capsys.readouterr().out
    line = refusal(tmp_path / "b", [tmp_path / "one" / places[0], tmp_path / "other" / places[1]])
    assert "privacy.unit (row and document)" in line


@pytest.mark.parametrize("place", PLACES)
def test_a_source_that_does_not_say_what_it_protects_is_accounted_alone_without_a_guarantee(place, tmp_path):
    silent = source(tmp_path / "silent", None) / place
    assert "for some steps the protected unit is not recorded" in refusal(tmp_path, [source(tmp_path / "one", FACTS), silent])
    assert str(silent) in refusal(tmp_path, [silent, tmp_path / "one"])
    said = accounted(tmp_path / "alone", [silent])
    assert said["unit"] is None and "not recorded" in " ".join(said["no_guarantee"])


def test_what_takes_a_guarantee_away_is_said_of_a_ledger_whose_statement_is_withheld_or_gone(tmp_path):
    folder = source(tmp_path / "run", FACTS)
    entered = Ledger(folder / "private" / "ledger")
    entered.note_verdict(refuting())
    epoch = {"name": "a", "from_step": 0, "start": None, "secret_tag": "", "fingerprint": {}, "why": "the run begins"}
    entered.open_noise_epoch(NoiseEpoch(number=0, secret_place=None, **epoch))
    seals.write_statement(RunFolder(folder), entered, made_statement(entered, guarantee="none", reasons=("labels: learnt",)))
    alone = shutil.copy(folder / "private" / "ledger", tmp_path / "ledger")
    for reasons_of in (read(folder).reasons, read(Path(alone)).reasons):
        assert {reason.partition(":")[0] for reason in reasons_of} >= {"audit", "fixed_seed"}
    put_in_place(folder / "release", folder / "private" / "withheld")
    assert "labels: learnt" in read(folder).reasons
    (folder / "private" / "withheld" / "privacy.json").unlink()
    for path in (folder, folder / "private" / "ledger", Path(alone)):
        assert "the statement of this ledger is missing" in read(path).reasons[0]


def test_a_vocabulary_that_nobody_prepared_is_unlike_any(tmp_path):
    unprepared = dataclasses.replace(FACTS, vocabulary_sha256=None)
    sources = [source(tmp_path / name, unprepared) for name in ("one", "other")]
    assert "data.vocabulary (the checksum of one of them is not known)" in refusal(tmp_path, sources)


def test_a_fork_agrees_with_its_parent_and_one_of_other_units_with_nobody(tmp_path):
    parent = source(tmp_path / "parent", FACTS)
    for name, facts in (("fork", FACTS), ("other", facts_of("data.split_salt=new"))):
        child = forked(tmp_path / name / "private" / "ledger", Ledger(parent / "private" / "ledger"))
        child.note_units(facts)
        child.append(2, ENTRY)
    found = read(tmp_path / "fork")
    assert found.units == (FACTS,) and found.reasons == ()
    assert accounted(tmp_path / "a", [parent, tmp_path / "fork"])["no_guarantee"] == []
    assert "data.split_salt (dpx and new)" in refusal(tmp_path, [parent, tmp_path / "other"])


def test_steps_of_other_units_or_of_a_unit_that_nobody_recorded_leave_no_guarantee(tmp_path):
    experiment = config.build(
        recipes.compose(["data.declared_size=1000", "privacy.delta=1e-4", "batch_schedule.size=16", "noise=multiplier", "steps=3"])
    )[0]
    calibrated = calibration.calibrate(experiment.claim, 1000)
    entered, own = Ledger(tmp_path / "ledger"), unit_facts(experiment.data, experiment.privacy, MANIFEST)
    entered.note_units(own)
    said = statement.build(experiment.claim, None, calibrated, entered)
    assert said.guarantee == "dp" and said.units == (own,)
    entered.note_units(dataclasses.replace(own, vocabulary_sha256="b" * 64))
    said = statement.build(experiment.claim, None, calibrated, entered)
    assert said.guarantee == "none" and "data.vocabulary" in said.reasons[0] and len(said.units) == 2
    silent = Ledger(tmp_path / "silent")
    assert statement.build(experiment.claim, None, calibrated, silent).guarantee == "dp"
    silent.append(0, dataclasses.replace(ENTRY, q=0.016))
    said = statement.build(experiment.claim, None, calibrated, silent)
    assert said.guarantee == "none" and said.epsilon == {} and "the protected unit is not recorded" in said.reasons[0]


def test_that_no_unit_is_renamed_during_a_run_is_an_assumption(tmp_path):
    """Both epochs protect documents: one that has another name in the second is another document there."""
    experiment = dataclasses.replace(EXPERIMENT, privacy=Privacy(delta=1e-4, unit="document", rows_per_unit_max=4))
    entered = Ledger(tmp_path / "ledger")
    for number, data in enumerate(("a" * 64, "b" * 64)):
        assert not any(
            "each document has one name" in line
            for line in caveats.assumptions(
                experiment.data, experiment.privacy, experiment.train, experiment.audit, None, 1000, RunFacts.of(entered)
            )
        )
        facts = {"from_step": number, "start": None, "secret_tag": "", "secret_place": 1, "fingerprint": {"data": data}, "why": "it begins"}
        entered.open_noise_epoch(NoiseEpoch(number=number, name=f"{number}", **facts))
    assert any(
        "each document has one name" in line
        for line in caveats.assumptions(
            experiment.data, experiment.privacy, experiment.train, experiment.audit, None, 1000, RunFacts.of(entered)
        )
    )


def test_steps_from_before_units_were_noted_stay_unknown(tmp_path):
    found = Ledger(tmp_path / "old")
    found.append(0, ENTRY)
    found.note_units(FACTS)
    assert found.units == Ledger(tmp_path / "old").units == [None, FACTS]


def entry_of(experiment, size: int = 1000) -> list[dict]:
    return calibration.Entries.of(experiment.claim).planned(((32, 2),), size, 2.0)


# What a run would be: each sampler at rows, and Poisson at units of several rows, drawn row by row or whole.
RUNS = {
    **{name: (f"sampler={name}",) for name in ("poisson", "truncated_poisson", "fixed_size", "shuffled", "deterministic", "balls_in_bins")},
    "random_allocation": ("sampler=random_allocation",),
    "cyclic_poisson": ("sampler=cyclic_poisson", "sampler.cycle=2"),
    "group": ("privacy.unit=document", "privacy.rows_per_unit_max=4"),
    "whole units": ("privacy.unit=document", "privacy.rows_per_unit_max=4", "privacy.unit_mode=sample_units"),
    "quantile": ("clip=quantile",),
}


def declared(name: str, adjacency: str):
    return composed("data=synthetic", "data.pairs=none", "data.declared_size=1000", f"privacy.adjacency={adjacency}", *RUNS[name])[0]


def may_run(name: str, adjacency: str) -> bool:
    """Whether dpx runs and accounts for this under `adjacency` at all, by any accountant."""
    experiment = declared(name, adjacency)
    try:
        claim_checks.check_claim(experiment.claim, 1000)
    except ConfigError:
        return False
    return any(_has_event(entry_of(experiment), adjacency, accountant) for accountant in events.ACCOUNTANTS)


def _has_event(segments, adjacency: str, accountant: str) -> bool:
    from dpx.privacy import ledger

    try:
        return bool([events.event(release, adjacency, accountant) for release, _ in ledger.releases(segments)])
    except ConfigError:
        return False


@pytest.mark.parametrize("target", events.RELATION)
@pytest.mark.parametrize("stated", events.RELATION)
@pytest.mark.parametrize("name", RUNS)
def test_steps_are_accounted_under_another_relation_where_the_same_run_would_be_and_no_size_that_was_counted_is_protected(
    name, stated, target
):
    """A run that is charged under both relations does the same under both; only its claim differs. add_remove protects the size too."""
    if not may_run(name, stated):
        return
    segments = entry_of(declared(name, stated))
    try:
        events.require_proved(segments, stated, target, "a")
        is_accepted = True
    except ConfigError as refused:
        is_accepted = False
        assert all(word in str(refused) for word in (f"job.adjacency={target}: a ", stated, "Use job.adjacency="))
    is_proved = stated == target or (target != "add_remove" and may_run(name, target))
    assert is_accepted == is_proved
    if is_accepted:
        assert segments == entry_of(declared(name, target)), "what ran does not depend on the relation"


def test_an_event_of_a_package_is_proved_where_it_was_given_alone(tmp_path):
    entry = dataclasses.replace(ENTRY, event='{"adjacency": "zero_out", "event": {}}', by="dpx_reed")
    folder = source(tmp_path / "one", FACTS, entry)
    assert "a package defines their event for that relation only" in refusal(tmp_path, [folder], adjacency="replace_one")


@pytest.mark.parametrize("place", PLACES)
def test_another_relation_is_asked_of_every_source(place, tmp_path):
    sources = [source(tmp_path / name, dataclasses.replace(FACTS, adjacency=name)) / place for name in ("replace_one", "zero_out")]
    assert "the counted number of units" in refusal(tmp_path, sources, adjacency="add_remove")
    assert "is not a neighbouring relation" in refusal(tmp_path, sources, adjacency="nearby")
    assert stated_at([read(one) for one in sources], None, "replace_one", EXPERIMENT.privacy)[1] == "replace_one"
    assert stated_at([read(sources[0])], None, None, EXPERIMENT.privacy)[1] == "replace_one"


def test_a_sweep_ends_with_what_its_points_guarantee_together(tmp_path):
    folders = [source(tmp_path / name, FACTS) for name in ("one", "other")]
    nothing = Part(values={}, at_default=())
    parts = PlanParts(noise=nothing, privacy=Part(values={"delta": 1e-6}, at_default=()), accountant=nothing, audit=nothing)
    with contextlib.closing(Ledger(folders[0] / "private" / "ledger")) as entered:
        entered.declare_plan(Plan(declared=parts))
    joint = together([read(folder) for folder in folders])
    charges = accounting.bucketed(ledger.releases(joint.segments))
    epsilon = figure(accounting.compose(charges, "pld", joint.adjacency).epsilon(joint.delta))
    said = f"these 2 points together: epsilon {epsilon} (pld) at delta {joint.delta:.2e} for {FACTS.in_words()}, whichever is chosen"
    assert sum(count for _, count in charges) == 4 and _told(folders) == said
    assert _told(folders[:1]) == ""
    assert "have no joint guarantee" in _told([*folders, source(tmp_path / "documents", DOCUMENTS)])
    bare = tmp_path / "bare"
    with contextlib.closing(Ledger(bare / "private" / "ledger")) as entered:
        entered.note_units(FACTS)
        seals.write_statement(RunFolder(bare), entered, made_plain(entered))
    assert "have no joint guarantee: bare: mechanism=none" in _told([*folders, bare])


def _told(folders: list[Path]) -> str:
    shown = io.StringIO()
    show_together([Outcome(folder, (folder.name,), "finished") for folder in folders], Console(file=shown, width=1000))
    return shown.getvalue().strip()
