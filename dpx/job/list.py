"""`job=list`: the recipes, with `list.plan=true` a plan of every point of each, and with `list.what=runs` the runs in the output folder."""

import dataclasses
import fnmatch
from collections import Counter
from pathlib import Path
from typing import Literal

from rich.table import Table

from dpx import config, packages
from dpx.config import recipes, reference
from dpx.config.command_line import as_refused
from dpx.config.experiment import Experiment
from dpx.console import answer, duration, progress_console, wide_console
from dpx.declaration import ConfigError, declaration, require
from dpx.files.records import described, record, to_json
from dpx.files.run_folder import RunFolder, as_printed, write_json
from dpx.job import chain_plan
from dpx.job.plan import Plan
from dpx.job.run_plan import AnalysisPlan, ChainPlan, PlanDocument, RunPlan
from dpx.pages import run_table
from dpx.pages.run_table import accuracy_of, epsilon_of, runs_in, state_of
from dpx.privacy import cache
from dpx.processes.interruption import Interrupted


@declaration
class List:
    """Recipes, or runs, whose name matches the pattern; raises `ConfigError` when none does, or when a point cannot be planned.

    Attributes:
        match: Pattern of the names, such as anil_*.
        plan: Whether every point of every recipe is planned too.
        what: recipes, or runs: the runs in the output folder.
        to: A file for the table of runs, with numbers as numbers: .csv, .json or .parquet. It holds held-out metrics, which are private.
    """

    match: str
    plan: bool
    what: Literal["recipes", "runs"] = "recipes"
    to: str | None = None

    def __post_init__(self) -> None:
        if self.to is not None:
            require(self.what == "runs", f"list.to={self.to}", "a table is written of runs", "Add list.what=runs, or leave list.to out")
            run_table.require_format(Path(self.to), f"list.to={self.to}")

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        del experiment
        if self.what == "runs":
            self._show_runs(folder.path.parent.parent)
            return
        names = recipes.names(self.match)
        everything = recipes.names()
        require(bool(names), f"list.match={self.match}", "no recipe has this name", f"The recipes are {', '.join(everything) or 'none'}")
        # Planning a package's recipe imports the package, and every later plan of this process names it.
        names = sorted(names, key=lambda name: not packages.is_own("experiment", name))
        points = [Point(name, tuple(overrides)) for name in names for overrides in recipes.points(name)]
        if self.plan:
            _plan(points, folder)
            return
        counts = Counter(point.name for point in points)
        told = {option.name: option.meaning for option in reference.options("experiment")}
        answer([{"experiment": name, "points": counts[name], "meaning": told[name]} for name in names])
        table = Table("experiment", "points", "what it is")
        for name in names:
            table.add_row(name, str(counts[name]), told[name])
        # The installed packages of others that add to dpx, if there are any.
        outside = Table("package", "version", "options", "set aside because")
        for package in packages.outside():
            outside.add_row(package.name, package.version, "\n".join(packages.assignments(package)), package.set_aside)
        for shown in (table, outside):
            if shown.row_count:
                wide_console().print(shown)

    def _show_runs(self, outputs: Path) -> None:
        """Prints the runs in `outputs`. Metrics are private, so only a file that was asked for holds them."""
        runs = [run for run in runs_in(outputs) if fnmatch.fnmatchcase(run.name, self.match)]
        require(bool(runs), f"list.match={self.match}", f"{outputs} holds no run of this name", "Use list.match='*', or start a run")
        table = Table("run", "state", "held-out metric", "epsilon", title=as_printed(outputs), title_justify="left")
        records = run_table.records_of(runs)
        answer(list(records))
        if self.to is not None:
            run_table.write(records, Path(self.to))
        for run in runs:
            table.add_row(run.name, state_of(run), accuracy_of(run), epsilon_of(run))
        wide_console().print(table)


