"""Shows what the points of a sweep came to, and writes it as a table."""

import dataclasses
import statistics
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from dpx.console import Console, figure
from dpx.declaration import ConfigError
from dpx.files.records import from_json
from dpx.files.run_folder import CONFIG, RunFolder, as_printed, read_json
from dpx.pages.run_table import accuracy_of, epsilon_of

# That of `job=account`.
_ACCOUNTANT = "pld"


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
        from dpx.job.run_plan import PLAN, PlanDocument

        places = [(point, folder / "release" / PLAN) for point, folder in planned]
        show_points([(point, from_json(PlanDocument, read_json(place), place)) for point, place in places], console)


def show(outcomes: list[Outcome], console: Console) -> None:
    """Prints all points of a sweep with the settings that differ between them, the accuracy with its interval, and epsilon.

    Failed points are printed with their error, and points that differ only in `replicate` also together, as mean and deviation.
    """
    points = varying([outcome.point for outcome in outcomes])
    table = Table("point", "state", "held-out accuracy", "epsilon", "folder", "error", title="points of the sweep", title_justify="left")
    first: dict[str, str] = {}
    before = None
    for outcome, point in zip(outcomes, points, strict=True):
        error = outcome.error or ""
        told = first.setdefault(error, point) if error else point
        shown = error if told == point else "as above" if error == before else f"as {told}"
        before = error
        score = "" if outcome.score is None else accuracy_of(outcome.folder) or f"{outcome.score:.2%}"
        epsilon = "" if outcome.score is None else epsilon_of(outcome.folder)
        # Escaped, so that a path in brackets is not read as markup.
        table.add_row(escape(point), outcome.state, score, epsilon, outcome.folder.name, escape(shown))
    console.print(table)

    scores: dict[tuple[str, ...], list[float]] = {}
    for outcome in outcomes:
        if outcome.score is not None:
            alike = tuple(part for part in outcome.point if not part.startswith("replicate="))
            scores.setdefault(alike, []).append(outcome.score)
    repeated = {point: values for point, values in scores.items() if len(values) > 1}
    together = Table("point", "runs", "mean ± standard deviation", title="replicates together", title_justify="left")
    for point, values in zip(varying(list(repeated)) if repeated else [], repeated.values(), strict=True):
        together.add_row(escape(point), str(len(values)), f"{statistics.mean(values):.2%} ± {statistics.stdev(values):.2%}")
    if repeated:
        console.print(together)


def write_table(outcomes: list[Outcome], console: Console, place: Path | None = None) -> None:
    """Writes a table of the points that have a folder, with numbers as numbers, once any of them trained, and says where.

    `place` is by default named by the experiment, in the private folder beside the points.
    """
    from dpx.pages.run_table import records_of, write

    folders = list(dict.fromkeys(one.folder for one in outcomes if (one.folder / "release" / CONFIG).is_file()))
    if all(one.score is None for one in outcomes) or not folders:
        return
    names = {folder.name.rpartition("-")[0] for folder in folders}
    place = place or RunFolder(folders[0].parent).made_private() / f"sweep{f'-{min(names)}' * (len(names) == 1)}.csv"
    write(records_of(folders), place)
    console.print(f"as numbers: {as_printed(place)}", highlight=False, markup=False)


def show_together(outcomes: list[Outcome], console: Console) -> None:
    """Prints what the points that were charged guarantee together, to whoever sees all of them; nothing for fewer than two.

    It is what `job=account` composes: there is no discount for a choice of the best one.
    """
    from dpx.claim.combined_ledgers import read, together
    from dpx.privacy import accounting, ledger
    from dpx.statement import outside_code
    from dpx.statement.agreement import LEDGER

    folders = list(dict.fromkeys(one.folder for one in outcomes if (one.folder / LEDGER).is_file()))
    counted = f"these {len(folders)} points together"
    try:
        sources = [read(folder) for folder in folders]
        if len(sources) < 2 or not any(one.segments for one in sources):
            return
        joint = together(sources)
        if joint.reasons or joint.by:
            why = "; ".join(joint.reasons or outside_code.sentences(joint.by))
            told = f"{counted} have no joint guarantee: {why}"
        else:
            epsilon = accounting.compose(accounting.bucketed(ledger.releases(joint.segments)), _ACCOUNTANT, joint.adjacency).epsilon(
                joint.delta
            )
            unit = "one unit" if joint.unit is None else joint.unit.in_words()
            told = f"{counted}: epsilon {figure(epsilon)} ({_ACCOUNTANT}) at delta {joint.delta:.2e} for {unit}, whichever is chosen"
    except ConfigError as refused:
        told = f"{counted} have no joint guarantee: {refused.value}: {refused.reason}"
    console.print(told, highlight=False, markup=False)
