"""Checks that the files of a store hold what was prepared: each is hashed once, and again if the file system says that it changed.

The results are stored in `verified.json` beside the files, readable by its owner alone: for each file its checksum, size, inode and the
times of its last changes in nanoseconds. Content and names can be changed without a change of the modification time, but not without a
change of the change time. An unchanged store costs one look at each file. A disk that alters a file by itself changes none of these: delete
`verified.json` to have every file hashed again.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from dpx.console import stage
from dpx.declaration import require
from dpx.durable import write_durably
from dpx.files import file_checksums
from dpx.files.file_checksums import Known

VERIFIED = "verified.json"
AGAIN = "Delete the folder to prepare it again"
# Above this size hashing takes seconds, and its progress is shown.
SHOWN_BYTES = 2**30
_PARTS_SHOWN = 10


def verify(folder: Path, files: dict[str, Known]) -> None:
    """Raises `ConfigError` for a file of `files` that is missing, of another size or of another content.

    Memory does not grow with the files. A file that was hashed before and has not changed since is not hashed again.
    """
    for name, known in files.items():
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        require(size is not None, path, "is missing from its store", AGAIN)
        require(size == known["bytes"], path, f"has {size} bytes, but its manifest says {known['bytes']}", AGAIN)
    remembered = _remembered(folder)
    changed = {name: known for name, known in files.items() if remembered.get(name) != _seen(folder / name, known)}
    if not changed:
        return
    shown = _Shown(folder, sum(known["bytes"] for known in changed.values()))
    for name, known in changed.items():
        # Its status is read before it is hashed, so that a later change is detected.
        remembered[name] = _seen(folder / name, known)
        digest = file_checksums.of_file(folder / name, shown.read)
        require(digest == known, folder / name, "does not match the checksum in its manifest", AGAIN)
    _remember(folder, {name: remembered[name] for name in files})


def _seen(path: Path, known: Known) -> dict[str, Any]:
    """Returns the stored facts of a file that has the checksum `known`."""
    about = path.stat()
    return known | {"inode": about.st_ino, "modified_ns": about.st_mtime_ns, "changed_ns": about.st_ctime_ns}


def _remembered(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / VERIFIED).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(folder: Path, seen: dict[str, Any]) -> None:
    # A store that another user owns, or a full disk, leaves it to the next opening to hash again.
    with contextlib.suppress(OSError):
        write_durably(folder / VERIFIED, json.dumps(seen, indent=1, sort_keys=True) + "\n")
        os.chmod(folder / VERIFIED, 0o600)


class _Shown:
    """Reports how much of `total` bytes has been read, if that takes long."""

    def __init__(self, folder: Path, total: int):
        self._folder, self._total, self._done, self._parts = folder, total, 0, 0
        if total > SHOWN_BYTES:
            stage(f"checking the {total / 1e9:,.1f} GB of {folder} against their checksums, once")

    def read(self, count: int) -> None:
        self._done += count
        parts = self._done * _PARTS_SHOWN // self._total
        if self._total > SHOWN_BYTES and parts > self._parts:
            self._parts = parts
            stage(f"checked {self._done / self._total:.0%} of {self._folder.name}")
