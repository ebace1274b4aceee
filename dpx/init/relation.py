"""Determines the relation of an origin's data to the data of the run that starts from it: from declarations, never from the data.

A declaration that two texts share nothing is refused where dpx knows that a whole file or store is in both. Single rows are compared too
(`dpx.data.overlap`); what is found is shown to the owner and written under `private/`. It changes nothing that is released, and refuses
nothing: a refusal would tell whether a row is protected.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from dpx.data import left_out
from dpx.data.overlap import are_comparable, found_rows
from dpx.data.store import Store
from dpx.declaration import require
from dpx.files.run_folder import write_json
from dpx.privacy.declared_privacy import UnitFacts
from dpx.privacy.origins import Origin, Relation, learnt_from

CONTRADICTIONS = "declared_disjoint.json"
# Digits of a ledger's name that are enough to name its run.
DIGITS = 8


def declared_disjoint(origins: Sequence[Origin], names: Iterable[str], key: str = "init.disjoint_from") -> frozenset[str]:
    """Returns the identities of the `origins` that `names` (the values of `key`) name.

    Raises `ConfigError` for a name that matches no origin, or several runs.
    """
    chosen, known = set(), [one for one in origins if one.kind in ("run", "text")]
    for name in names:
        meant = [one for one in known if one.name == name or (len(name) >= DIGITS and one.identity.startswith(name))]
        runs, value = {one.identity for one in meant if one.kind == "run"}, f"{key}={name}"
        there = ", ".join(f"{one.name} {one.identity}" for one in known)
        require(bool(meant), value, f"this run does not start from a run with this name (it starts from: {there})", "Name one of these")
        require(len(runs) <= 1, value, f"several runs have this name ({there})", "Give the name of the run's ledger instead")
        chosen |= {one.identity for one in meant}
    return frozenset(chosen)


def require_other_text(value: str, own: Iterable[str], theirs: Iterable[str], whose: str, fix: str) -> None:
    """Raises `ConfigError` for a user's word that two texts share nothing if a whole file is in both.

    `value` is the word, `own` and `theirs` are checksums of whole files or stores, and `whose` names the other text.
    """
    require(not set(own) & set(theirs), value, f"a whole file of this text is also in that of {whose}", fix)


def relation(origin: Origin, disjoint: Iterable[str], is_holders_data: bool) -> Relation:
    """Returns the relation of `origin`'s data to a run's data; `disjoint` are the identities that the run declares.

    `origin.relation` was noted by the run that held the record before: its user's declaration is valid here too if this run draws from
    exactly the same prepared data (`is_holders_data`).
    """
    inherits = is_holders_data and origin.relation == "disjoint"
    return "disjoint" if inherits or origin.identity in set(disjoint) else "unknown"


def are_same(one: Sequence[str | None], other: Sequence[str | None]) -> bool:
    """Returns whether two lists of checksums of prepared data name the same data; unknown data is never the same."""
    return bool(one) and None not in one and set(one) == set(other)


def learnt_from_protected(origin: Origin, own: UnitFacts, own_data: Sequence[str | None]) -> str | None:
    """Returns the reason, as text, why the vocabulary of `origin` may have been learnt from data that is protected now.

    `own_data` are checksums of the data that is protected now, as far as they are known. Returns `None` if declared facts exclude it.
    """
    source, theirs = origin.vocabulary.source, origin.claim.units
    # The vocabulary of a file has its own origins.
    if source == "file" or not origin.may_share or (origin.kind == "text" and origin.reasons) or are_same(origin.data, own_data):
        return None
    # A unit's split is a function of its name, the salt and the fractions: a unit that was public there is public here.
    split_by = ("unit", "split_salt", "public_fraction", "heldout_fraction", "heldout_by", "test_split")
    if (
        source == "public_split"
        and theirs is not None
        and all(getattr(theirs, name) == getattr(own, name) for name in split_by)
        and theirs.definition.get("documents") == own.definition.get("documents")
    ):
        return None
    return (
        f"the vocabulary was learnt from the {learnt_from(origin)} of {origin.name}, which may contain text that is protected in this run"
    )


def contradictions(origins: Sequence[Origin], store: Store, private: Path | None, own_private: Path | None) -> list[str]:
    """Returns evidence against the user's declaration that data are disjoint, as sentences for the console; also writes it to
    `own_private`.

    `private` holds manifests of the origins' data. Raises `ConfigError` if the declaration cannot be true: the run draws from the same
    prepared data, or a whole file is in both.
    """
    told, noted = [], []
    for origin in origins:
        if origin.kind not in ("run", "text") or origin.relation != "disjoint":
            continue
        key = "init" if origin.kind == "run" else "data.vocabulary"
        value, fix = f"{key}.disjoint_from: {origin.name}", "Remove it; then what was done with that text counts here too"
        require(store.manifest.checksum not in origin.data, value, "this run draws from the same prepared data", fix)
        require_other_text(value, store.manifest.read_from, origin.files, origin.name, fix)
        others = [left_out.store(private, one) if private is not None and one else None for one in origin.data]
        searched = [other for other in others if other is not None and are_comparable(store, other)]
        found = [found_rows(store, other) for other in searched]
        most, rows = max((one["any"] for one in found), default=0), store.manifest.rows["protected"]
        noted.append({"origin": origin.label, "rows": rows, "found": found, "not_searched": len(others) - len(searched)})
        if most:
            told.append(f"{origin.label}, declared disjoint: {most} of {rows} protected rows have text that also occurs in its data")
        if len(searched) < len(others):
            told.append(f"{origin.label}, declared disjoint: some of its data could not be searched for this run's text")
    if noted and own_private is not None:
        write_json(own_private / CONTRADICTIONS, {"declared_disjoint": noted})
    return told
