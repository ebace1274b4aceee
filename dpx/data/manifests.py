"""Records the prepared data that a run drew from: manifests under `private/manifests/`, one file for each checksum.

A ledger names data by the checksum of its manifest. With the manifest, and the store if it still exists, a later run that starts from this
run's weights can tell whether its data is other text. Manifests describe the data, so they are never released.
"""

import json
from dataclasses import asdict
from pathlib import Path

from dpx.data.store import Manifest, Store, open_store
from dpx.declaration import ConfigError
from dpx.durable import write_durably

FOLDER = "manifests"


def keep(private: Path, store: Store) -> None:
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


def files_of(private: Path) -> list[str]:
    """Returns the checksums of the files that the data of a run, and of the runs before it, was read from, as far as they are known."""
    held = (manifest(private, path.stem) for path in sorted((private / FOLDER).glob("*.json")))
    return [file for one in held if one is not None for file in one.read_from]


def vocabularies(private: Path) -> set[str]:
    """Returns the checksums of the vocabularies of all data that a run or its parents drew from."""
    found = [manifest(private, path.stem) for path in (private / FOLDER).glob("*.json")]
    return {one.vocabulary_checksum for one in found if one is not None}


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
