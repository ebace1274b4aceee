"""Writes files that are whole after a power cut: they hold the old content or the new content, never a part.

A file that grows line by line is appended to and synced by its owner instead: `dpx.privacy.hash_chain`, `dpx.training.metrics`.

Checksums of files are compared before a file's content is used. They are computed in blocks, so memory does not grow with a file's size.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


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
def draft_folder_of(path: Path, make: Callable[[Path], None], put: Callable[[Path, Path], None] | None = None) -> Iterator[Path]:
    """Yields a new folder, which `make` makes, for what `draft_of` puts at `path`.

    It is locked while this process lives, so that `remove_drafts` knows which folders a killed process left.
    """
    make_folder(path.parent)
    # The lock is held until the folder has its name.
    with contextlib.ExitStack() as stack, draft_of(path, put) as draft:
        # On a file system without locks nobody takes the folder for that of a killed process either.
        with contextlib.ExitStack() as beside:
            with contextlib.suppress(OSError):
                beside.enter_context(held(path.parent))
            make(draft)
            with contextlib.suppress(OSError):
                stack.enter_context(held(draft))
        yield draft


def remove_drafts(path: Path) -> list[Path]:
    """Removes the drafts of the folder `path` that processes left which live no more, and returns them.

    A folder that a process has locked stays, and so does one that cannot be locked here.
    """
    removed: list[Path] = []
    if not path.parent.is_dir():
        return removed
    with contextlib.suppress(OSError), held(path.parent):
        for draft in sorted(path.parent.glob(f".{glob.escape(path.name)}.*")):
            if not re.fullmatch(r"\d+\.[0-9a-f]{8}", draft.name.removeprefix(f".{path.name}.")) or draft.is_symlink() or not draft.is_dir():
                continue
            with contextlib.suppress(OSError), held(draft, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(draft)
                removed.append(draft)
    return removed


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


def narrow(path: Path) -> None:
    """Takes from what a library wrote at `path`, and below it, the permissions that the folder above it does not give.

    Does nothing on a file system that cannot.
    """
    allowed = path.parent.stat().st_mode & 0o777
    for written in (path, *path.rglob("*")):
        with contextlib.suppress(OSError):
            mode = written.lstat().st_mode
            if not stat.S_ISLNK(mode) and mode & 0o777 & ~allowed:
                written.chmod(stat.S_IMODE(mode) & (allowed | ~0o777))


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
    while True:
        handle = not_following(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            with naming(path):
                fcntl.flock(handle, operation)
            # A lock on a file that was removed meanwhile would exclude nobody.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.lstat(path)):
                    break
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    try:
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def held(folder: Path, operation: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Makes other processes that would hold `folder` wait while its content is read, changed and written back.

    Raises `BlockingIOError` if another process holds it and `operation` does not wait.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(folder):
            fcntl.flock(handle, operation)
        yield
    finally:
        os.close(handle)


def sync(path: str | os.PathLike[str]) -> None:
    """Writes a file's content, or a directory's entries, to disk, so that they survive a power cut."""
    with naming(Path(path)):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


BLOCK_BYTES = 2**22

# {"bytes": size, "sha256": 64 hexadecimal digits}
Known = dict[str, Any]


def of_file(path: Path, read: Callable[[int], None] = lambda count: None) -> Known:
    """Returns the size and the SHA-256 of the file at `path`; calls `read` after each block with its number of bytes. Raises `OSError`."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            size += len(block)
            read(len(block))
    return {"bytes": size, "sha256": digest.hexdigest()}


def of_folder(folder: Path, without: str) -> dict[str, Known]:
    """Returns the size and the SHA-256 of every file below `folder`, by its relative path; `without` names one file to leave out."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    named = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: of_file(path) for name, path in named.items() if name != without}


def seal(content: Any) -> str:
    """Returns the checksum of a statement, over the value of its JSON, or of the text of a config."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
