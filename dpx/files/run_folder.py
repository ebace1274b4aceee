"""Manages the folder of one run: `release/` may be shared; everything in `private/` depends on the data without noise.

The paths of this machine are removed from a config that is released, and from what is printed.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpx.declaration import ConfigError, require
from dpx.durable import held, locked, make_folder, make_private, naming, not_following, write_durably

_ABSOLUTE = re.compile(r"[/~]|file:|[A-Za-z]:[\\/]|\\\\")


def without_places(config_yaml: str) -> str:
    """Returns `config_yaml` with each path that is absolute, or leads out of the working folder, replaced by its last component.

    Paths are recognised by their form, whatever their key. Relative paths below the working folder stay.
    """
    if not config_yaml.strip():
        return config_yaml
    # Whoever checks a claim alone may not have it.
    from omegaconf import OmegaConf

    released = told(OmegaConf.to_container(OmegaConf.create(config_yaml), resolve=False))
    return OmegaConf.to_yaml(OmegaConf.create(released))


def told(node: Any) -> Any:
    """Returns `value`, plain containers or one value, with the paths replaced as in `without_places`."""
    if isinstance(node, dict):
        return {key: told(value) for key, value in node.items()}
    if isinstance(node, list):
        return [told(value) for value in node]
    if not isinstance(node, str):
        return node
    leads_out = os.path.normpath(node).split(os.sep)[0] == os.pardir
    # The home of a service may be the root folder, which contains every path.
    homes = (str(place) for place in (Path.home(), Path.cwd()) if len(place.parts) > 1)
    is_of_the_machine = bool(_ABSOLUTE.match(node)) or leads_out or any(home in node for home in homes)
    return (re.split(r"[/\\]", node.rstrip("/\\"))[-1] or ".") if is_of_the_machine else node


def as_printed(path: Path) -> str:
    """Returns `path` for the screen: relative if it is below the working folder, so that it can be copied into the next command."""
    absolute, here = path.absolute(), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(path)


CONFIG = "config.yaml"
LOCK = "lock"


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Has two trees: `path/release` (weights, privacy.json, config.yaml) and `path/private` (key, ledger, checkpoints, logs, metrics,
    whole config.yaml).

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
        """Whether a run was started in this folder: its config is then in `release/`."""
        return (self.release / CONFIG).is_file()

    @property
    def released_config_yaml(self) -> str:
        """The text of the config in `release/config.yaml`."""
        return without_places(self.config_yaml)

    def made_release(self) -> Path:
        """Returns `release/` and makes it if it is missing.

        Raises `ConfigError` if the run's folder contains a symbolic link, since files would be written to its target.
        """
        self.require_no_links()
        make_folder(self.release)
        return self.release

    def made_private(self) -> Path:
        """Returns `private/` and makes it, readable by its owner alone, if it is missing. Raises `ConfigError` as `made_release` does."""
        self.require_no_links()
        make_private(self.private)
        return self.private

    def require_no_links(self) -> None:
        """Raises `ConfigError` if `release`, `private` or anything in them is not a regular file or folder."""
        for tree in (self.release, self.private):
            is_other = tree.is_symlink() or (tree.exists() and not tree.is_dir())
            found = tree if is_other else _first_other(tree)
            if found is not None:
                kind = "a symbolic link" if found.is_symlink() else "not a regular file or folder"
                raise ConfigError(found, f"is {kind}, which is not allowed in a run's folder", "Put the file or the folder itself there")

    @contextlib.contextmanager
    def claimed(
        self, reason: str = "another process is running in this folder", fix: str = "Wait for it, or give replicate=1 for a second run"
    ) -> Iterator[None]:
        """Makes the trees and locks the folder; raises `ConfigError`, with this `reason` and `fix`, if it is locked already."""
        self.made_release()
        self.made_private()
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.private / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB))
            except BlockingIOError:
                raise ConfigError(self.path, reason, fix) from None
            yield

    @contextlib.contextmanager
    def read_by_another(self) -> Iterator[None]:
        """Prevents training in this folder while a run elsewhere reads it; raises `ConfigError` if a process is training in it."""
        with contextlib.ExitStack() as stack:
            try:
                if (self.private / LOCK).is_file():
                    # Opened for reading only, since nobody may have the right to write to the folder.
                    lock = stack.enter_context(open(self.private / LOCK, opener=not_following))
                    with naming(self.private / LOCK):
                        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(self.path, "another process is training in this folder", "Wait for it, or stop it first") from None
            yield


def _first_other(folder: Path) -> Path | None:
    """Returns a path below `folder` that is not a regular file or folder; symbolic links are not followed."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):  # a file that a running job has deleted meanwhile
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
    """Returns the JSON object in `path`. Raises `ConfigError`, whose last sentence is `fix`, for any other content."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(path, "is incomplete, or was changed by hand", fix) from error
    require(isinstance(document, dict), path, "is not a JSON object", fix)
    return document


def write_json(path: Path, value: Any) -> None:
    """Writes `value` to `path` as indented JSON, keys in the given order; the file is on disk when this returns."""
    write_durably(path, json.dumps(value, indent=2) + "\n")


class Status:
    """Holds one job's entry in `private/status.json`: `state`, times, the error and the score that a search maximises.

    `state` is `running`, `finished`, `failed` or `interrupted`. After a kill the last state remains. The entries of jobs in other processes
    do not change.
    """

    def __init__(self, folder: Path, job: str):
        self._folder, self.job = RunFolder(folder), job
        self._path = self._folder.private / "status.json"

    def read(self) -> dict[str, Any]:
        """Returns this job's entry; empty if it has never run here, or if the file cannot be read."""
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
