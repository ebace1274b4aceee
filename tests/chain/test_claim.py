"""What several stages protect together, from made-up charges."""

import dataclasses
from typing import Any

import pytest

from dpx.claim.calibration import Entries, calibrate
from dpx.config.declared_chain import declared
from dpx.data.protected_units import unit_facts
from dpx.init.chain_claim import StageRelease, claim
from dpx.init.start import Held
from dpx.privacy.origins import Origin, ParentClaim, VocabularyFacts, charged
from dpx.privacy.segments import join
from tests.composed import composed

PRIVATE = ("model=micro", "data=synthetic", "steps=4", "batch_schedule.size=16", "noise=multiplier", "noise.noise_multiplier=1.5")
PRIVATE += ("accountant=rdp", "privacy.delta=1e-4")


def _release(stage: str, *overrides: str, further: tuple[Origin, ...] = ()) -> StageRelease:
    experiment = composed(*PRIVATE, *overrides)[0]
    segments = []
    if experiment.is_private:
        known = calibrate(experiment.claim, 1000)
        assert known.noise_multiplier is not None
        segments = Entries.of(experiment.claim).planned(known.batch_stages, known.size, known.noise_multiplier, stage)
    units = unit_facts(experiment.data, experiment.privacy)
    origin = Origin(
        kind="run",
        name=stage,
        identity=stage,
        segments=tuple(segments),
        reasons=() if experiment.is_private else ("mechanism=none adds no noise",),
        claim=ParentClaim(adjacency=experiment.privacy.adjacency, units=units),
        vocabulary=VocabularyFacts(source=units.vocabulary_source),
    )
    return StageRelease(
        stage=stage,
        label=stage,
        held=Held(experiment.data, experiment.privacy),
        accountant=experiment.accountant,
        is_private=experiment.is_private,
        origins=(origin, *further),
        texts=(f"text of {stage}",),
        segments=join(segments, *charged(further)),
        units=units if experiment.is_private else None,
    )


def _text(stage: str, *overrides: str) -> Origin:
    """The text that a stage fits its vocabulary on."""
    experiment = composed(*PRIVATE, *overrides)[0]
    fit_on = experiment.data.vocabulary.fit_on
    return Origin(
        kind="text",
        name=stage,
        identity=f"text of {stage}",
        reasons=("learnt from protected text",) if fit_on == "protected" else (),
        claim=ParentClaim(units=unit_facts(experiment.data, experiment.privacy)),
        vocabulary=VocabularyFacts(source="protected" if fit_on == "protected" else "public_split"),
    )


def _claim(stages: dict[str, Any], *releases: StageRelease) -> Any:
    return claim(declared({"stages": stages}), releases)


def _epsilon(found: Any, stage: str) -> float:
    return next(one.epsilon["rdp"] for one in found.protects if one.stage == stage)


def test_private_stages_that_may_share_units_are_composed_and_disjoint_ones_are_not():
    one, other = _release("one"), _release("other", "data.source.seed=1")
    joint = _claim({"one": {}, "other": {}}, one, other)
    apart = _claim({"one": {}, "other": {"disjoint_from": ["one"]}}, one, other)
    alone = _claim({"one": {}}, one)
    assert {one.guarantee for one in (joint, apart, alone)} == {"dp"}
    assert _epsilon(joint, "one") == _epsilon(joint, "other") > _epsilon(alone, "one") == _epsilon(apart, "one")
    assert joint.protects[0].composed_with == ("other",) and apart.protects[0].composed_with == ()


def test_a_charge_that_two_stages_hold_counts_once():
    one = _release("one")
    child = _release("other", further=one.origins)
    joint = _claim({"one": {}, "other": {"init": "one"}}, one, child)
    assert _epsilon(joint, "one") == _epsilon(_claim({"one": {}, "other": {}}, one, _release("other")), "one")


