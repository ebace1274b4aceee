"""Runs that start from one another state what they cost together, by whichever way the weights came."""

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import dpx
from dpx import privacy
from dpx.claim.combined_ledgers import read
from dpx.config.declared_init import FromRun
from dpx.data.prepare import prepare
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.files.weights import by_path
from dpx.init.parent import open_parent
from dpx.init.start import RANDOM, taken_from
from dpx.job.account import account
from dpx.privacy.ledger import Ledger
from dpx.training import opening

from ..composed import composed
from .conftest import MICRO, statement

DELTA = 1e-3


def together(place, steps: int) -> float:
    """Epsilon of so many steps, composed without any ledger."""
    experiment = place.declared()
    rows = prepare(experiment.data, experiment.privacy).manifest.rows["protected"]
    return privacy.epsilon([(8 / rows, steps)], noise_multiplier=2.0, delta=DELTA, accountant="rdp")


def epsilon(path: Path) -> float:
    stated = statement(path)
    assert stated["guarantee"] == "dp", stated["reasons"]
    return stated["epsilon"]["rdp"]


def charged_steps(path: Path) -> int:
    return sum(run.count for run in Ledger(path / "private" / "ledger").segments())


def accounted(path: Path) -> float:
    """What job=account finds at the declared delta."""
    tables = {table.name: table for table in account(read(path).segments, "rdp", DELTA, "zero_out", read(path).before)}
    return dict(tables["epsilon_of_delta"].rows)[DELTA]


@pytest.fixture(scope="module")
def child(place, parent):
    return place.train("child", "init=run", f"init.run={parent}")


@pytest.fixture(scope="module")
def copy(parent, tmp_path_factory) -> Path:
    """A release/ that was handed on, under another name."""
    return shutil.copytree(parent / "release", tmp_path_factory.mktemp("copies") / "weights")


def test_two_runs_on_the_same_text_state_what_both_cost(place, parent, child):
    stated = statement(child)
    assert epsilon(child) == pytest.approx(together(place, 4), rel=1e-6) and epsilon(parent) < epsilon(child)
    assert stated["planned"]["epsilon"]["rdp"] == pytest.approx(epsilon(parent))
    (origin,) = stated["init"]["origins"]
    assert stated["init"]["kind"] == "run" and (origin["relation"], origin["is_checked"]) == ("unknown", True)
    assert stated["spent"]["steps"] == 2 and stated["spent"]["charged_steps"] == 4
    assert accounted(child) == pytest.approx(epsilon(child))
    assert "data" not in origin and "units" in origin["claim"]
    (premise,) = [line for line in stated["assumptions"] if line.startswith("in all data that charged steps drew from")]
    assert "a row is cut from the same text" in premise
    assert not any("in all data" in line for line in statement(parent)["assumptions"]), "of one data nothing more is assumed"


def test_the_weights_are_the_parents(place, parent, child):
    noted = Ledger(child / "private" / "ledger").origins
    from dpx.files.weights import checksum

    assert [origin.weights for origin in noted] == [checksum(by_path(dpx.load(parent).params))]
    moved = by_path(dpx.load(child).params)
    assert all(np.all(np.abs(leaf - moved[path]) < 0.5) for path, leaf in by_path(dpx.load(parent).params).items())


# A copy of a copy is charged below.
@pytest.mark.slow
def test_the_same_through_a_copied_release(place, copy):
    path = place.train("of_a_copy", "init=run", f"init.run={copy}")
    (origin,) = statement(path)["init"]["origins"]
    assert (origin["relation"], origin["is_checked"]) == ("unknown", False)
    assert epsilon(path) == pytest.approx(together(place, 4), rel=1e-6)


def test_a_copy_of_a_copy_carries_every_run_before_it(place, child, tmp_path):
    handed = shutil.copytree(child / "release", tmp_path / "handed")
    path = place.train("grandchild", "init=run", f"init.run={handed}")
    assert len(statement(path)["init"]["origins"]) == 2 and epsilon(path) == pytest.approx(together(place, 6), rel=1e-6)
    alone = shutil.copytree(path / "release", tmp_path / "alone" / "release")
    assert accounted(path) == pytest.approx(epsilon(path)) == pytest.approx(accounted(alone.parent))


