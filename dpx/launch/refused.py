"""Ends a command that was refused or interrupted before it did anything, and notes what no caller can catch.

The folder that Hydra and the launcher made for it is removed only if the command itself made it and it holds only files that every command
writes. A folder that existed before, or that holds a ledger, results or the record of a trial, stays.

The log of a command is `private/dpx.log`. A launch that has nothing left to do ends by an exception of this module (`NothingLeft`).
"""

import contextlib
import fcntl
import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from dpx.durable import locked
from dpx.files.run_folder import LOCK

# The files that Hydra, the log, the launcher and the lock write before a job does any work, relative to the folder.
_OF_ANY_COMMAND = frozenset(
    {f"private/{name}" for name in ("dpx.log", "status.json", LOCK)}
    | {f"private/hydra/{name}.yaml" for name in ("config", "hydra", "overrides")}
)

# Hydra writes it into the folder of a sweep before the first point.
_SWEEP = "multirun.yaml"


class NoteFolders(Callback):
    """Records which folders exist before Hydra makes one; it is Hydra's callback at the start of a command.

    `existing` holds the ancestors of the folders that this command may make, and the entries of those in `listed`.
    """

    existing: ClassVar[frozenset[Path]] = frozenset()
    listed: ClassVar[frozenset[Path]] = frozenset()

    def on_run_start(self, config: Any, **kwargs: Any) -> None:
        """Records the folders; `config` is the composed config with Hydra's own node."""
        _note(lambda: Path(config.hydra.run.dir).absolute().parent)

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        """Records the folders as `on_run_start` does; every point of the sweep has its folder in the folder of the sweep."""
        _note(lambda: Path(config.hydra.sweep.dir).absolute())


def _note(parent_of_runs: Any) -> None:
    NoteFolders.existing, NoteFolders.listed = frozenset(), frozenset()
    # A config that is not valid is refused when Hydra resolves it again, and then no folder was made.
    with contextlib.suppress(Exception):
        parent = parent_of_runs()
        entries = parent.iterdir() if parent.is_dir() else ()
        NoteFolders.existing = frozenset({path for path in (parent, *parent.parents) if path.exists()} | {*entries})
        NoteFolders.listed = frozenset({parent})


def remove_if_new(folder: Path, job: str) -> bool:
    """Removes `folder`, in which a refused or an interrupted command of `job` ran, and its parents that are then empty.

    Returns whether it removed the folder.

    Nothing is removed if the folder existed before the command, if it holds anything that a command does not write before its work, or if
    another process uses it.
    """
    folder = folder.absolute()
    is_parent_known = folder.parent in NoteFolders.listed or (bool(NoteFolders.listed) and folder.parent not in NoteFolders.existing)
    if not is_parent_known or folder in NoteFolders.existing or not folder.is_dir():
        return False
    files = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    if not {str(path.relative_to(folder)) for path in files} <= _OF_ANY_COMMAND:
        return False
    try:
        entries = json.loads((folder / "private" / "status.json").read_text())
        # One that this process did not write.
        if any(name != job or entry.get("pid") != os.getpid() for name, entry in entries.items()):
            return False
    except FileNotFoundError:
        pass
    except (OSError, ValueError, AttributeError):
        return False
    with contextlib.ExitStack() as stack:
        lock = folder / "private" / LOCK
        try:
            if lock in files:
                stack.enter_context(locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        # A message after the removal, such as that of a launcher's own process, would raise.
        root = logging.getLogger()
        for handler in [*root.handlers]:
            if isinstance(handler, logging.FileHandler) and folder in Path(handler.baseFilename).parents:
                root.removeHandler(handler)
                handler.close()
        for file in files:
            file.unlink(missing_ok=True)
    for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        _remove_empty(path)
    for path in (folder, *folder.parents):
        if path in NoteFolders.existing or not _remove_empty(path):
            break
    return not folder.exists()


def remove_sweep_if_new() -> None:
    """Removes Hydra's file of a sweep of which no point left a folder, and the folder of the sweep if it is empty then.

    A file or a folder that existed before the command stays.
    """
    for folder in NoteFolders.listed:
        if folder / _SWEEP in NoteFolders.existing:
            continue
        with contextlib.suppress(OSError):
            (folder / _SWEEP).unlink()
        for path in (folder, *folder.parents):
            if path in NoteFolders.existing or not _remove_empty(path):
                break


def _remove_empty(path: Path) -> bool:
    try:
        path.rmdir()
    except OSError:
        return False
    return True


class LogFile(logging.FileHandler):
    """A log that never stops what it tells of: a message that cannot be written (a full disk, a folder that was closed) is dropped.

    Python's own drops one only while its file is open, and opens it for the first message.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one message, if that is possible."""
        with contextlib.suppress(OSError):
            super().emit(record)


def log_uncaught() -> None:
    """Logs errors of threads and of callbacks, which Python would print: a command that fails prints one line."""
    sys.unraisablehook = _note_error
    threading.excepthook = _note_error


def _note_error(uncaught: Any) -> None:
    error = uncaught.exc_value
    # Where one write of a checkpoint fails, the results of the others arrive after Orbax has stopped waiting for them.
    is_late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    if not is_late and not isinstance(error, SystemExit):
        logging.getLogger("dpx").error("an error that nothing caught", exc_info=(uncaught.exc_type, error, uncaught.exc_traceback))


class NothingLeft(BaseException):
    """Raised if a search has no trial left when it is launched. `config` is its base config, with Hydra's own node.

    It is not an `Exception`, which OmegaConf would wrap; it must end the launch, since Optuna fails if it draws no trial."""

    def __init__(self, config: DictConfig):
        super().__init__("all trials of the search are done")
        self.config = config
