"""A loop of the user's own: dpx draws and charges, and its statement claims nothing that rests on the user's word."""

import json
from pathlib import Path

import numpy as np
import pytest

import dpx
from dpx import packages
from dpx.claim.combined_ledgers import read, together
from dpx.claim.own_loop import ON_THE_USERS_WORD, Ledger
from dpx.declaration import ConfigError, declaration
from dpx.privacy.declared_privacy import Privacy
from dpx.sampler import Batches, Poisson
from dpx.statement import received

BATCHES = {
    "poisson": lambda **more: dpx.sampler.poisson(1000, 64, 3, **more),
    "truncated_poisson": lambda **more: dpx.sampler.truncated_poisson(1000, 64, 3, **more),
    "cyclic_poisson": lambda **more: dpx.sampler.cyclic_poisson(1000, 64, 3, cycle=4, **more),
    "fixed_size": lambda **more: dpx.sampler.fixed_size(1000, 64, 3, **more),
    "shuffled": lambda **more: dpx.sampler.shuffled(1000, 64, 3, **more),
    "deterministic": lambda **more: dpx.sampler.deterministic(1000, 64, 3, **more),
    "random_allocation": lambda **more: dpx.sampler.random_allocation(1000, 64, 3, **more),
    "balls_in_bins": lambda **more: dpx.sampler.balls_in_bins(1000, 64, 3, **more),
}


@declaration
class Mine(Poisson):
    """A sampler that draws as it likes and is charged as the one that it inherits."""


def loop(folder: Path, **changes) -> Ledger:
    given = {"noise_multiplier": 1.0, "clipping_norm": 1.0, "delta": 1e-5, "begins_from": "random", "accountant": "rdp"}
    return dpx.Ledger(folder, **(given | changes))


@pytest.mark.parametrize("name", BATCHES)
def test_every_sampler_gives_padded_batches_with_their_event_and_a_statement(name, tmp_path):
    # Each where the table of events has a bound for it.
    proved = {"truncated_poisson": {"accountant": "pld"}, "fixed_size": {"adjacency": "replace_one"}}
    with loop(tmp_path, **proved.get(name, {})) as own:
        batches = list(own.record(BATCHES[name]()))
    for step, batch in enumerate(batches):
        drawn = batch.indices[~batch.is_padding]
        assert batch.step == step and batch.event["sampler"] == name and len(batch.indices) == len(batch.is_padding)
        assert len(set(drawn.tolist())) == len(drawn) and (drawn < 1000).all() and not batch.indices[batch.is_padding].any()
    if name != "truncated_poisson":
        assert all(len(batch.indices) % 64 == 0 for batch in batches)
    assert len({batch.key.tobytes() for batch in batches}) == 3
    stated = own.statement()
    number = next(one for one in stated.unsupported if one.name == f"epsilon/{stated.accountant}")
    assert stated.guarantee == "dp_by_user_loop" and stated.epsilon == {} and number.value and number.value > 0
    assert set(ON_THE_USERS_WORD) <= set(stated.assumptions) and stated.spent.charged_steps == 3
    assert {segment.by for segment in stated.ledger.segments} == {"user_loop"}


def test_its_number_is_that_of_the_accountant_and_its_folder_is_read_as_a_runs(tmp_path):
    with loop(tmp_path, accountant="pld") as own:
        list(own.record(dpx.sampler.poisson(1000, 64, 20)))
    expected = dpx.privacy.epsilon([(64 / 1000, 20)], noise_multiplier=1.0, delta=1e-5, adjacency="zero_out")
    document = json.loads((tmp_path / "release" / "privacy.json").read_text())
    (number,) = [one["value"] for one in document["unsupported"] if one["name"] == "epsilon/pld"]
    assert number == pytest.approx(expected, rel=1e-3)
    assert received.read(tmp_path).guarantee == "dp_by_user_loop"


def test_a_step_is_charged_before_its_batch_is_given_and_a_key_is_used_once(tmp_path):
    own = loop(tmp_path)
    given = own.record(dpx.sampler.poisson(1000, 64, 3))
    assert own.statement().spent.charged_steps == 0
    next(given)
    assert own.statement().spent.charged_steps == 1
    with pytest.raises(ConfigError, match="^step 0: was drawn before with this secret"):
        next(own.record(dpx.sampler.poisson(1000, 32, 3)))
    next(own.record(dpx.sampler.poisson(1000, 64, 1, first_step=1)))
    own.close()
    with loop(tmp_path) as again:
        (batch,) = again.record(dpx.sampler.poisson(1000, 64, 1))
        assert again.statement().spent.charged_steps == 3, "a loop that is started again is charged for all steps"
    assert batch.key.tobytes() not in {one.key.tobytes() for one in dpx.sampler.poisson(1000, 64, 1)}