@record
class PlannedPoint:
    """One row of `list.json`."""

    experiment: str = described("Name of the recipe.")
    point: str = described("The overrides of its sweep.")
    plan: PlanDocument | None = described("Its plan; null for a point that cannot be planned.")
    error: str | None = described("Why it cannot be planned; null for a point with a plan.")


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a recipe: its name and the overrides that its sweep adds."""

    name: str
    overrides: tuple[str, ...]

    def plan_row(self) -> PlannedPoint:
        """Returns the plan of the point, or the reason why it has none."""
        plan, why = None, None
        try:
            experiment, job = config.build(recipes.plan_config(self.name, list(self.overrides)))
            assert isinstance(job, Plan)
            plan = job.document(experiment)
        except Exception as error:
            why = str(as_refused(error) or f"{type(error).__name__}: {error}")
        return PlannedPoint(experiment=self.name, point=" ".join(self.overrides), plan=plan, error=why)


def _plan(points: list[Point], folder: RunFolder) -> None:
    """Plans each point, prints a line as soon as its plan is known, then writes list.json and prints all plans as a table."""
    rows: list[PlannedPoint] = []
    stopped: Interrupted | None = None
    progress = progress_console()
    try:
        with cache.keeping():
            for number, point in enumerate(points, 1):
                rows.append(point.plan_row())
                line = f"{number}/{len(points)} {rows[-1].experiment} {rows[-1].point}".rstrip()
                progress.print(f"{line}: {_in_words(rows[-1])}", highlight=False, markup=False, soft_wrap=True)
    except Interrupted as interrupted:
        if not rows:
            raise
        stopped = interrupted
        stopped.how = f"list.json holds {len(rows)} of {len(points)} points; the same command starts again, and solves none of these again"
    write_json(folder.made_release() / "list.json", to_json(rows))
    answer(to_json(rows))

    table = Table("experiment", "point", "parameters", "FLOPs", "device time", "noise", "epsilon", "guarantee", "error")
    for row in rows:
        table.add_row(row.experiment, row.point, *_cells(row))
        # A chain has the line of its claim, and one for each run of a stage.
        for one in row.plan.stages if isinstance(row.plan, ChainPlan) else ():
            parameters, _, hours, noise, epsilon, guarantee = chain_plan.cells(one.plan)
            flops = "-" if one.plan is None else f"{one.plan.flops:.3g}"
            table.add_row(f"  {one.stage}", one.point, parameters, flops, hours, noise, epsilon, guarantee, "")
    wide_console().print(table)
    if stopped is not None:
        raise stopped
    failed = [row for row in rows if row.error]
    if failed:
        raise ConfigError(f"{len(failed)} of {len(rows)} points", "cannot be planned", "See the last column of the table")


def _cells(row: PlannedPoint) -> tuple[str, ...]:
    """Returns the plan of a point for the table of all plans, from the parameters on."""
    plan = row.plan
    if plan is None:
        return (*[""] * 6, row.error or "")
    if isinstance(plan, AnalysisPlan):
        return ("analysis", *[""] * 5, "" if all(entry.exists for entry in plan.inputs) else "its inputs are not there yet")
    hours = duration(plan.device_hours * 3600)
    if isinstance(plan, ChainPlan):
        return ("chain", f"{len(plan.stages)} runs", hours, "", "", plan.claim.guarantee, "")
    return (f"{plan.parameters:,}", f"{plan.flops:.3g}", hours, *_noise_and_epsilon(plan), plan.guarantee, "")


def _in_words(row: PlannedPoint) -> str:
    """Returns what is known of a point, for one line."""
    if isinstance(row.plan, RunPlan):
        noise, epsilon = _noise_and_epsilon(row.plan)
        return f"noise {noise}, epsilon {epsilon}, {row.plan.guarantee}, {duration(row.plan.device_hours * 3600)}"
    if isinstance(row.plan, ChainPlan):
        return f"chain of {len(row.plan.stages)} runs, {row.plan.claim.guarantee}, {duration(row.plan.device_hours * 3600)}"
    return row.error or "analysis"


def _noise_and_epsilon(plan: RunPlan) -> tuple[str, str]:
    sigma = plan.noise_multiplier
    epsilon = ", ".join(f"{value:.3g} {name}" for name, value in plan.epsilon.items() if value is not None)
    return f"{sigma:.4g}" if sigma else "-", epsilon or "-"
