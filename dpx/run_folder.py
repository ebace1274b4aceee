"""The folder of one run: `release/` may be shared, everything in `private/` depends on the data without noise."""

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpx.declaration import ConfigError, require
from dpx.durable import held, locked, make_folder, make_private, not_following, write_durably
from dpx.places import without_places

CONFIG = "config.yaml"
LOCK = "lock"


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """`path/release` (weights, privacy.json, config.yaml) and `path/private` (key, ledger, checkpoints, logs, metrics, whole config.yaml).

    `config_yaml` is the run's resolved config; `fork` is `<run folder>@<step>` of the run that it branches from, `None` for no fork.
    """

    path: Path
    config_yaml: str = ""
    fork: str | None = None

    @property
    def release(self) -> Path:
        return self.path / "release"

    @property
    def private(self) -> Path:
        return self.path / "private"

    @property
    def has_begun(self) -> bool:
        """Whether a run was started in it: its config is then in `release/`."""
        return (self.release / CONFIG).is_file()

    @property
    def released_config_yaml(self) -> str:
        """The config as `release/config.yaml` holds it."""
        return without_places(self.config_yaml)

    def made_release(self) -> Path:
        """`release/`, made where it is missing. Raises `ConfigError` where a symbolic link lies in the run's folder: what is written there
        would be written where it leads."""
        self.require_no_links()
        make_folder(self.release)
        return self.release

    def made_private(self) -> Path:
        """`private/`, made where it is missing and readable by its owner alone. Raises `ConfigError` as `made_release` does."""
        self.require_no_links()
        make_private(self.private)
        return self.private

    def require_no_links(self) -> None:
        """Raises `ConfigError` where `release`, `private` or anything in them is not a regular file or folder."""
        for tree in (self.release, self.private):
            found = tree if _is_other(tree) else _first_other(tree)
            if found is not None:
                kind = "a symbolic link" if found.is_symlink() else "not a regular file or folder"
                raise ConfigError(found, f"is {kind}, which is not allowed in a run's folder", "Put the file or the folder itself there")

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Makes the trees and holds the folder for this process; raises `ConfigError` where another process holds it."""
        self.made_release()
        self.made_private()
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.private / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB))
            except BlockingIOError:
                raise ConfigError(
                    self.path, "another process is running in this folder", "Wait for it, or give replicate=1 for a second run"
                ) from None
            yield

    @contextlib.contextmanager
    def read_by_another(self) -> Iterator[None]:
        """Keeps a process from training in this folder while a run elsewhere reads it; raises `ConfigError` where one does."""
        with contextlib.ExitStack() as stack:
            try:
                if (self.private / LOCK).is_file():
                    stack.enter_context(_read_locked(self.private / LOCK))
            except BlockingIOError:
                raise ConfigError(self.path, "another process is training in this folder", "Wait for it, or stop it first") from None
            yield


@contextlib.contextmanager
def _read_locked(path: Path) -> Iterator[None]:
    """A shared lock on a file that is only read: the folder may be one that nobody may write to."""
    with open(path, opener=not_following) as lock:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def _is_other(path: Path) -> bool:
    return path.is_symlink() or (path.exists() and not path.is_dir())


def _first_other(folder: Path) -> Path | None:
    """Something below `folder` that is not a regular file or folder; symbolic links are not followed."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):  # what a run that goes on has deleted meanwhile
        return None
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            found = _first_other(Path(entry.path))
            if found is not None:
                return found
        elif not entry.is_file(follow_symlinks=False) and os.path.lexists(entry.path):
            return Path(entry.path)
    return None


def read_json(path: Path, fix: str = "Restore the file") -> dict[str, Any]:
    """The JSON object in `path`. Raises `ConfigError`, whose last sentence is `fix`, where it holds anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(path, "is incomplete, or was changed by hand", fix) from error
    require(isinstance(document, dict), path, "is not a JSON object", fix)
    return document


def write_json(path: Path, value: Any) -> None:
    """Writes `value` to `path` as indented JSON, keys in the order given; durable when this returns."""
    write_durably(path, json.dumps(value, indent=2) + "\n")


class Status:
    """One job's entry in a run's `private/status.json`: `state` (`running`, `finished`, `failed`, `interrupted`), times, the error and the
    score that a search maximises. After a kill the last state remains, and the entries of jobs in other processes do not change."""

    def __init__(self, folder: Path, job: str):
        self._folder, self.job = RunFolder(folder), job
        self._path = self._folder.private / "status.json"

    def read(self) -> dict[str, Any]:
        """This job's entry; empty if it has never run here, or if the file cannot be read."""
        entry = self._all().get(self.job)
        return entry if isinstance(entry, dict) else {}

    def write(self, state: str, **facts: Any) -> None:
        entry = {"state": state, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())} | facts
        with held(self._folder.made_private()):
            write_json(self._path, self._all() | {self.job: entry})

    def _all(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
