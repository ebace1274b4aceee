"""The folder of one run: `release/` may be shared, everything in `private/` depends on the data without noise."""

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpx.declaration import ConfigError, require
from dpx.durable import write_durably


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """`path/release` (weights, privacy.json, config.yaml) and `path/private` (key, ledger, checkpoints, logs, metrics).

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
        return (self.release / "config.yaml").is_file()

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Makes the trees and holds the folder for this process; raises `ConfigError` where another process holds it."""
        self.release.mkdir(parents=True, exist_ok=True)
        self.private.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(self.private, 0o700)
        with open(self.private / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(
                    self.path, "another process is running in this folder", "Wait for it, or give replicate=1 for a second run"
                ) from None
            yield

    @contextlib.contextmanager
    def read_by_another(self) -> Iterator[None]:
        """Keeps a process from training in this folder while a run elsewhere reads it; raises `ConfigError` where one does."""
        if not (self.private / "lock").is_file():
            yield
            return
        with open(self.private / "lock") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(self.path, "another process is training in this folder", "Wait for it, or stop it first") from None
            yield


def read_json(path: Path, fix: str = "Restore the file") -> dict[str, Any]:
    """The JSON object in `path`. Raises `ConfigError`, whose last sentence is `fix`, where it holds anything else."""
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(path, "is cut short, or was changed by hand", fix) from error
    require(isinstance(document, dict), path, "is no JSON object", fix)
    return document


def write_json(path: Path, value: Any) -> None:
    """Writes `value` to `path` as indented JSON, keys in the order given; durable when this returns."""
    write_durably(path, json.dumps(value, indent=2) + "\n")
