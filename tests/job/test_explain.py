"""The explanation gives the content of the statement as text, and the cost of neighbouring settings."""

import ast
import dataclasses
import json

import pytest

from dpx import config
from dpx.claim import statement
from dpx.claim.calibration import Entries, calibrate
from dpx.config import recipes
from dpx.data.protected_units import unit_facts
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.init.parent import _claim
from dpx.interop.card import Model, Published, card
from dpx.job.explain import Explain, _by_sampler, explain, public_size
from dpx.job.plan import Plan
from dpx.job.run_plan import plan_of_run
from dpx.job.train import _hints
from dpx.mechanism.rgp import Rgp
from dpx.privacy.ledger import Ledger
from dpx.privacy.origins import Origin, in_words
from dpx.sampler import CyclicPoisson, Poisson, RandomAllocation
from dpx.sampler.batch_schedule import Staged
from dpx.statement.statement_records import RunStatement
from tests.processes import COARSE

QUICK = ["steps=4", "batch_schedule.size=64", "noise=multiplier", "noise.noise_multiplier=1.0", "accountant=rdp", COARSE]


@pytest.fixture(scope="module")
def experiment():
    return config.build(recipes.compose([*QUICK, "data.declared_size=10000"]))[0]


@pytest.fixture(scope="module")
def document(experiment):
    return explain(experiment, 10_000, None)


def test_every_question_is_answered(document):
    text = "\n".join(document.words)
    for question in (
        "What is protected",
        "From whom",
        "What they cannot do",
        "How well",
        "Sampling",
        "What is assumed",
        "What is not covered",
    ):
        assert question in text
    assert "GUARANTEE: NONE" not in text


def test_what_is_clipped_in_place_of_a_matrix_is_said(experiment):
    carried = dataclasses.replace(experiment, mechanism=Rgp(rank=3))
    text = " ".join(explain(carried, 10_000, None).words)
    assert "two factors of rank 3" in text and "what training has added to it so far" in text


def test_epsilon_grows_with_steps(document):
    steps, *_ = document.tables
    values = [row["rdp"] for row in steps.as_json()["rows"]]
    assert values == sorted(values) and steps.as_json()["rows"][-1]["steps"] == 4


def test_stronger_costs_less_and_weaker_more(document):
    _, settings, _ = document.tables
    found = {row["setting"].split(":")[0] + row["setting"][-5:]: row["rdp"] for row in settings.as_json()["rows"]}
    here = settings.as_json()["rows"][0]["rdp"]
    assert all((value < here) == name.startswith("stronger") for name, value in found.items() if not name.startswith("as"))


def test_samplers_stand_side_by_side_for_the_same_steps(experiment):
    """Each at what a run with it would state; a sampler whose steps are others' has no such table."""
    stated = {}
    for sampler in (RandomAllocation(), Poisson()):
        one = dataclasses.replace(experiment, sampler=sampler)
        stated[sampler.name] = calibrate(one.claim, 10_000).epsilon["rdp"]
        rows = explain(one, 10_000, None).tables[2].as_json()["rows"]
        assert rows[0]["sampler"] == sampler.name and [row["drawn"] for row in rows] == ["by this run", *["by another run"] * 2]
    found = {row["sampler"]: row["rdp"] for row in rows}
    assert found == stated | {"shuffled": found["shuffled"]} and found["shuffled"] > 2 * max(stated.values())
    assert len(explain(dataclasses.replace(experiment, sampler=CyclicPoisson(cycle=2)), 10_000, None).tables) == 2
    # No shuffled run has batches of several sizes.
    ramp = dataclasses.replace(experiment, batch_schedule=Staged(sizes=[64, 128], stage_steps=2)).claim
    (table,) = _by_sampler(ramp, Entries.of(ramp).planned(((64, 2), (128, 2)), 10_000, 1.0))
    assert [row["sampler"] for row in table.as_json()["rows"]] == ["poisson", "random_allocation"]


def test_it_is_printed_and_written(experiment, tmp_path, capsys):
    Explain(size=10_000)(experiment, RunFolder(tmp_path))
    assert "What is protected: one row" in capsys.readouterr().out
    assert json.loads((tmp_path / "release" / "explain.json").read_text())["name"] == experiment.name


def test_what_was_charged_beside_the_plan_is_in_the_promise(experiment, tmp_path):
    """Steps entered again in another noise epoch: the statement counts them, and so do its words."""
    size, ledger = 10_000, Ledger(tmp_path / "ledger")
    ledger.note_units(unit_facts(experiment.data, experiment.privacy, None))
    calibrated = calibrate(experiment.claim, size)
    for epoch in (0, 1):
        for step in range(experiment.steps):
            ledger.append(step, Entries.of(experiment.claim).of_step(size, 1.0, 64, epoch))
    stated = statement.build(experiment.claim, None, calibrated, ledger)
    assert isinstance(stated, RunStatement) and stated.epsilon["rdp"] is not None
    assert stated.epsilon["rdp"] > calibrated.epsilon["rdp"] + 0.02
    words = "\n".join(explain(experiment, size, stated).words)
    assert f"at most e^{stated.epsilon['rdp']:.3g} = " in words


def test_a_fork_of_nothing_is_neither_planned_nor_explained(experiment, tmp_path):
    """The cost of a fork follows from its parent's ledger; without the ledger no number is printed."""
    folder = RunFolder(tmp_path, fork=f"{tmp_path}/parent@2")
    for job in (Explain(size=10_000), Plan()):
        with pytest.raises(ConfigError, match="parent: no such run"):
            job(experiment, folder)
    assert plan_of_run(experiment).guarantee == "dp"