@pytest.mark.parametrize(
    ("word", "guarantee"),
    [({}, "none"), ({"disjoint_from": ["one"]}, "dp"), ({"provenance": "public"}, "dp")],
)
def test_a_stage_without_privacy_leaves_a_guarantee_only_by_the_users_word(word: dict[str, Any], guarantee: str):
    found = _claim({"one": {}, "bare": word}, _release("one"), _release("bare", "mechanism=none"))
    assert found.guarantee == guarantee and bool(found.reasons) == (guarantee == "none")
    assert bool(found.protects[0].epsilon) == (guarantee == "dp")
    assert any("bare" in line for line in found.assumptions) == bool(word)


def test_a_chain_tells_who_was_given_metrics_of_a_stage_without_noise():
    one = _release("one")
    first = dataclasses.replace(one.origins[0], claim=dataclasses.replace(one.origins[0].claim, given_protected=("wandb",)))
    found = _claim({"one": {}, "other": {}}, dataclasses.replace(one, origins=(first,)), _release("other"))
    assert sum("which one (one) gave to wandb" in line for line in found.not_covered) == 1


def test_other_units_do_not_add_up():
    found = _claim({"one": {}, "other": {}}, _release("one"), _release("other", "data.sequence_length=16"))
    assert found.guarantee == "none" and "protects another unit" in found.reasons[0] and "sequence_length" in found.reasons[0]


def test_reasons_of_a_stage_hold_for_those_that_share_units_with_it():
    broken = _release("other")
    broken = dataclasses.replace(broken, origins=(dataclasses.replace(broken.origins[0], reasons=("fixed_seed: noise is known",)),))
    assert _claim({"one": {}, "other": {}}, _release("one"), broken).protects[0].guarantee == "none"
    assert _claim({"one": {}, "other": {"disjoint_from": ["one"]}}, _release("one"), broken).protects[0].guarantee == "dp"


def test_data_of_one_name_is_not_disjoint():
    rows = ("task=classification", "data=ledgar", "task.classes=100", "model.positions=128")
    one, bare = _release("one", *rows), _release("bare", *rows, "mechanism=none")
    found = _claim({"one": {}, "bare": {"disjoint_from": ["one"]}}, one, bare)
    assert found.guarantee == "none" and "both are ledgar" in found.reasons[0]


@pytest.mark.parametrize(
    ("word", "salt", "fit_on", "guarantee"),
    [
        # A unit that is public there is public here.
        ({}, "dpx", "public", "dp"),
        ({}, "another", "public", "none"),
        ({}, "dpx", "protected", "none"),
        ({"provenance": "public"}, "another", "protected", "dp"),
    ],
)
def test_a_vocabulary_of_another_stage_may_reveal_text(word: dict[str, Any], salt: str, fit_on: str, guarantee: str):
    about = (f"data.split_salt={salt}", f"data.vocabulary.fit_on={fit_on}")
    words = dataclasses.replace(_release("words", "mechanism=none", *about), origins=())
    found = _claim(
        {"words": {"job": "prepare"} | word, "one": {"vocabulary": "words"}},
        words,
        _release("one", further=(_text("words", *about),)),
    )
    assert found.guarantee == guarantee


def test_what_a_bare_stage_comes_from_counts_even_if_its_own_rows_are_declared_apart():
    earlier = dataclasses.replace(_release("earlier", "mechanism=none").origins[0], identity="a run outside of the chain")
    bare = _release("bare", "mechanism=none", further=(earlier,))
    for word in ({"provenance": "public"}, {"disjoint_from": ["one"]}):
        found = _claim({"one": {}, "bare": word}, _release("one"), bare)
        assert found.guarantee == "none" and "earlier" in found.reasons[0]
    unknown = Origin(kind="file", name="weights", identity="weights")
    found = _claim({"one": {}, "bare": {"provenance": "public"}}, _release("one"), _release("bare", "mechanism=none", further=(unknown,)))
    assert found.guarantee == "none" and "of unknown provenance" in found.reasons[0]


def test_nothing_is_claimed_before_every_stage_has_run():
    found = claim(declared({"stages": {"one": {}, "later": {"init": "one"}}}), [_release("one")], ["later"])
    assert found.guarantee == "none" and "later have not run" in found.reasons[0]


def test_a_chain_without_noise_is_not_private():
    found = _claim({"bare": {}}, _release("bare", "mechanism=none"))
    assert found.guarantee == "not_private" and found.reasons == ("no stage adds noise",)
