"""Writes files that are whole after a power cut: they hold the old content or the new content, never a part.

A file that grows line by line is appended to and synced by its owner instead: `dpx.privacy.chain`, `dpx.training.released`.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path


def write_durably(path: Path, data: str | bytes) -> None:
    """Writes `data` to `path` atomically, and makes its folder if needed; content and name are on disk when this returns."""
    make_folder(path.parent)
    with naming(path), draft_of(path) as draft, open(draft, "wb", opener=not_following) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def draft_of(path: Path, put: Callable[[Path, Path], None] | None = None) -> Iterator[Path]:
    """Yields a new path beside `path`, at which the block writes a file or a folder.

    When the block ends, the draft is synced to disk and renamed to `path`, or `put(draft, path)` is called instead of `put_in_place`. If
    anything raises, the draft is deleted and `path` is as before.
    """
    # In containers a killed process and the next one may have the same process id.
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        yield draft
        for written in (*draft.rglob("*"), draft):
            sync(written)
        (put or put_in_place)(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        with contextlib.suppress(OSError):
            draft.unlink()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds `path` to an `OSError` that names no file, such as an error from writing to an open file, so that the user sees which file it
    was."""
    try:
        yield
    except OSError as fault:
        fault.filename = fault.filename or str(path)
        raise


def put_in_place(draft: Path, path: Path) -> None:
    """Renames `draft`, a file or folder that is already synced to disk, to `path` atomically; the new name is on disk when this returns.

    It replaces a file at `path`. Raises `OSError` if both are not on one file system, or if `path` is a folder that is not empty.
    """
    os.replace(draft, path)
    for folder in {draft.parent, path.parent}:
        sync(folder)


def make_folder(path: Path) -> None:
    """Makes `path` and its parents if they are missing, each with at most the permissions of the folder that contains it."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(mode=0o777 & path.parent.stat().st_mode, exist_ok=True)


def make_private(path: Path) -> None:
    """Makes the folder `path` if it is missing, and gives access to its owner alone, whatever the umask.

    Raises `OSError` if `path` is a symbolic link.
    """
    make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_mode & 0o777 != 0o700:
            os.fchmod(handle, 0o700)
    finally:
        os.close(handle)


def not_following(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a file for `open(opener=...)`; raises `OSError` for a symbolic link.

    A file that it makes has at most the permissions of its folder.
    """
    mode = os.stat(os.path.dirname(path) or ".").st_mode
    return os.open(path, flags | os.O_NOFOLLOW, 0o666 & mode)


@contextlib.contextmanager
def locked(path: Path, operation: int) -> Iterator[None]:
    """Holds the lock file `path` with the `flock` operation `operation`. The file is made if it is missing and is never emptied.

    Raises `BlockingIOError` if another process holds it and `operation` does not wait, and another `OSError` if it cannot be opened.
    """
    handle = _locked_handle(path, operation)
    try:
        yield
    finally:
        os.close(handle)


def _locked_handle(path: Path, operation: int) -> int:
    """Returns an open, locked handle of the file that is at `path` now: a lock on a file that was removed meanwhile would exclude
    nobody."""
    while True:
        handle = not_following(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, operation)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.lstat(path)):
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Makes other processes that would hold `folder` wait while its content is read, changed and written back."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def sync(path: str | os.PathLike[str]) -> None:
    """Writes a file's content, or a directory's entries, to disk, so that they survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
