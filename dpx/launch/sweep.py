"""Points of a sweep that can be launched again: what each came to is kept beside it, finished ones are skipped, all stand in a table.

`private/status.json` of a run holds, by job, `state` (`running`, `finished`, `failed`, `interrupted`), times, the error and the
score that a search maximises.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from dpx.console import Console
from dpx.durable import held
from dpx.run_folder import RunFolder, write_json


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one point came to. `score` is its held-out accuracy where it trained."""

    folder: Path
    point: tuple[str, ...]
    state: str
    score: float | None = None
    error: str | None = None


class Status:
    """One job's entry in a run's `private/status.json`; a kill leaves the last state, and jobs of other processes keep theirs."""

    def __init__(self, folder: Path, job: str):
        self._folder, self.job = RunFolder(folder), job
        self._path = self._folder.private / "status.json"

    def read(self) -> dict[str, Any]:
        """This job's entry; empty where it has never run here, or where what is there cannot be read."""
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


def show(outcomes: list[Outcome], console: Console) -> None:
    """All points of a sweep by what differs between them, failed ones with their error."""
    points = [outcome.point for outcome in outcomes]
    shared = set(points[0]).intersection(*points) if len(points) > 1 else set()
    table = Table("point", "state", "held-out accuracy", "folder", "error", title="points of the sweep", title_justify="left")
    for outcome in outcomes:
        score = "" if outcome.score is None else f"{outcome.score:.2%}"
        point = " ".join(part for part in outcome.point if part not in shared)
        # A path in brackets is no markup.
        table.add_row(escape(point), outcome.state, score, outcome.folder.name, escape(outcome.error or ""))
    console.print(table)
