"""The points of one command, in this process and in others, and what each came to.

Finished points are skipped, and errors are kept for the end. A launcher such as `processes` or submitit runs points in other processes, and
pickles the function that runs a point. The copy carries what the point needs to know of the command, and each point leaves one file, on a
file system that all processes share: in the folder of the sweep, since a refused point keeps no folder.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from dpx import console
from dpx.config.command_line import as_refused
from dpx.console import Console, taken_answer, tell_answer, wide_console
from dpx.declaration import ConfigError
from dpx.durable import make_private, write_durably
from dpx.files.run_folder import Status
from dpx.launch import sweep_tables
from dpx.launch.point import Point, score_of
from dpx.launch.refused import NoteFolders, remove_sweep_if_new
from dpx.launch.search import adopt, own_place, trial
from dpx.launch.sweep_tables import Outcome
from dpx.privacy import cache
from dpx.processes import interruption
from dpx.processes.interruption import Interrupted


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

    def begin(self, number: int, folder: Path) -> None:
        """Notes that this process runs point `number` in `folder`, so that the command can say so if it is killed."""
        if self.outcomes.is_dir():
            write_durably(self.outcomes / f"{number}.begun", json.dumps([str(folder), os.getpid()]))

    def tell(self, number: int, told: Told) -> None:
        """Leaves the file of point `number`; nothing if the command has ended."""
        error, failed = told.error, None
        refused = None if error is None else as_refused(error)
        if error is not None and refused is None:
            words = " ".join(str(error).split())
            failed = words if isinstance(error, PointLost) else f"{type(error).__name__}: {words}"
        node = {
            "outcome": dataclasses.asdict(told.outcome) | {"folder": str(told.outcome.folder)},
            "answer": told.answer,
            "refused": None if refused is None else [str(refused.value), refused.reason, refused.fix],
            "failed": failed,
            "is_lost": isinstance(error, PointLost),
            "is_trial": told.is_trial,
        }
        if self.outcomes.is_dir():
            write_durably(self.outcomes / f"{number}.json", json.dumps(node))

    def returned(self, composed: DictConfig, how: str) -> JobReturn:
        """Returns what Hydra wants to know of a point whose process has ended; one that told nothing has failed as `how` says."""
        hydra, number = composed.hydra, composed.hydra.job.num
        # Listed, since a file system of several machines may remember for a while that a file was not there.
        left = os.listdir(self.outcomes)
        if f"{number}.json" not in left:
            path, job = Path(hydra.sweep.dir, str(hydra.sweep.subdir)).absolute(), str(hydra.runtime.choices.get("job"))
            pid = None
            if f"{number}.begun" in left:
                folder, pid = json.loads((self.outcomes / f"{number}.begun").read_text())
                path = Path(folder)
            error = PointLost(f"{path.name}: its process ended ({how})")
            status = Status(path, job)
            # Another command may have begun there since.
            if pid is not None and (status.read().get("state"), status.read().get("pid")) == ("running", pid):
                with contextlib.suppress(OSError):
                    status.write("failed", error=str(error))
            outcome = Outcome(path, tuple(hydra.overrides.task), "failed", error=str(error), job=job)
            self.tell(number, Told(outcome, None, error, is_trial=composed.get("tune") is not None and job == "train"))
        score = json.loads((self.outcomes / f"{number}.json").read_text())["outcome"]["score"]
        overrides: Any = OmegaConf.to_container(hydra.overrides.task)
        # A search maximises the score: 0 without one.
        return JobReturn(overrides=overrides, hydra_cfg=composed, status=JobStatus.COMPLETED, _return_value=score or 0.0)

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


def composed(context: HydraContext, config: DictConfig, number: int, overrides: Sequence[str]) -> DictConfig:
    """Returns the config of point `number`, with Hydra's own node."""
    found = context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(found):
        found.hydra.job.id = found.hydra.job.num = number
    return found


