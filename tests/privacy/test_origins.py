"""What a run starts from is charged once, at its worst, and travels in ledgers and statements."""

import dataclasses

import pytest

from dpx.data.protected_units import unit_facts, unit_mismatch
from dpx.declaration import ConfigError
from dpx.files.records import to_json
from dpx.privacy import origins
from dpx.privacy.ledger import Ledger
from dpx.privacy.origins import Origin, ParentClaim, ReleasedOrigin, merged, of_released
from dpx.privacy.segments import encode
from tests.sealed import refuting

from .test_ledger import entry, fill


def segments(name: str, steps: int) -> tuple:
    return tuple(encode([(name, step, entry(epoch_name=name)) for step in range(steps)]))


def origin(name: str, steps: int = 3, **changes) -> Origin:
    fields = {"kind": "run", "name": name, "identity": name, "segments": segments(name, steps), "data": ("text",)}
    return Origin(**(fields | changes))


PROVED = refuting()


def charged(ledger: Ledger) -> int:
    return sum(run.count for run in ledger.segments())


def test_a_ledger_charges_what_its_run_begins_from_and_reads_it_back(tmp_path):
    ledger = fill(tmp_path / "ledger", range(2))
    ledger.note_origins([origin("one"), origin("other", relation="disjoint")])
    again = Ledger(tmp_path / "ledger")
    assert charged(ledger) == charged(again) == 5 and again.origins == ledger.origins
    assert sum(run.count for run in again.own_segments()) == 2
    lines = len((tmp_path / "ledger").read_text().splitlines())
    again.note_origins(ledger.origins)
    assert len((tmp_path / "ledger").read_text().splitlines()) == lines


def test_an_origin_is_charged_once_by_two_ways_and_whole(tmp_path):
    ledger = fill(tmp_path / "ledger", range(2))
    ledger.note_origins([origin("one", 3), origin("between", segments=(*segments("between", 2), *segments("one", 5)))])
    assert charged(ledger) == 2 + 2 + 5


@pytest.mark.parametrize(("first", "then"), [("disjoint", "unknown"), ("unknown", "disjoint")])
def test_the_worst_that_is_known_stays(tmp_path, first, then):
    ledger = fill(tmp_path / "ledger", range(2))
    for relation in (first, then):
        ledger.note_origins([origin("one", relation=relation, reasons=(relation,))])
    (found,) = Ledger(tmp_path / "ledger").origins
    assert found.relation == "unknown" and charged(ledger) == 5 and set(found.reasons) == {first, then}


def test_two_words_for_one_file_are_none():
    public = Origin(kind="file", name="bert", identity="sha256:1", provenance="public")
    (found,) = merged([public], [dataclasses.replace(public, provenance=None)])
    assert origins.reasons([public]) == [] and "unknown provenance" in origins.reasons([found])[0]


def test_canaries_took_part_in_the_run_and_in_those_it_was_forked_from(tmp_path):
    ledger = fill(tmp_path / "ledger", range(2))
    ledger.note_origins([origin("parent", 3, is_fork=True), origin("began from", 4)])
    assert sum(run.count for run in ledger.segments_of_state()) == 5 and charged(ledger) == 9


def test_the_newest_verdict_of_an_audit_counts_and_is_read_back(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    assert ledger.verdict is None
    for passes in (False, True):
        ledger.note_verdict(dataclasses.replace(PROVED, passes=passes))
        assert Ledger(tmp_path / "ledger").verdict == dataclasses.replace(PROVED, passes=passes)


def test_what_is_released_tells_nothing_of_the_data_and_says_least_to_the_next():
    released = origin("one", relation="disjoint", against=("a unit of another kind",)).as_released()
    assert type(released) is ReleasedOrigin and not {"data", "files", "step"} & set(to_json(released)) and not released.is_composed
    again = of_released(released)
    assert (again.relation, again.data, again.against, again.is_checked) == ("unknown", (None,), (), False)
    assert again.segments == released.segments and again.is_composed


def test_who_was_given_metrics_without_noise_is_told_by_every_run_that_comes_from_there():
    one, other = (origin("one", claim=ParentClaim(given_protected=(name,))) for name in ("wandb", "callbacks.one (heron)"))
    (both,) = merged([one], [other])
    assert both.claim.given_protected == ("wandb", "callbacks.one (heron)") == of_released(both.as_released()).claim.given_protected
    told = origins.given_protected(["mlflow"], [both, origin("two"), dataclasses.replace(one, name="apart", relation="disjoint")])
    assert told == [
        f"{origins.WITHOUT_NOISE}this run gives to mlflow",
        f"{origins.WITHOUT_NOISE}{both.label} gave to wandb and callbacks.one (heron)",
    ]
    # Of a copied release, only its own words are there.
    assert origins.given_by_statement(["another", *told]) == ("mlflow",)
    assert origins.given_by_statement(origins.given_protected(["wandb"], by="trials")) == ("wandb",)


def test_another_neighbouring_relation_is_refused_where_it_would_be_composed(small):
    privacy, claim = small().privacy, ParentClaim(adjacency="add_remove")
    for harmless in (origin("one", relation="disjoint", claim=claim), origin("one", claim=claim, reasons=("none anyway",))):
        origins.require_same_relation([harmless], privacy)
    with pytest.raises(ConfigError, match="Use privacy.adjacency=add_remove"):
        origins.require_same_relation([origin("one", claim=claim)], privacy)


def test_charges_of_whole_units_become_part_of_a_claim_for_their_texts_and_not_the_other_way(small):
    whole, texts = ParentClaim(adjacency="zero_out"), dataclasses.replace(small().privacy, adjacency="zero_out_text")
    origins.require_same_relation([origin("one", claim=whole)], texts)
    of_a_package = dataclasses.replace(origin("one").segments[0], event="some.package.Event")
    for refused, privacy, says in (
        (
            origin("one", claim=whole, segments=(of_a_package,)),
            texts,
            "privacy.adjacency=zero_out_text: one, .* Use privacy.adjacency=zero_out",
        ),
        (origin("one", claim=ParentClaim(adjacency="zero_out_text")), small().privacy, "Use privacy.adjacency=zero_out_text"),
    ):
        with pytest.raises(ConfigError, match=says) as refusal:
            origins.require_same_relation([refused], privacy)
        assert "\n" not in str(refusal.value)


def test_rows_are_the_same_units_only_where_they_are_cut_alike(small):
    declared = small()

    def mismatch(data=declared.data, privacy=declared.privacy, of=declared.data, is_same=False, **changes):
        claim = ParentClaim(units=unit_facts(of, declared.privacy))
        return unit_mismatch(origin("one", claim=claim, **changes), data, privacy, is_same)

    assert mismatch() is None
    shorter = dataclasses.replace(declared.data, sequence_length=16)
    assert "data.sequence_length (" in (mismatch(shorter) or "") and mismatch(shorter, relation="disjoint") is None
    assert "privacy.unit (row and document)" in (mismatch(privacy=dataclasses.replace(declared.privacy, unit="document")) or "")
    crossed = dataclasses.replace(declared.data, pairs="cross_document")
    assert "paired documents differently" in (mismatch(crossed, of=crossed) or "") and mismatch(crossed, of=crossed, is_same=True) is None
    assert "is not recorded" in (unit_mismatch(origin("one"), declared.data, declared.privacy, True) or "")
