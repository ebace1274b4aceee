"""Brings the outcomes of points that a launcher such as `processes` or submitit runs in other processes to the command that launched them.

Such a launcher pickles the function that runs a point. The copy carries what the point needs to know of the command, and each point leaves
one file, on a file system that all processes share: in the folder of the sweep, since a refused point keeps no folder.
"""

import contextlib
import dataclasses
import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpx import console
from dpx.config.command_line import as_refused
from dpx.declaration import ConfigError
from dpx.durable import make_private, write_durably
from dpx.launch.refused import NoteFolders
from dpx.launch.sweep import Outcome


class PointFailed(Exception):
    """An error of a point in another process, as text with the name of its class."""


class PointLost(PointFailed):
    """A point whose process ended before it told anything."""


@dataclasses.dataclass(frozen=True)
class Told:
    """What one point told: its outcome, the answer of its job for `--json`, and its error."""

    outcome: Outcome
    answer: Any
    error: Exception | None
    is_trial: bool


@dataclasses.dataclass(frozen=True)
class Command:
    """What other processes know of the command that launched them. `outcomes` is the folder for their files."""

    outcomes: Path
    form: console.Form
    existing: frozenset[Path]
    listed: frozenset[Path]

    @classmethod
    def of_this_process(cls) -> "Command":
        """Returns this command, after Hydra's callback at its start, and makes the folder for outcomes."""
        (sweep,) = NoteFolders.listed
        outcomes = sweep / f".launch-{secrets.token_hex(4)}"
        make_private(outcomes)
        return cls(outcomes, console.form(), NoteFolders.existing, NoteFolders.listed)

    def adopt(self) -> None:
        """Lets this process print and remove files as the process of the command does."""
        console.set_form(self.form)
        NoteFolders.existing, NoteFolders.listed = self.existing, self.listed

    def tell(self, number: int, told: Told) -> None:
        """Leaves the file of point `number`; nothing if the command has ended."""
        error = told.error
        refused = None if error is None else as_refused(error)
        node = {
            "outcome": dataclasses.asdict(told.outcome) | {"folder": str(told.outcome.folder)},
            "answer": told.answer,
            "refused": None if refused is None else [str(refused.value), refused.reason, refused.fix],
            "failed": None if error is None or refused is not None else _in_one_line(error),
            "is_lost": isinstance(error, PointLost),
            "is_trial": told.is_trial,
        }
        if self.outcomes.is_dir():
            write_durably(self.outcomes / f"{number}.json", json.dumps(node))

    def has_told(self, number: int) -> bool:
        """Returns whether point `number` has left its file."""
        return (self.outcomes / f"{number}.json").exists()

    def score(self, number: int) -> float:
        """Returns the score that a search maximises of a point that has told: 0 without one."""
        return json.loads((self.outcomes / f"{number}.json").read_text())["outcome"]["score"] or 0.0

    def gathered(self) -> Iterator[Told]:
        """Yields what the points told, in the order of the launch, and then removes the folder."""
        for path in sorted(self.outcomes.glob("*.json"), key=lambda path: int(path.stem)):
            node = json.loads(path.read_text())
            outcome = Outcome(**node["outcome"] | {"folder": Path(node["outcome"]["folder"]), "point": tuple(node["outcome"]["point"])})
            failed = PointLost if node["is_lost"] else PointFailed
            error = ConfigError(*node["refused"]) if node["refused"] else failed(node["failed"]) if node["failed"] else None
            yield Told(outcome, node["answer"], error, node["is_trial"])
        with contextlib.suppress(OSError):
            shutil.rmtree(self.outcomes)


def _in_one_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return words if isinstance(error, PointLost) else f"{type(error).__name__}: {words}"