class Sweep:
    """Runs what Hydra composes: the points of a sweep, or one. `failures` and `outcomes` are in the order of the launch.

    A launcher of other processes pickles it; a copy in another process belongs to `command`, and tells it what its points came to.
    """

    def __init__(self, command: Command | None = None) -> None:
        self.failures: list[Exception] = []
        self.outcomes: list[Outcome] = []
        self.is_sweep = self.is_search = False
        self._command, self._is_copy = command, command is not None
        if command is not None:
            # This process prints and removes files as the process of the command does.
            console.set_form(command.form)
            NoteFolders.existing, NoteFolders.listed = command.existing, command.listed
        self._mesh: Any = None

    def __reduce__(self) -> tuple[type["Sweep"], tuple[Command]]:
        return Sweep, (self.elsewhere(),)

    def elsewhere(self) -> Command:
        """Returns what other processes know of this command, and where they tell what their points came to."""
        if self._command is None:
            # Known after Hydra's callback at the start of the command.
            (sweep,) = NoteFolders.listed
            outcomes = sweep / f".launch-{secrets.token_hex(4)}"
            make_private(outcomes)
            self._command = Command(outcomes, console.form(), NoteFolders.existing, NoteFolders.listed)
        return self._command

    def gather(self) -> None:
        """Adds the outcomes and failures of points that ran in other processes."""
        command, self._command = self._command, None
        for told in () if command is None else command.gathered():
            self.is_sweep = True
            self._add(told)

    def __call__(self, cfg: DictConfig) -> float:
        """Runs one point; returns the score that a search maximises: 0, the worst possible accuracy, for failed points.

        Errors are kept: if they were raised here, Hydra would add lines to the output, and the other points of a sweep would not run.
        """
        settings = HydraConfig.get()
        point = Point(cfg, settings)
        self.is_sweep = point.is_sweep
        try:
            # A point that was complete when the signal came has finished; the next one does not begin.
            if interruption.is_requested():
                raise Interrupted
            if point.is_sweep and point.job == "train":
                point.cfg, point.path = own_place(cfg, point.path)
                # So the record holds the overrides that lead to this folder.
                point.overrides += (f"replicate={point.cfg.replicate}",) if point.path != Path(settings.runtime.output_dir) else ()
                point.is_left_alone = point.status.read().get("state") == "finished"
                if point.is_left_alone:
                    adopt(point)
                    return self._record(point, "finished before", point.status.read().get("score"))
            point.require_alone()
            if point.is_sweep:
                point.require_fits_sweep(settings)
                self._mesh = point.require_one_mesh(self._mesh, settings)
            point.require_read()
            if point.is_done():
                return self._record(point, "finished before", score_of(point.path))
            experiment, job = point.built()
            with trial(point, experiment, job) as seen:
                if self._is_copy and self._command is not None:
                    self._command.begin(settings.job.num, point.path.absolute())
                # Plans of a sweep are printed at its end, equal ones once (`sweep_tables.show_plans`).
                is_listed = point.is_sweep and point.job == "plan"
                with cache.keeping() if is_listed else contextlib.nullcontext():
                    point.run(partial(job.write if is_listed else job, seen))
        except Interrupted as interrupted:
            point.note_interrupted(interrupted)
            raise
        except Exception as error:
            return self._record(point, "failed", failed=(point.note_failed(error), error))
        return self._record(point, "finished", point.status.read().get("score"))

    def _record(self, point: Point, state: str, score: float | None = None, failed: tuple[str, Exception] | None = None) -> float:
        """Keeps the outcome of one point; `failed` is its error, as text and itself. Returns the score that a search maximises."""
        error, failure = failed or (None, None)
        outcome = Outcome(point.path, point.overrides, state, score, error, point.job)
        told = Told(outcome, taken_answer(), failure, point.is_trial)
        if self._is_copy and self._command is not None:
            self._command.tell(HydraConfig.get().job.num, told)
        else:
            self._add(told)
        return score or 0.0

    def _add(self, told: Told) -> None:
        """Adds the outcome of one point, and prints it under `--json`."""
        one = told.outcome
        self.outcomes.append(one)
        self.is_search = self.is_search or told.is_trial
        if told.error is not None:
            self.failures.append(told.error)
        facts = {"folder": str(one.folder), "overrides": list(one.point), "state": one.state, "score": one.score, "error": one.error}
        tell_answer(job=one.job, **facts, answer=told.answer)

    def show(self) -> None:
        """Prints the points of a sweep that is not a search; a search ends with a table of all trials, those of earlier launches included.

        A sweep that was refused at every point leaves no file.
        """
        self.gather()
        if not any(outcome.folder.exists() for outcome in self.outcomes):
            remove_sweep_if_new()
        if self.is_sweep and not self.is_search:
            sweep_tables.show_plans(self.outcomes, Console(soft_wrap=True))
            sweep_tables.show(self.outcomes, wide_console())
            sweep_tables.write_table(self.outcomes, wide_console())
            sweep_tables.show_together(self.outcomes, wide_console())
