"""Tells which texts a given vocabulary was learnt from: a vocabulary that dpx fitted is known wherever dpx wrote it.

A prepared store says so in its manifest, every other folder into which dpx writes a vocabulary in `vocabulary_learnt_from.json` beside it.
A file from elsewhere says nothing, and a folder that a run of dpx exported without this record is of unknown origin.
"""

import contextlib
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from dpx import durable
from dpx.data.store import DEFINITION, MANIFEST, VOCABULARY, Manifest
from dpx.declaration import ConfigError, require
from dpx.durable import write_durably
from dpx.files.records import described, from_json, record, to_json
from dpx.files.run_folder import read_json
from dpx.privacy.declared_privacy import UnitFacts
from dpx.privacy.origins import Origin, ParentClaim, VocabularyFacts

RECORD = "vocabulary_learnt_from.json"
_FIX = "Restore the file, or write the folder again"
# What marks a folder as written by a run of dpx, which then has the record.
_STATEMENT, _MARKED = "privacy.json", ("config.json", "tokenizer_config.json", "adapter_config.json")
PROTECTED = "a vocabulary was learnt from its protected text without noise"
_UNKNOWN = f"a run of dpx wrote its vocabulary, and {RECORD} beside it is missing"


@record
class LearntFrom:
    """The texts that the vocabulary beside this file was learnt from."""

    format: int = described("Format number of this file.", default=1)
    origins: tuple[Origin, ...] = described("The texts; empty for a vocabulary from elsewhere.")


def learnt_from(place: Path, stores: Path | None = None) -> tuple[Origin, ...]:
    """Returns the texts that the vocabulary at `place`, a file or a checkpoint's folder, was learnt from, as far as dpx knows.

    A file that was copied away from its store is known by its content, if the store is in the folder `stores`. Raises `ConfigError` for a
    vocabulary that is not the one which the manifest beside it lists.
    """
    folder = place if place.is_dir() else place.parent
    if (folder / MANIFEST).is_file():
        manifest = Manifest.read(folder)
        named = place.name if place.is_file() else DEFINITION if DEFINITION in manifest.files else VOCABULARY
        is_own = named in manifest.files and durable.of_file(folder / named) == manifest.files[named]
        require(is_own, place, f"is not the vocabulary that {MANIFEST} beside it lists", "Restore it, or move it to another folder")
        return of_store(manifest, _name_of(folder))
    record = _record_of(place)
    if record.is_file():
        return from_json(LearntFrom, read_json(record, _FIX), record, _FIX).origins
    if (folder / _STATEMENT).is_file() or any("dpx" in _config(folder / name) for name in _MARKED):
        return (Origin(kind="text", name=folder.name, identity=f"unknown {folder.name}", reasons=(_UNKNOWN,)),)
    within = (place / DEFINITION, place / VOCABULARY) if place.is_dir() else (place,)
    file = next((one for one in within if one.is_file()), None)
    if stores is None or file is None:
        return ()
    own, found = durable.of_file(file), dict[str, Origin]()
    for one in sorted(stores.glob(f"*/{MANIFEST}")):
        with contextlib.suppress(ConfigError):
            manifest = Manifest.read(one.parent)
            known = of_store(manifest, _name_of(one.parent)) if own in manifest.files.values() else ()
            # A store that was given this vocabulary names the same text again.
            found = {text.identity: text for text in known} | found
    return tuple(found.values())


def _record_of(vocabulary: Path) -> Path:
    """Returns the path of the record of a list of word pieces, a checkpoint's folder or one of the files of its tokenizer."""
    if vocabulary.suffix == ".txt" and not vocabulary.is_dir():
        return vocabulary.with_name(f"{vocabulary.stem}_learnt_from.json")
    return (vocabulary if vocabulary.is_dir() else vocabulary.parent) / RECORD


def _name_of(store: Path) -> str:
    """Returns the name of a store's folder without its end, a checksum of the data."""
    return store.name.rpartition("-")[0] or store.name


def _config(path: Path) -> dict[str, object]:
    try:
        return read_json(path, _FIX) if path.is_file() else {}
    except ConfigError:
        return {}


def of_store(manifest: Manifest, name: str) -> tuple[Origin, ...]:
    """Returns the texts that the vocabulary of a prepared store was learnt from: its own, by this `name`, or those of its file."""
    if manifest.vocabulary_source == "file":
        return tuple(from_json(Origin, one, MANIFEST, _FIX) for one in manifest.learnt_from)
    units = from_json(UnitFacts, manifest.protects, MANIFEST, _FIX)
    own = Origin(
        kind="text",
        name=name,
        identity=manifest.name,
        reasons=(PROTECTED,) if manifest.vocabulary_source == "protected" else (),
        claim=ParentClaim(units=units),
        vocabulary=VocabularyFacts(source=manifest.vocabulary_source),
        data=(manifest.checksum,),
        files=tuple(manifest.read_from),
    )
    # A file that was given and declared as learnt from protected text may have known origins too.
    return own, *(from_json(Origin, one, MANIFEST, _FIX) for one in manifest.learnt_from)


def write(vocabulary: Path, origins: Iterable[Origin], released: bool = False) -> Path:
    """Writes the record beside `vocabulary`, durably; a `released` one leaves out what tells of the data. Returns its path."""
    record = _record_of(vocabulary)
    known = tuple(replace(one, data=(None,), files=()) if released else one for one in origins)
    write_durably(record, json.dumps(to_json(LearntFrom(origins=known)), indent=1) + "\n")
    return record