@pytest.fixture(scope="module")
def apart(place, parent):
    return place.train("apart", "init=run", f"init.run={parent}", "init.disjoint_from=[main]", text="other")


def test_text_that_is_declared_disjoint_is_not_composed_and_stands_beside(place, parent, apart):
    stated = statement(apart)
    (origin,) = stated["init"]["origins"]
    assert origin["relation"] == "disjoint"
    assert epsilon(apart) == stated["planned"]["epsilon"]["rdp"] and origin["claim"]["epsilon"] == statement(parent)["epsilon"]
    assert any("the user vouches (init.disjoint_from)" in line for line in stated["assumptions"])
    assert json.loads((apart / "private" / "declared_disjoint.json").read_text())["declared_disjoint"][0]["found"]


# The same over graphs that were not trained is in tests/chain/test_ancestry.py.
@pytest.mark.slow
def test_the_word_holds_on_the_data_that_it_was_given_of(place, apart):
    # A run on the first text that starts from this one is charged for its grandparent too.
    last = place.train("back", "init=run", f"init.run={apart}")
    assert [one["relation"] for one in statement(last)["init"]["origins"]] == ["unknown", "unknown"]
    assert charged_steps(last) == 6 and epsilon(last) > epsilon(apart)
    # On the data that the word was given of, it holds for a fork too.
    again = place.train("fork_apart", fork=f"{apart}@1", text="other")
    assert [one["relation"] for one in statement(again)["init"]["origins"]] == ["unknown", "disjoint"]


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_from_the_same_weights_and_keeps_its_chain(place, parent, tmp_path):
    source = shutil.copytree(parent, tmp_path / "source")
    line = ("init=run", f"init.run={source}", "seed=3")
    whole = by_path(dpx.load(place.train("whole", *line)).params)
    place.train("broken", *line, until=0)
    place.train("broken", *line, until=1)
    # From its first checkpoint on it does not need its initial weights.
    shutil.rmtree(source)
    path = place.train("broken", *line)
    assert all(np.array_equal(leaf, whole[name]) for name, leaf in by_path(dpx.load(path).params).items())
    assert charged_steps(path) == 4


def test_before_its_first_checkpoint_it_begins_from_the_same_weights_or_not_at_all(place, parent, child, tmp_path):
    source = shutil.copytree(parent, tmp_path / "source")
    line = ("init=run", f"init.run={source}")
    place.train("early", *line, until=0)
    shutil.rmtree(place.root / "outputs" / "early" / "private" / "checkpoints", ignore_errors=True)
    shutil.rmtree(source)
    shutil.copytree(child, source)
    with pytest.raises(ConfigError, match="now holds other weights"):
        place.train("early", *line)


def test_a_fork_carries_what_its_parent_began_from(place, child, tmp_path):
    path = place.train("fork", fork=f"{child}@1")
    stated = statement(path)
    assert [(one["relation"], one["is_fork"]) for one in stated["init"]["origins"]] == [("unknown", True), ("unknown", False)]
    assert stated["init"]["kind"] == "fork"
    # Both steps of the child were entered, its parent's two, and the fork's own one.
    assert epsilon(path) == pytest.approx(together(place, 5), rel=1e-6)
    with pytest.raises(ConfigError, match="fork=.*with init=run"):
        place.train("both", "init=run", f"init.run={child}", fork=f"{child}@1")


