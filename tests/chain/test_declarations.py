"""What a chain declares: stages in order, each named one there, and nothing in a circle."""

from pathlib import Path
from typing import Any

import pytest

from dpx.config.declared_chain import declared
from dpx.declaration import ConfigError
from dpx.job.chain_stages import composed

from .conftest import CLASSIFY, PRETRAIN, node


def test_stages_run_after_those_that_feed_them():
    stages = {"last": {"init": "middle"}, "middle": {"init": "first", "vocabulary": "words"}, "words": {"job": "prepare"}, "first": {}}
    assert declared({"stages": stages}).in_order() == ["words", "first", "middle", "last"]


@pytest.mark.parametrize(
    ("stages", "line"),
    [
        ({}, "chain.stages: a chain has at least one stage. Declare chain.stages.<name>."),
        ({"a": {"init": "bc"}, "b": {}}, "chain.stages.a.init=bc: no other stage has this name. Name one of b."),
        ({"a": {"init": "a"}}, "chain.stages.a.init=a: no other stage has this name. Name one of more stages."),
        (
            {"a": {"init": "b"}, "b": {"vocabulary": "a"}},
            "chain.stages: they feed each other in a circle (a <- b <- a). Remove one init or vocabulary.",
        ),
        ({"a": {"inti": "b"}}, "chain.stages.a.inti: unknown key. Did you mean chain.stages.a.init?"),
        ({"A-1": {}}, "chain.stages.A-1: is not a name of small letters, digits and _. Rename the stage."),
        (
            {"a": {"job": "prepare"}, "b": {"init": "a"}},
            "chain.stages.b.init=a: this stage trains no weights. Name it under vocabulary.",
        ),
        (
            {"a": {"sweep": {"steps": [1, 2]}}, "b": {"init": "a"}},
            "chain.stages.b.init=a: this stage has several points, and which one is chosen is not known beforehand. "
            "Declare the chosen values, and remove its sweep.",
        ),
        (
            {"a": {"job": "prepare"}, "b": {"vocabulary": "a", "shared_by_replicates": True}},
            "chain.stages.b.shared_by_replicates: it is fed by a, which every repeat runs again, so that this stage would be another one "
            "each time. Set chain.stages.a.shared_by_replicates=true as well.",
        ),
    ],
)
def test_stages_that_cannot_be_a_chain_are_refused_in_one_line(stages: dict[str, Any], line: str):
    with pytest.raises(ConfigError) as refused:
        declared({"stages": stages})
    assert str(refused.value) == line


@pytest.mark.parametrize(
    ("classify", "line"),
    [
        ({"values": {"stepz": 3}}, "chain.stages.classify: stepz: unknown key. Did you mean steps?"),
        ({"options": CLASSIFY["options"] | {"data": "synthetik"}}, "chain.stages.classify: data=synthetik: no such option."),
        (
            {"values": {"data": {"vocabulary": {"size": 128}}}},
            "chain.stages.classify.init=pretrain: its vocabulary has 512 word pieces, and this stage declares 128.",
        ),
        ({"values": {"model": {"width": 48}}}, "chain.stages.classify.init=pretrain: has embeddings/norm/bias of shape (32,), but"),
        ({"values": {"model": {"layers": 2}}}, "chain.stages.classify.init=pretrain: has layers/attention_norm/bias of shape (1, 32), but"),
        (
            {"options": CLASSIFY["options"] | {"mechanism": "dp_sgd"}, "sweep": {"steps": [1, 2]}},
            "chain.stages.classify.sweep: a choice among runs on protected text has its own cost, which a chain does not charge.",
        ),
        ({"options": CLASSIFY["options"] | {"mesh": "h200"}}, "chain.stages: one process can use one mesh only."),
    ],
)
def test_a_stage_that_does_not_fit_is_refused_before_anything_runs(classify: dict[str, Any], line: str):
    with pytest.raises(ConfigError) as refused:
        composed(declared(node(classify=CLASSIFY | classify)), "two", 0, Path("outputs"))
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_a_changed_stage_and_all_that_it_feeds_have_other_folders():
    def folders(chain: dict[str, Any]) -> list[str]:
        return [run.folder.name for each in composed(declared(chain), "two", 0, Path("outputs")).values() for run in each]

    usual = folders(node())
    assert all(one != other for one, other in zip(usual, folders(node(pretrain=PRETRAIN | {"values": {"steps": 3}})), strict=True))
    later = folders(node(classify=CLASSIFY | {"values": {"steps": 3}}))
    assert later[0] == usual[0] and later[1] != usual[1]


def test_repeats_of_a_chain_share_a_stage_that_says_so_and_no_other():
    def folders(replicate: int, **more: Any) -> list[str]:
        chain = declared(node(pretrain=PRETRAIN | more))
        return [run.folder.name for each in composed(chain, "two", replicate, Path("outputs")).values() for run in each]

    assert set(folders(0)).isdisjoint(folders(1))
    first, again = (folders(replicate, shared_by_replicates=True) for replicate in (0, 1))
    assert first[0] == again[0] and first[1] != again[1] and first == folders(0)


def test_a_stage_reads_the_weights_and_the_vocabulary_of_the_one_before():
    runs = composed(declared(node()), "two", 0, Path("outputs"))
    before, experiment = runs["pretrain"][0], runs["classify"][0].experiment
    assert experiment.data.vocabulary.path == f"outputs/{before.folder.name}/private/vocabulary.txt"
    assert experiment.data.vocabulary.size == before.experiment.data.vocabulary.size
    assert getattr(experiment.init, "run", None) == f"outputs/{before.folder.name}"
