"""The points of a sweep that can be launched again: the result of each is stored in its folder, finished points are skipped, and a table
shows all.

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
    """The result of one point. `score` is its held-out accuracy if it trained."""

    folder: Path
    point: tuple[str, ...]
    state: str
    score: float | None = None
    error: str | None = None


class Status:
    """One job's entry in a run's `private/status.json`; after a kill the last state remains, and the entries of jobs in other processes do
    not change."""

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


def show(outcomes: list[Outcome], console: Console) -> None:
    """Prints all points of a sweep with the settings that differ between them; failed points with their error."""
    points = [outcome.point for outcome in outcomes]
    shared = set(points[0]).intersection(*points) if len(points) > 1 else set()
    table = Table("point", "state", "held-out accuracy", "folder", "error", title="points of the sweep", title_justify="left")
    for outcome in outcomes:
        score = "" if outcome.score is None else f"{outcome.score:.2%}"
        point = " ".join(part for part in outcome.point if part not in shared)
        # Escaped, so that a path in brackets is not read as markup.
        table.add_row(escape(point), outcome.state, score, outcome.folder.name, escape(outcome.error or ""))
    console.print(table)
