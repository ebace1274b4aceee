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
from dpx.run_folder import RunFolder, read_json, write_json


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one point. `score` is its held-out accuracy if it trained; `job` is the option that it ran."""

    folder: Path
    point: tuple[str, ...]
    state: str
    score: float | None = None
    error: str | None = None
    job: str = "train"


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


def varying(points: list[tuple[str, ...]]) -> list[str]:
    """Each point of a sweep as text: the overrides that not all points share."""
    shared = set(points[0]).intersection(*points) if len(points) > 1 else set()
    return [" ".join(part for part in point if part not in shared) for point in points]


def show_plans(outcomes: list[Outcome], console: Console) -> None:
    """Prints the plans of a sweep of plans (`job=plan`), equal ones once; nothing for a sweep of other jobs."""
    points = varying([outcome.point for outcome in outcomes])
    planned = [(point, one.folder) for point, one in zip(points, outcomes, strict=True) if (one.job, one.state) == ("plan", "finished")]
    if planned:
        from dpx.job.plan import PLAN, show_points

        show_points([(point, read_json(folder / "release" / PLAN)) for point, folder in planned], console)


def show(outcomes: list[Outcome], console: Console) -> None:
    """Prints all points of a sweep with the settings that differ between them; failed points with their error."""
    points = varying([outcome.point for outcome in outcomes])
    table = Table("point", "state", "held-out accuracy", "folder", "error", title="points of the sweep", title_justify="left")
    for outcome, point in zip(outcomes, points, strict=True):
        score = "" if outcome.score is None else f"{outcome.score:.2%}"
        # Escaped, so that a path in brackets is not read as markup.
        table.add_row(escape(point), outcome.state, score, outcome.folder.name, escape(outcome.error or ""))
    console.print(table)
