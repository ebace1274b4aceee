"""Determines the relation of an origin's data to the data of the run that starts from it: from declarations, never from the data.

The text of both is compared only to contradict a user's declaration (`dpx.data.overlap`); the result is printed on the console and written
under `private/`, and changes nothing that is released.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from dpx.data import manifests
from dpx.data.overlap import are_comparable, found_rows
from dpx.data.store import Store
from dpx.declaration import require
from dpx.privacy.origins import Origin, Relation
from dpx.privacy.unit_facts import UnitFacts
from dpx.run_folder import write_json

CONTRADICTIONS = "declared_disjoint.json"
# Digits of a ledger's name that are enough to name its run.
DIGITS = 8


def declared_disjoint(origins: Sequence[Origin], names: Iterable[str]) -> frozenset[str]:
    """Returns the identities of the `origins` that `names` (init.disjoint_from) name.

    Raises `ConfigError` for a name that matches no origin, or several.
    """
    chosen = set()
    for name in names:
        meant = {one.identity for one in origins if one.kind == "run" and _is_called(one, name)}
        known = ", ".join(f"{one.name} {one.identity}" for one in origins if one.kind == "run")
        value = f"init.disjoint_from={name}"
        require(bool(meant), value, f"this run does not start from a run with this name (it starts from: {known})", "Name one of these")
        require(len(meant) == 1, value, f"several runs have this name ({known})", "Give the name of the run's ledger instead")
        chosen |= meant
    return frozenset(chosen)


def _is_called(origin: Origin, name: str) -> bool:
    return origin.name == name or (len(name) >= DIGITS and origin.identity.startswith(name))


def relation(origin: Origin, disjoint: Iterable[str], is_holders_data: bool) -> Relation:
    """Returns the relation of `origin`'s data to a run's data; `disjoint` are the identities that the run declares.

    `origin.relation` was noted by the run that held the record before: its user's declaration is valid here too if this run draws from
    exactly the same prepared data (`is_holders_data`).
    """
    inherits = is_holders_data and origin.relation == "disjoint"
    return "disjoint" if inherits or origin.identity in set(disjoint) else "unknown"


def is_same_data(checksums: Sequence[str | None], store: Store | None) -> bool:
    """Returns whether `checksums` (of a run's prepared data) are only of `store`."""
    return store is not None and set(checksums) == {store.manifest.checksum}


def learnt_from_protected(origin: Origin, own: UnitFacts, store: Store | None) -> str | None:
    """Returns the reason, as text, why the vocabulary of `origin` may have been learnt from data that is protected now.

    This run loads that vocabulary from a file. Returns `None` if declared facts exclude it.
    """
    source = origin.vocabulary.source
    if store is None or store.manifest.vocabulary_source != "file" or source == "file" or is_same_data(origin.data, store):
        return None
    if origin.relation == "disjoint":
        return None
    theirs = origin.claim.units
    # A unit's split is a function of its name, the salt and the fractions: a unit that was public there is public here.
    if source == "public_split" and theirs is not None and _split_alike(theirs, own):
        return None
    split = {"protected": "protected", "public_split": "public"}.get(str(source), "unknown")
    return f"the vocabulary was learnt from the {split} split of {origin.name}, which may contain text that is protected in this run"


def _split_alike(one: UnitFacts, other: UnitFacts) -> bool:
    names = ("unit", "split_salt", "public_fraction", "heldout_fraction", "heldout_by", "test_split")
    alike = all(getattr(one, name) == getattr(other, name) for name in names)
    return alike and one.definition.get("documents") == other.definition.get("documents")


def contradictions(origins: Sequence[Origin], store: Store, private: Path | None, own_private: Path | None) -> list[str]:
    """Returns evidence against the user's declaration that data are disjoint, as sentences for the console; also writes it to
    `own_private`.

    `private` holds manifests of the origins' data. Raises `ConfigError` if the declaration cannot be true: the run draws from the same
    prepared data, or most of its rows are in the other data.
    """
    told, noted = [], []
    for origin in origins:
        if origin.kind != "run" or origin.relation != "disjoint":
            continue
        value, fix = f"init.disjoint_from: {origin.name}", "Remove it; then the steps of that run are also charged here"
        require(store.manifest.checksum not in origin.data, value, "this run draws from the same prepared data", fix)
        others = [manifests.store(private, one) if private is not None and one else None for one in origin.data]
        searched = [other for other in others if other is not None and are_comparable(store, other)]
        found = [found_rows(store, other) for other in searched]
        most, rows = max((one["any"] for one in found), default=0), store.manifest.rows["protected"]
        noted.append({"origin": origin.label, "rows": rows, "found": found, "not_searched": len(others) - len(searched)})
        require(2 * most <= rows, value, f"{most} of this run's {rows} protected rows have text that also occurs in that run's data", fix)
        if most:
            told.append(f"{origin.label}, declared disjoint: {most} of {rows} protected rows have text that also occurs in its data")
        if len(searched) < len(others):
            told.append(f"{origin.label}, declared disjoint: some of its data could not be searched for this run's text")
    if noted and own_private is not None:
        write_json(own_private / CONTRADICTIONS, {"declared_disjoint": noted})
    return told


def noted_alone(origins: Iterable[Origin]) -> tuple[Origin, ...]:
    """Returns `origins` in the form that another run may hold: without `is_fork`, which describes only the run that holds them now."""
    return tuple(dataclasses.replace(one, is_fork=False) for one in origins)
