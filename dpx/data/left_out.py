"""Counts what prepared rows leave out of the texts, by reason: what does not fit a row, equal texts, and rows beyond a unit's limit.

Counts of the public split may be published. All others depend on private texts without noise: they are for a console and `private/` alone.

The prepared data that a run drew from are recorded by their manifests under `private/manifests/`, one file for each checksum. A ledger
names data by the checksum of its manifest. With the manifest, and the store if it still exists, a later run that starts from this run's
weights can tell whether its data is other text. Manifests describe the data, so they are never released.
"""

import dataclasses
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from dpx.data.store import Manifest, Store, open_store
from dpx.data.unit_names import Split
from dpx.declaration import ConfigError
from dpx.durable import write_durably
from dpx.files.records import described, from_json, record, to_json
from dpx.files.run_folder import read_json
from dpx.privacy.declared_privacy import Privacy

FILE = "left_out.json"


@record
class LeftOut:
    """What the rows of one split leave out."""

    texts: int = described(
        "Texts of labelled examples, and prompts with completions, before the limit; running text, divided into rows, does not count."
    )
    texts_cut: int = described(
        "Texts of these examples longer than `data.sequence_length`, so that their ends, or the beginnings of prompts, are not read."
    )
    completions_cut: int = described("Prompts with completions of which the end of the completion is not learnt.", default=0)
    conversations_cut: int = described("Conversations longer than `data.sequence_length`, of which some turns are in no row.", default=0)
    turns_cut: int = described("First turns of conversations that are in no row, so that the later ones fit.", default=0)
    turns_too_long: int = described("Last turns of conversations that alone are longer than a row, and are in none.", default=0)
    conversations_without_rows: int = described(
        "Conversations of which no turn is left that fits, and in which something is learnt.", default=0
    )
    texts_repeated: int = described("Texts or rows left out because an equal one, which is the same unit, is before them.", default=0)
    documents_without_rows: int = described("Documents of running text with too few words for a row.", default=0)
    tokens: int = described("Tokens of running text.", default=0)
    tokens_cut: int = described(
        "Tokens of running text that no row holds in their place: short rests, and what segments have too many together; "
        "0 with `data.cuts`, where an epoch takes one row of a document.",
        default=0,
    )
    rows: int = described("Rows of all units, before the limit.")
    rows_dropped: int = described("Rows beyond `privacy.rows_per_unit_max`.")


def write(folder: Path, counts: dict[Split, LeftOut]) -> None:
    """Writes the counts of each split beside the rows of a store."""
    write_durably(folder / FILE, json.dumps({split: to_json(one) for split, one in counts.items()}, indent=1) + "\n")


def read(folder: Path) -> dict[str, LeftOut]:
    """Returns the counts by split in a store or in `private/`; empty for a store that was prepared before there were any."""
    path = folder / FILE
    return {split: from_json(LeftOut, node, path) for split, node in read_json(path).items()} if path.is_file() else {}


def keep(private: Path, store: Store) -> list[str]:
    """Copies the counts of a store into the private folder of a run or a plan, and returns their `lines`."""
    if (store.folder / FILE).is_file():
        write_durably(private / FILE, (store.folder / FILE).read_text())
    return lines(private)


def lines(private: Path) -> list[str]:
    """Returns sentences about the protected split; empty if nothing is left out of it."""
    one = read(private).get("protected")
    return [] if one is None else in_words(one, "protected", "are")


def in_words(one: LeftOut, split: str, verb: str) -> list[str]:
    """Returns sentences about what rows of a split lose; empty if they lose nothing.

    `verb` says whether its surplus rows "are" or "would be" dropped.
    """
    found, left = [], "are" if verb == "are" else "would be"
    if one.texts_cut:
        found.append(
            f"{one.texts_cut:,} of {one.texts:,} {split} texts are longer than data.sequence_length and are cut; a larger one reads more"
        )
    if one.completions_cut:
        found.append(f"the ends of {one.completions_cut:,} {split} completions are not learnt: they alone are longer than a row")
    if one.conversations_cut:
        which = f"{one.conversations_cut:,} of {one.texts:,} {split} conversations are longer than data.sequence_length"
        found.append(f"{which} and lose {one.turns_cut:,} turns at their beginnings; a larger one reads more")
    if one.turns_too_long:
        which = f"{one.turns_too_long:,} last turns of {split} conversations alone are longer than a row and {left} left out"
        found.append(f"{which}, and {one.conversations_without_rows:,} conversations have no row by that")
    if one.texts_repeated:
        found.append(f"{one.texts_repeated:,} {split} texts or rows {left} left out: each repeats an equal one, and both are one unit")
    if one.documents_without_rows:
        found.append(f"{one.documents_without_rows:,} {split} documents have too few words for a row and {left} left out")
    if one.tokens_cut:
        which = "short rests, and what segments have too many together"
        found.append(f"{one.tokens_cut:,} of {one.tokens:,} tokens of the {split} text are in no row: {which}")
    if one.rows_dropped:
        found.append(f"{one.rows_dropped:,} of {one.rows:,} {split} rows {verb} dropped by privacy.rows_per_unit_max")
    return found


def of_public(store: Store, privacy: Privacy) -> LeftOut | None:
    """Returns the counts of the public split, whose rows the limit does not drop: the rows that it would drop count.

    Returns `None` without public rows, and for a store that was prepared before there were counts.
    """
    one = read(store.folder).get("public")
    if one is None or not one.rows:
        return None
    surplus = 0
    if privacy.unit != "row":
        rows_U = np.bincount(store.unit_of_rows("public", np.arange(one.rows)))
        surplus = int(np.maximum(rows_U - privacy.rows_per_unit_max, 0).sum())
    return dataclasses.replace(one, rows_dropped=surplus)


FOLDER = "manifests"


def keep_manifest(private: Path, store: Store) -> None:
    """Records which store a run draws from; the record is on disk when this returns."""
    path = _path(private, store.manifest.checksum)
    if not path.exists():
        held = {"store": str(store.folder.absolute()), "manifest": asdict(store.manifest)}
        write_durably(path, json.dumps(held, indent=1) + "\n")


def inherit(private: Path, other: Path) -> None:
    """Copies the manifests from the private folder of another run."""
    for path in sorted((other / FOLDER).glob("*.json")):
        if not (private / FOLDER / path.name).exists():
            write_durably(private / FOLDER / path.name, path.read_bytes())


def manifest(private: Path, checksum: str) -> Manifest | None:
    """Returns the manifest with that checksum; `None` if it is missing or does not match its checksum."""
    try:
        held = Manifest(**json.loads(_path(private, checksum).read_text())["manifest"])
        return held if held.checksum == held.with_checksum().checksum == checksum else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def manifests(private: Path) -> list[Manifest]:
    """Returns the manifests of all data that a run, or a run before it, drew from, as far as they are known."""
    held = (manifest(private, path.stem) for path in sorted((private / FOLDER).glob("*.json")))
    return [one for one in held if one is not None]


def store(private: Path, checksum: str) -> Store | None:
    """Returns the prepared data with that checksum if it is still in place and unchanged; else `None`."""
    if manifest(private, checksum) is None:
        return None
    try:
        opened = open_store(Path(json.loads(_path(private, checksum).read_text())["store"]))
    except (ConfigError, OSError):
        return None
    return opened if opened.manifest.checksum == checksum else None


def _path(private: Path, checksum: str) -> Path:
    return private / FOLDER / f"{checksum}.json"
