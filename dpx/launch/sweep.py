"""Stores and shows the results of a sweep's points, so that it can be launched again: finished points are skipped, and a table shows
all."""

import dataclasses
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from dpx.console import Console


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Holds the result of one point. `score` is its held-out accuracy if it trained; `job` is the option that it ran."""

    folder: Path
    point: tuple[str, ...]
    state: str
    score: float | None = None
    error: str | None = None
    job: str = "train"


def varying(points: list[tuple[str, ...]]) -> list[str]:
    """Returns each point of a sweep as text: the overrides that not all points share."""
    shared = set(points[0]).intersection(*points) if len(points) > 1 else set()
    return [" ".join(part for part in point if part not in shared) for point in points]


def show_plans(outcomes: list[Outcome], console: Console) -> None:
    """Prints the plans of a sweep of plans (`job=plan`), equal ones once; nothing for a sweep of other jobs."""
    points = varying([outcome.point for outcome in outcomes])
    planned = [(point, one.folder) for point, one in zip(points, outcomes, strict=True) if (one.job, one.state) == ("plan", "finished")]
    if planned:
        from dpx.job.plan import show_points
        from dpx.job.plan_records import read_plan

        show_points([(point, read_plan(folder / "release")) for point, folder in planned], console)


def show(outcomes: list[Outcome], console: Console) -> None:
    """Prints all points of a sweep with the settings that differ between them; failed points with their error."""
    points = varying([outcome.point for outcome in outcomes])
    table = Table("point", "state", "held-out accuracy", "folder", "error", title="points of the sweep", title_justify="left")
    for outcome, point in zip(outcomes, points, strict=True):
        score = "" if outcome.score is None else f"{outcome.score:.2%}"
        # Escaped, so that a path in brackets is not read as markup.
        table.add_row(escape(point), outcome.state, score, outcome.folder.name, escape(outcome.error or ""))
    console.print(table)
