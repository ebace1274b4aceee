"""Files that are whole after a power cut: the old content or the new one, never a part.

What grows line by line is appended and synced by its owner instead: `dpx.privacy.chain`, `dpx.training.released`.
"""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


def write_durably(path: Path, data: str | bytes) -> None:
    """Puts `data` at `path` atomically, making its folder where needed; content and name are on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with naming(path), open(draft, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Names `path` in an `OSError` that names no file, as one from writing to an open file: the user is told which one it was."""
    try:
        yield
    except OSError as fault:
        fault.filename = fault.filename or str(path)
        raise


def put_in_place(draft: Path, path: Path) -> None:
    """Renames `draft`, a file or folder already synced to disk, to `path` atomically, replacing a file there; durable at return.

    Raises `OSError` where both are not on one file system, or `path` is a folder that is not empty."""
    os.replace(draft, path)
    for folder in {draft.parent, path.parent}:
        sync_directory(folder)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keeps other processes that would hold `folder` waiting, while what lies in it is read, changed and written back."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Makes a directory's entries durable, so that a file created in it outlives a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
