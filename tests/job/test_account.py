"""A ledger is enough: epsilon again, alone or jointly, and what an attacker can reach."""

import dataclasses
import json
import math

import pytest

import dpx.privacy
from dpx import config
from dpx.claim.combined_ledgers import read, stated_at
from dpx.config import recipes
from dpx.declaration import ConfigError
from dpx.files.records import to_json
from dpx.files.run_folder import RunFolder
from dpx.job.account import Account, account
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import Part, Plan, PlanParts
from dpx.privacy.segments import LedgerEntry, join
from dpx.statement import seals
from tests.made_statement import made_plain, made_statement
from tests.privacy.test_ledger import forked
from tests.privacy.test_unit_facts import facts_of

ENTRY = LedgerEntry(epoch=0, q=0.01, noise_multiplier=1.0, sampler="poisson", expected_batch_size=64, clipping_norm=0.5)
FACTS = facts_of()
NOTHING = Part(values={}, at_default=())


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    entered = Ledger(folder.private / "ledger")
    entered.note_units(FACTS)
    for step in range(20):
        entered.append(step, ENTRY)
    return folder


@pytest.fixture(scope="module")
def experiment():
    return config.build(recipes.compose([]))[0]


def table(folder, name):
    document = json.loads((folder.release / "account.json").read_text())
    return next(found["rows"] for found in document["tables"] if found["name"] == name)


def test_a_run_folder_is_accounted_again(run, experiment, capsys):
    Account(delta=1e-6)(experiment, run)
    expected = dpx.privacy.epsilon([(0.01, 20)], noise_multiplier=1.0, delta=1e-6)
    (found,) = [row["epsilon"] for row in table(run, "epsilon_of_delta") if row["delta"] == 1e-6]
    assert found == pytest.approx(expected, rel=1e-9)
    assert table(run, "epsilon_by_step")[-1] == {"steps": 20, "epsilon": pytest.approx(expected, rel=1e-9)}
    assert "membership advantage" in capsys.readouterr().out
    assert {path.suffix for path in run.release.iterdir()} == {".csv", ".json", ".svg", ".png", ".pdf"}


# Slow: the curves are computed in tests/privacy; a whole account is printed above.
@pytest.mark.slow
def test_what_an_attacker_reaches_is_printed_as_tables_and_curves(run, experiment, capsys):
    Account(delta=1e-6, accountant="rdp")(experiment, run)
    shown = capsys.readouterr().out
    for words in ("membership advantage", "at 0.10% false positives", "at 1.00% false positives", "Gaussian-DP parameter mu"):
        assert words in shown
    assert "● this claim   ○ Gaussian DP" in shown and shown.count("└") >= 4 + 6
    for row in table(run, "trade_off"):
        # The parameter bounds the claim: its test errs no more often than the best test of the claim.
        assert row["gaussian"] <= row["false_negative_rate"] + 1e-9


def test_epsilon_grows_step_by_step(run, experiment):
    Account(accountant="rdp")(experiment, run)
    values = [row["epsilon"] for row in table(run, "epsilon_by_step")]
    assert values == sorted(values) and values[0] < values[-1]


def test_branches_are_accounted_jointly(run, tmp_path):
    branch = forked(tmp_path / "branch", Ledger(run.private / "ledger"))
    for step in range(10, 20):
        branch.append(step, ENTRY)
    joint = join(read(run.path).segments, read(tmp_path / "branch").segments)
    assert sum(found.count for found in joint) == 30


def test_a_statement_is_as_good_as_its_ledger(run):
    run.release.mkdir()
    entered = Ledger(run.private / "ledger")
    seals.write_statement(run, entered, made_statement(entered))
    assert read(run.release / "privacy.json").segments == read(run.private / "ledger").segments == read(run.path).segments
    assert [read(path).checked_by for path in (run.release / "privacy.json", run.private / "ledger", run.path)] == [
        None,
        "ledger",
        "ledger",
    ]