def test_epochs_of_two_lengths_are_refused_in_one_loop(tmp_path):
    own = loop(tmp_path)
    next(own.record(dpx.sampler.shuffled(1000, 64, 3)))
    next(own.record(dpx.sampler.poisson(1000, 32, 1, first_step=5)))
    with pytest.raises(ConfigError, match="^sampler=shuffled: draws in epochs"):
        own.record(dpx.sampler.shuffled(1000, 32, 3, first_step=8))


def test_only_one_ledger_of_a_folder_is_open_and_a_closed_one_gives_no_batch(tmp_path):
    own = loop(tmp_path)
    with pytest.raises(ConfigError, match="a loop is open in this folder"):
        loop(tmp_path)
    given = own.record(dpx.sampler.poisson(1000, 64, 3))
    next(given)
    own.close()
    own.close()
    with loop(tmp_path) as again, pytest.raises(ConfigError, match="this ledger is closed"):
        next(given)
    assert again.statement().spent.charged_steps == 1


def test_a_later_start_states_what_was_charged_before(tmp_path):
    with loop(tmp_path) as own:
        list(own.record(dpx.sampler.poisson(1000, 64, 2)))
    with pytest.raises(ConfigError, match="^delta=0.01: not below 1/N"):
        loop(tmp_path, delta=1e-2)
    with loop(tmp_path, noise_multiplier=9.0, clipping_norm=5.0) as again:
        list(again.record(dpx.sampler.cyclic_poisson(1000, 64, 2, cycle=4)))
    stated = again.statement()
    assert (stated.mechanism.noise_multiplier, stated.mechanism.clipping_norm) == (1.0, 1.0)
    assert stated.sampler["name"] == "poisson and cyclic_poisson"


def test_a_loop_is_accounted_for_at_its_own_delta_and_stays_on_the_users_word(tmp_path):
    with loop(tmp_path, delta=1e-6) as own:
        list(own.record(dpx.sampler.poisson(1000, 64, 2)))
    joint = together([read(tmp_path)], otherwise=Privacy(delta=1e-4))
    assert (joint.delta, joint.adjacency, joint.by) == (1e-6, "zero_out", ("user_loop",))


def test_weights_of_unknown_provenance_have_no_guarantee_whatever_a_later_start_says(tmp_path):
    loop(tmp_path, begins_from="unknown").close()
    stated = loop(tmp_path).statement()
    assert stated.guarantee == "none" and stated.reasons and stated.epsilon == {}
    public = loop(tmp_path / "public", begins_from="public").statement()
    assert public.guarantee == "dp_by_user_loop" and any("weights that the loop begins from" in one for one in public.assumptions)


def test_a_loop_has_one_neighbouring_relation(tmp_path):
    loop(tmp_path, adjacency="add_remove").close()
    with pytest.raises(ConfigError, match="^adjacency=zero_out: the loop of this folder began under add_remove"):
        loop(tmp_path)
    loop(tmp_path, adjacency="add_remove").close()


@pytest.mark.parametrize(
    ("changes", "batches", "said"),
    [
        ({"delta": 1e-2}, BATCHES["poisson"], "not below 1/N"),
        ({"adjacency": "add_remove"}, BATCHES["shuffled"], "shuffled"),
        ({}, lambda: Batches(Mine(), 1000, 64, 3, 64), "is not a sampler of dpx"),
        ({"noise_multiplier": 0.0}, BATCHES["poisson"], "noise_multiplier=0.0"),
        ({}, lambda: dpx.sampler.poisson(10, 64, 3), "batch_size=64"),
        ({}, lambda: dpx.sampler.poisson(1000, 64, 0), "steps=0"),
    ],
)
def test_what_is_not_proved_is_refused_before_a_step(changes, batches, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        loop(tmp_path, **changes).record(batches())


def test_an_empty_draw_is_a_step_of_padding_alone():
    drawn = Batches(dpx.sampler.Poisson(), 1000, 1, 40, pad_to=4)
    empty = [batch for batch in drawn if batch.is_padding.all()]
    assert empty and all(len(batch.indices) == 4 for batch in empty) and np.array_equal(empty[0].indices, np.zeros(4))


def test_no_package_may_have_the_name_of_the_loop(tmp_path, monkeypatch):
    from tests.outside.made_up import package

    package(tmp_path, "user_loop", {"conf/clip/reed.yaml": "a: 1"})
    monkeypatch.syspath_prepend(str(tmp_path))
    (named,) = [one for one in packages.listed() if one.name == "user_loop"]
    assert "does not belong to this distribution" in named.set_aside
