"""Every field of the record of a claim's units keeps charges of two ledgers apart, and is written and read back."""

import dataclasses
import types
from typing import Any

import pytest

from dpx import config
from dpx.config import recipes
from dpx.config.experiment import Experiment
from dpx.data.protected_units import unit_facts
from dpx.declaration import ConfigError
from dpx.files.records import from_json, to_json
from dpx.privacy.declared_privacy import UnitFacts

MANIFEST = types.SimpleNamespace(vocabulary_source="public_split", vocabulary_checksum="a" * 64)
DOCUMENTS = ("data=text", "data.source.paths=text.jsonl", "data.source.unit_field=author", "data.declared_size=1000")


def built(*overrides: str) -> Experiment:
    return config.build(recipes.compose(list(overrides)))[0]


def facts_of(*overrides: str, manifest: Any = MANIFEST) -> UnitFacts:
    experiment = built(*overrides)
    return unit_facts(experiment.data, experiment.privacy, manifest)


def changed(facts: UnitFacts):
    """The record with each leaf changed in turn, those of its definition included."""
    for field in dataclasses.fields(facts):
        value = getattr(facts, field.name)
        for path, other in leaves(value):
            yield ".".join((field.name, *path)), dataclasses.replace(facts, **{field.name: other})


def leaves(value, path=()):
    """(path, the whole value with the leaf there changed)."""
    if isinstance(value, dict):
        yield (*path, "new"), value | {"new": "key"}
        for name, item in value.items():
            for inner, other in leaves(item, (*path, name)):
                yield inner, value | {name: other}
        return
    yield path, f"{value}x" if value is None or isinstance(value, str) else value + 1


@pytest.mark.parametrize("overrides", [(), (*DOCUMENTS, "privacy.unit=document", "privacy.rows_per_unit_max=4")])
def test_any_leaf_keeps_two_records_apart_and_is_named(overrides):
    facts = facts_of(*overrides)
    assert facts.differences(facts) == [] and from_json(UnitFacts, to_json(facts), "x") == facts
    tried = dict(changed(facts))
    assert len(tried) > len(dataclasses.fields(facts))
    for path, other in tried.items():
        (said,) = facts.differences(other)
        assert other.differences(facts) and from_json(UnitFacts, to_json(other), "x") == other
        assert path.split(".")[-1].replace("vocabulary_source", "vocabulary").replace("vocabulary_sha256", "vocabulary") in said, path


# What a config may change: (overrides, the key that the difference names), beside the fields of the record alone.
OF_CONFIG = {
    "privacy.unit": ("privacy.unit=document",),
    "privacy.adjacency": ("privacy.adjacency=replace_one",),
    "privacy.rows_per_unit_max": ("privacy.unit=document", "privacy.rows_per_unit_max=2"),
    "privacy.unit_mode": ("privacy.unit=document", "privacy.rows_per_unit_max=2", "privacy.unit_mode=sample_units"),
    "data.split_salt": ("data.split_salt=other",),
    "data.public_fraction": ("data.public_fraction=0.1",),
    "data.heldout_fraction": ("data.heldout_fraction=0.1",),
    "data.source.unit_field": ("data.source.unit_field=household",),
    "data.source.text_field": ("data.source.text_field=body",),
    "data.sequence_length": ("data.sequence_length=16",),
    "data.vocabulary": ("data.vocabulary.fit_on=protected",),
}


@pytest.mark.parametrize("key", OF_CONFIG)
def test_a_config_that_protects_other_units_has_another_record(key):
    manifest = None if key == "data.vocabulary" else MANIFEST
    said = facts_of(*DOCUMENTS, manifest=MANIFEST).differences(facts_of(*DOCUMENTS, *OF_CONFIG[key], manifest=manifest))
    assert any(one.startswith(f"{key} (") for one in said)


@pytest.mark.parametrize("override", ["steps=7", "noise.epsilon=3", "batch_schedule.size=64", "privacy.delta=1e-7", "data.directory=x"])
def test_what_the_units_do_not_depend_on_is_not_in_it(override):
    assert facts_of().differences(facts_of(override)) == []


def test_rows_of_another_length_are_other_units_only_where_the_unit_is_a_row():
    document = (*DOCUMENTS, "privacy.unit=document")
    assert facts_of(*document).differences(facts_of(*document, "data.sequence_length=16")) == []


def test_an_unknown_vocabulary_agrees_with_nothing():
    known, unknown = facts_of(), facts_of(manifest=None)
    for one, other in ((known, unknown), (unknown, known), (unknown, unknown)):
        assert one.differences(other) == ["data.vocabulary (the checksum of one of them is not known)"]


@pytest.mark.parametrize("node", [None, [], {}, {"unit": "row"}, to_json(facts_of()) | {"unit": 3}, to_json(facts_of()) | {"x": 1}])
def test_what_is_no_record_is_refused_in_one_line(node):
    with pytest.raises(ConfigError, match=r"^privacy\.json: .*\. Restore the file, or use the version of dpx that wrote it\.$"):
        from_json(UnitFacts, node, "privacy.json")