def test_a_short_run_has_each_step_once(experiment):
    short = dataclasses.replace(experiment, steps=3)
    table = explain(short, 10_000, None).tables[0]
    assert [row[0] for row in table.rows] == [1, 2, 3]


@pytest.mark.parametrize(
    ("verdict", "words"), [("pending", "no verdict yet"), ("passes", "passes"), ("fails", "its lower bound exceeds the claim")]
)
def test_what_became_of_a_runs_audit_is_said_wherever_its_claim_is(experiment, verdict, words):
    """In an explanation, on a model card, and of a parent in the statement of the run that began from it."""
    audited = config.build(recipes.compose([*QUICK, "data.declared_size=10000", "audit=canaries"]))[0]
    stated = statement.build(audited.claim, None, calibrate(audited.claim, 10_000))
    assert isinstance(stated, RunStatement) and stated.audit is not None and stated.audit.verdict == "pending"
    stated = dataclasses.replace(stated, audit=dataclasses.replace(stated.audit, verdict=verdict))
    (said,) = [line for line in explain(audited, 10_000, stated).words if "The audit of this run" in line]
    shown = Model("a", "b", audited.task, "all", None, Published())
    (on_card,) = [line for line in card(stated, shown, None, "c").splitlines() if "audit:" in line]
    assert words in said and words in on_card and verdict in on_card
    parent = Origin(kind="run", name="parent", identity="0" * 16, claim=_claim(audited.data, audited.privacy, stated, verdict, ()))
    assert words in in_words(parent.as_released()) and "its audit" in in_words(parent.as_released())
    unaudited = statement.build(experiment.claim, None, calibrate(experiment.claim, 10_000))
    assert "- audit:" not in card(unaudited, shown, None, "c")
    assert "its audit" not in in_words(
        Origin(kind="run", name="a", identity="0", claim=_claim(audited.data, audited.privacy, unaudited, None, ())).as_released()
    )


def test_names_of_others_begin_no_tag_and_end_no_text_on_a_card(experiment):
    stated = dataclasses.replace(
        statement.build(experiment.claim, None, calibrate(experiment.claim, 10_000)),
        assumptions=("a <script>alert(1)</script> of x\n# more", "1 < 2"),
    )
    shown = Model("x", "BertForMaskedLM", experiment.task, "lora", 'm"); import os #', Published())
    written = card(stated, shown, None, "c", changed=["<img src=x>"])
    assert "- a &lt;script>alert(1)&lt;/script> of x # more\n" in written and "- 1 < 2\n" in written and "<img" not in written
    code = written.partition("```python\n")[2].partition("```")[0]
    assert [type(one).__name__ for one in ast.parse(code).body] == ["ImportFrom", "ImportFrom", "Assign", "Assign"]


def test_what_a_run_stated_is_said_whatever_the_config_beside_it_declares(experiment):
    """Delta, steps, noise and relation are the statement's; a config that says otherwise is refused before, and is not repeated here."""
    stated = statement.build(experiment.claim, None, calibrate(experiment.claim, 10_000))
    other = config.build(
        recipes.compose([*QUICK, "data.declared_size=10000", "privacy.delta=1e-12", "steps=5", "noise.noise_multiplier=9"])
    )[0]
    of_own, of_other = ("\n".join(explain(one, 10_000, stated).words) for one in (experiment, other))
    assert of_own == of_other and "delta = 1e-06" in of_own and "noise with standard deviation 1 times" in of_own


def test_no_guarantee_is_said_first():
    seeded = config.build(recipes.compose([*QUICK, "seed=1", "data.declared_size=10000"]))[0]
    assert "GUARANTEE: NONE. fixed_seed" in explain(seeded, 10_000, None).words[1]


def test_plain_training_is_called_what_it_is():
    plain = config.build(recipes.compose([*QUICK, "mechanism=none", "data.declared_size=10000"]))[0]
    assert "not private" in explain(plain, 10_000, None).words[0]


def test_an_unknown_size_is_asked_for():
    hub = config.build(recipes.compose([*QUICK, "data=hub", "data.declared_size=null"]))[0]
    with pytest.raises(ConfigError, match="declared_size"):
        public_size(hub.data, hub.privacy)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["clip=quantile"], "follows the 0.5 quantile by counts with noise of 10 examples"),
        pytest.param(["mechanism=discrete_gaussian"], "Sums and noise are integers on a fine grid", marks=pytest.mark.slow),
        (["mechanism=banded", "sampler=cyclic_poisson"], "Noise of 4 steps in a row is correlated"),
    ],
)
def test_what_is_particular_about_a_mechanism_is_said(overrides, words):
    experiment = config.build(recipes.compose([*QUICK, *overrides, "data.declared_size=10000"]))[0]
    assert words in "\n".join(explain(experiment, 10_000, None).words)


def test_little_data_is_hinted_at_where_the_claim_is_shown(experiment):
    """In the explanation and in the table at the end of a run."""
    few = config.build(recipes.compose([*QUICK, "data.declared_size=355"]))[0]
    stated = statement.build(few.claim, None, calibrate(few.claim, 355))
    (hint,) = [line for line in explain(few, 355, stated).words if line.startswith("Hint: ")]
    assert hint.removeprefix("Hint: ") in _hints(stated) and "only 355 rows" in hint
    assert _hints(statement.build(experiment.claim, None, calibrate(experiment.claim, 10_000))) == []
