"""What several stages protect together, from made-up charges."""

import dataclasses
from typing import Any

import pytest

from dpx.chain.claim import StageCharge, claim
from dpx.chain.declarations import declared
from dpx.claim.calibration import calibrate, planned_segments
from dpx.privacy.unit_facts import UnitFacts
from tests.composed import composed

PRIVATE = ("model=micro", "data=synthetic", "steps=4", "batch_schedule.size=16", "noise=multiplier", "noise.noise_multiplier=1.5")
PRIVATE += ("accountant=rdp", "privacy.delta=1e-4")


def _charge(stage: str, *overrides: str) -> StageCharge:
    experiment = composed(*PRIVATE, *overrides)[0]
    segments = []
    if experiment.is_private:
        known = calibrate(experiment, 1000)
        assert known.noise_multiplier is not None
        segments = planned_segments(experiment, known.batch_stages, known.size, known.noise_multiplier, stage)
    return StageCharge(
        stage=stage,
        label=stage,
        data=experiment.data,
        privacy=experiment.privacy,
        accountant=experiment.accountant,
        is_private=experiment.is_private,
        segments=segments,
        units=UnitFacts.from_data(experiment.data, experiment.privacy) if experiment.is_private else None,
        is_planned=True,
    )


def _claim(stages: dict[str, Any], *charges: StageCharge) -> Any:
    return claim(declared({"stages": stages}), charges)


def _epsilon(found: Any, stage: str) -> float:
    return next(one.epsilon["rdp"] for one in found.protects if one.stage == stage)


def test_private_stages_that_may_share_units_are_composed_and_disjoint_ones_are_not():
    one, other = _charge("one"), _charge("other", "data.source.seed=1")
    joint = _claim({"one": {}, "other": {}}, one, other)
    apart = _claim({"one": {}, "other": {"disjoint_from": ["one"]}}, one, other)
    alone = _claim({"one": {}}, one)
    assert {one.guarantee for one in (joint, apart, alone)} == {"dp"}
    assert _epsilon(joint, "one") == _epsilon(joint, "other") > _epsilon(alone, "one") == _epsilon(apart, "one")
    assert joint.protects[0].composed_with == ("other",) and apart.protects[0].composed_with == ()


def test_a_charge_that_two_stages_hold_counts_once():
    one = _charge("one")
    child = dataclasses.replace(_charge("other"), segments=[*_charge("other").segments, *one.segments])
    joint = _claim({"one": {}, "other": {"init": "one"}}, one, child)
    assert _epsilon(joint, "one") == _epsilon(_claim({"one": {}, "other": {}}, one, _charge("other")), "one")


@pytest.mark.parametrize(
    ("word", "guarantee"),
    [({}, "none"), ({"disjoint_from": ["one"]}, "dp"), ({"provenance": "public"}, "dp")],
)
def test_a_stage_without_privacy_leaves_a_guarantee_only_by_the_users_word(word: dict[str, Any], guarantee: str):
    found = _claim({"one": {}, "bare": word}, _charge("one"), _charge("bare", "mechanism=none"))
    assert found.guarantee == guarantee and bool(found.reasons) == (guarantee == "none")
    assert bool(found.protects[0].epsilon) == (guarantee == "dp")
    assert any("bare" in line for line in found.assumptions) == bool(word)


def test_other_units_do_not_add_up():
    found = _claim({"one": {}, "other": {}}, _charge("one"), _charge("other", "data.sequence_length=16"))
    assert found.guarantee == "none" and "protects other units" in found.reasons[0] and "sequence_length" in found.reasons[0]


def test_reasons_of_a_stage_hold_for_those_that_share_units_with_it():
    broken = dataclasses.replace(_charge("other"), reasons=("fixed_seed: the noise can be recomputed",))
    assert _claim({"one": {}, "other": {}}, _charge("one"), broken).protects[0].guarantee == "none"
    assert _claim({"one": {}, "other": {"disjoint_from": ["one"]}}, _charge("one"), broken).protects[0].guarantee == "dp"


def test_data_of_one_name_is_not_disjoint():
    rows = ("task=classification", "data=ledgar", "task.classes=100", "model.positions=128")
    one, bare = _charge("one", *rows), _charge("bare", *rows, "mechanism=none")
    found = _claim({"one": {}, "bare": {"disjoint_from": ["one"]}}, one, bare)
    assert found.guarantee == "none" and "both are ledgar" in found.reasons[0]


@pytest.mark.parametrize(
    ("word", "seed", "fit_on", "guarantee"),
    [({}, 0, "public", "dp"), ({}, 1, "public", "none"), ({}, 0, "protected", "none"), ({"provenance": "public"}, 1, "protected", "dp")],
)
def test_a_vocabulary_of_another_stage_may_reveal_text(word: dict[str, Any], seed: int, fit_on: str, guarantee: str):
    words = _charge("words", "mechanism=none", f"data.source.seed={seed}", f"data.vocabulary.fit_on={fit_on}")
    words = dataclasses.replace(words, trains=False)
    found = _claim({"words": {"job": "prepare"} | word, "one": {"vocabulary": "words"}}, words, _charge("one"))
    assert found.guarantee == guarantee


def test_nothing_is_claimed_before_every_stage_has_run():
    found = claim(declared({"stages": {"one": {}, "later": {"init": "one"}}}), [_charge("one")], ["later"])
    assert found.guarantee == "none" and "later have not run" in found.reasons[0]


def test_a_chain_without_noise_is_not_private():
    found = _claim({"bare": {}}, _charge("bare", "mechanism=none"))
    assert found.guarantee == "not_private" and found.reasons == ("no stage adds noise",)