def test_why_a_source_guarantees_nothing_is_said_first(run, experiment, tmp_path, capsys):
    entered = Ledger(run.private / "ledger")
    run.release.mkdir(parents=True, exist_ok=True)
    stated = made_statement(entered, guarantee="none", reasons=("seed=7: anybody can draw the same noise",), units=(FACTS,))
    seals.write_statement(run, entered, stated)
    for source in (run.path, run.private / "ledger", run.release / "privacy.json"):
        assert read(source).reasons == stated.reasons
    Account(delta=1e-6, ledgers=[str(run.path)], accountant="rdp")(experiment, RunFolder(tmp_path / "account"))
    assert "NO GUARANTEE: " in capsys.readouterr().out
    (said,) = json.loads((tmp_path / "account" / "release" / "account.json").read_text())["no_guarantee"]
    assert "seed=7" in said


@pytest.mark.parametrize("make", [lambda path: path / "absent", lambda path: path])
def test_where_nothing_is_charged_one_line_says_so(make, tmp_path):
    with pytest.raises(ConfigError, match="this path has no ledger"):
        read(make(tmp_path))


def test_a_statement_without_ledger_is_refused(tmp_path):
    entered = Ledger(tmp_path / "private" / "ledger")
    seals.write_statement(RunFolder(tmp_path), entered, made_plain(entered))
    with pytest.raises(ConfigError, match="that contains no ledger"):
        read(tmp_path / "release" / "privacy.json")


@pytest.mark.parametrize("number", [2, None])
def test_a_statement_in_another_format_is_refused(run, number):
    run.release.mkdir()
    entered = Ledger(run.private / "ledger")
    stated = to_json(made_statement(entered)) | {"format": number}
    (run.release / "privacy.json").write_text(json.dumps(stated))
    for source in (run.path, run.private / "ledger", run.release / "privacy.json"):
        with pytest.raises(
            ConfigError,
            match=rf"privacy\.json: was written with the format number {number}, not 4\. Use the version of dpx that wrote it\.$",
        ):
            read(source)


@pytest.mark.parametrize("text", ["no JSON", "[1, 2]", '{"format": 4}', '{"format": 4, "kind": "run", "ledger": {"segments": 3}}'])
def test_a_file_that_is_no_statement_is_refused_in_a_line(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=r"a\.json: .*Name the statement of a private run"):
        read(tmp_path / "a.json")


def _stated(folder, adjacency, delta):
    """A ledger under private/ and a statement of it, of a claim under `adjacency` at `delta`."""
    entered = Ledger(folder / "private" / "ledger")
    entered.declare_plan(
        Plan(
            declared=PlanParts(
                noise=NOTHING,
                privacy=Part(values={"adjacency": adjacency, "delta": delta}, at_default=()),
                accountant=NOTHING,
                audit=NOTHING,
            )
        )
    )
    facts = dataclasses.replace(FACTS, adjacency=adjacency)
    entered.note_units(facts)
    entered.append(0, ENTRY)
    seals.write_statement(RunFolder(folder), entered, made_statement(entered, adjacency=adjacency, delta=delta))
    return folder


@pytest.mark.parametrize("place", ["", "private/ledger", "release/privacy.json"])
def test_a_source_is_accounted_at_what_it_was_stated_at(place, experiment, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("dpx.job.account.account", lambda segments, *given: asked.append(given[1:3]) or 1 / 0)
    source = _stated(tmp_path / "other", "replace_one", 1e-7) / place
    assert experiment.privacy.adjacency != "replace_one"
    with pytest.raises(ZeroDivisionError):
        Account(ledgers=[str(source)])(experiment, RunFolder(tmp_path / "run"))
    assert asked == [(1e-7, "replace_one")]


def test_sources_of_several_relations_need_one_that_is_given(experiment, tmp_path):
    sources = [_stated(tmp_path / name, name, delta) for name, delta in (("replace_one", 1e-5), ("zero_out", 1e-6))]
    with pytest.raises(
        ConfigError,
        match=r"replace_one and .*zero_out protect different units: privacy.adjacency \(replace_one and zero_out\)",
    ):
        Account(ledgers=[str(one) for one in sources], accountant="rdp")(experiment, RunFolder(tmp_path / "run"))
    at = stated_at([read(one) for one in sources], None, "replace_one", experiment.privacy)
    assert at == (1e-6, "replace_one"), "of several deltas the smallest"


def test_infinite_values_are_written_as_nothing(run):
    found = account(read(run.path).segments, "deterministic", 1e-6, "zero_out")
    assert all(value is None or math.isfinite(value) for row in found[1].rows for value in row)
