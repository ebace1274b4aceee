"""What a run starts from is charged once, at its worst, and travels in ledgers and statements."""

import dataclasses

import pytest

from dpx.declaration import ConfigError
from dpx.privacy import ledger as ledgers
from dpx.privacy import origins
from dpx.privacy.ledger import Ledger
from dpx.privacy.origins import Origin, merged, of_released

from .test_ledger import entry, fill


def segments(name: str, steps: int) -> list:
    return ledgers.encode([(name, step, entry(epoch_name=name)) for step in range(steps)])


def origin(name: str, steps: int = 3, **changes) -> Origin:
    fields = {"kind": "run", "name": name, "identity": name, "relation": "same", "segments": segments(name, steps), "data": ["text"]}
    return Origin(**(fields | changes))


def charged(ledger: Ledger) -> int:
    return sum(count for run in ledger.segments() for _, count in run["steps"])


def test_a_ledger_charges_what_its_run_begins_from_and_reads_it_back(tmp_path):
    ledger = fill(tmp_path / "ledger", range(2))
    ledger.note_origins([origin("one"), origin("other", relation="disjoint")])
    again = Ledger(tmp_path / "ledger")
    assert charged(ledger) == charged(again) == 5 and again.origins == ledger.origins
    assert sum(count for run in again.own_segments() for _, count in run["steps"]) == 2
    lines = len((tmp_path / "ledger").read_text().splitlines())
    again.note_origins(ledger.origins)
    assert len((tmp_path / "ledger").read_text().splitlines()) == lines


def test_an_origin_is_charged_once_by_two_ways_and_whole(tmp_path):
    ledger = fill(tmp_path / "ledger", range(2))
    ledger.note_origins([origin("one", 3), origin("between", segments=ledgers.join(segments("between", 2), segments("one", 5)))])
    assert charged(ledger) == 2 + 2 + 5


@pytest.mark.parametrize(("first", "then"), [("disjoint", "same"), ("same", "disjoint"), ("overlapping", "unknown"), ("unknown", "same")])
def test_the_worst_that_is_known_stays(tmp_path, first, then):
    worst = {first, then} - {"disjoint", "same"} or {"same"}
    ledger = fill(tmp_path / "ledger", range(2))
    for relation in (first, then):
        ledger.note_origins([origin("one", relation=relation, reasons=[relation])])
    (found,) = Ledger(tmp_path / "ledger").origins
    assert found.relation in worst and charged(ledger) == 5 and set(found.reasons) == {first, then}


def test_two_words_for_one_file_are_none():
    public = Origin(kind="file", name="bert", identity="sha256:1", provenance="public")
    (found,) = merged([public], [dataclasses.replace(public, provenance=None)])
    assert origins.reasons([public]) == [] and "unknown provenance" in origins.reasons([found])[0]


def test_a_fork_takes_over_what_its_parent_began_from_and_on_which_data(tmp_path):
    parent = fill(tmp_path / "parent", range(2))
    parent.note_origins([origin("one")])
    fork = Ledger(tmp_path / "fork")
    fork.note_parent("parent@1", parent)
    fork.inherit(parent)
    assert charged(Ledger(tmp_path / "fork")) == 5 and Ledger(tmp_path / "fork").data == [None]


def test_what_is_released_tells_nothing_of_the_data_and_says_least_to_the_next():
    released = origin("one", relation="disjoint", against=["a unit of another kind"]).as_released()
    assert "data" not in released and released["composed"] is False
    again = of_released(released)
    assert (again.relation, again.data, again.against, again.is_checked) == ("unknown", (None,), (), False)
    assert again.segments == released["runs"] and again.is_composed


def test_another_neighbouring_relation_is_refused_where_it_would_be_composed(small):
    privacy, claim = small().privacy, {"adjacency": "add_remove"}
    for harmless in (origin("one", relation="disjoint", claim=claim), origin("one", claim=claim, reasons=["none anyway"])):
        origins.require_same_relation([harmless], privacy)
    with pytest.raises(ConfigError, match="Use privacy.adjacency=add_remove"):
        origins.require_same_relation([origin("one", claim=claim)], privacy)


def test_rows_are_the_same_units_only_where_they_are_cut_alike(small):
    declared = small()
    alike = origins.unit_definition(declared.data, declared.privacy)
    theirs = origin("one", relation="unknown", claim={"unit": "row", "unit_definition": alike})
    assert origins.unit_mismatch(theirs, declared.data, declared.privacy) is None
    shorter = dataclasses.replace(declared.data, sequence_length=16)
    assert "cut otherwise" in (origins.unit_mismatch(theirs, shorter, declared.privacy) or "")
    documents = dataclasses.replace(declared.privacy, unit="document")
    assert "is not what this run protects (document" in (origins.unit_mismatch(theirs, declared.data, documents) or "")
    crossed = dataclasses.replace(declared.data, pairs="cross_document")
    paired = dataclasses.replace(theirs, claim={"unit": "row", "unit_definition": origins.unit_definition(crossed, declared.privacy)})
    assert "paired otherwise" in (origins.unit_mismatch(paired, crossed, declared.privacy) or "")
    assert origins.unit_mismatch(dataclasses.replace(paired, relation="same"), crossed, declared.privacy) is None