def test_a_run_that_goes_on_with_other_data_is_held_to_its_word_again(place, apart):
    overrides = ("init=run", f"init.run={place.root}/outputs/parent", "init.disjoint_from=[main]")
    known = Ledger(apart / "private" / "ledger")
    for text, refused in (("other", False), ("one", True)):
        experiment = place.declared(*overrides, text=text)
        store = prepare(experiment.data, experiment.privacy)
        receiver = experiment.receiver
        with pytest.raises(ConfigError, match="draws from the same prepared data") if refused else contextlib.nullcontext():
            assert opening._begin_from(experiment.init, receiver, experiment.audit, store, RunFolder(apart), known) is RANDOM


def test_a_fork_onto_the_parents_text_composes_what_was_apart(place, apart):
    path = place.train("fork_back", fork=f"{apart}@1", text="one")
    assert [one["relation"] for one in statement(path)["init"]["origins"]] == ["unknown", "unknown"]
    assert charged_steps(path) == 5


@pytest.mark.slow
def test_frozen_parameters_have_the_cost_of_what_it_came_from(place, parent):
    path = place.train("biases", "init=run", f"init.run={parent}", "train=bias")
    before, after = by_path(dpx.load(parent).params), by_path(dpx.load(path).params)
    assert all(np.array_equal(before[name], after[name]) == (not name.endswith("bias")) for name in before)
    assert epsilon(path) == pytest.approx(together(place, 4), rel=1e-6)
    assert any("frozen parameters come from" in line for line in statement(path)["assumptions"])


@pytest.mark.slow
def test_adapters_go_on_or_become_part_of_the_weights(place, parent):
    adapted = place.train("adapted", "init=run", f"init.run={parent}", "train=lora", "train.rank=2")
    before = by_path(dpx.load(adapted).params)
    again = by_path(dpx.load(place.train("adapted_again", "init=run", f"init.run={adapted}", "train=lora", "train.rank=2")).params)
    assert all(np.array_equal(leaf, again[name]) == (not name.endswith(("/a", "/b"))) for name, leaf in before.items())
    folded = by_path(dpx.load(place.train("folded", "init=run", f"init.run={adapted}", "train=bias")).params)
    assert not any("lora" in name for name in folded) and not np.array_equal(folded["layers/qkv/kernel"], before["layers/qkv/kernel"])


def test_a_checkpoint_of_a_run_that_was_interrupted_costs_what_its_ledger_charges(place, tmp_path):
    stopped = place.train("stopped", "replicate=2", until=1)
    with pytest.raises(ConfigError, match="no released parameters.*init.step"):
        place.train("of_stopped", "init=run", f"init.run={stopped}")
    with pytest.raises(ConfigError, match=r"init.step=7: .*Use one of \[1\]"):
        place.train("of_stopped", "init=run", f"init.run={stopped}", "init.step=7")
    path = place.train("of_stopped", "init=run", f"init.run={stopped}", "init.step=1")
    # It was killed before it entered its second step.
    assert json.loads((path / "release" / "privacy.json").read_text())["init"]["origins"][0]["relation"] == "unknown"
    assert epsilon(path) == pytest.approx(together(place, 3), rel=1e-6)


def test_a_run_of_another_task_takes_the_body_and_only_a_body_that_fits(place, parent):
    labels = ["data=synthetic_labels", "data.source.examples=200", "task=classification", "mechanism=none", "init=run"]
    labels += [f"init.run={parent}", "data.vocabulary.size=128"]
    small = [one for one in MICRO if not one.startswith(("data=", "data.source", "noise", "accountant"))]
    taken = taken_from(open_parent(FromRun(run=str(parent)), "init.run"), composed(*small, *labels)[0].receiver)
    assert {path.split("/")[0] for path in taken} == {"embeddings", "layers"}
    with pytest.raises(ConfigError, match="has layers/.* of shape .1, .*, but this model has .2,"):
        taken_from(open_parent(FromRun(run=str(parent)), "init.run"), composed(*small, *labels, "model.layers=2")[0].receiver)
    with pytest.raises(ConfigError, match="would be initialised at random and never trained"):
        frozen = composed(*small, *labels, "train=lora", "train.head=false")[0].receiver
        taken_from(open_parent(FromRun(run=str(parent)), "init.run"), frozen)
