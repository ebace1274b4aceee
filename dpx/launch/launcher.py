"""Runs one composed config as one job in one run folder; in a sweep, finished points are skipped and errors are kept for the end.

Only this module and `__main__` depend on a running Hydra.
"""

import contextlib
import dataclasses
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dpx import config
from dpx.claim.search_rules import check_charge, check_fork, check_init
from dpx.claim.study import Study
from dpx.config import build
from dpx.config.command_line import as_refused
from dpx.config.experiment import Experiment
from dpx.config.instantiate import NODES_OF_JOBS
from dpx.console import stage, taken_answer, tell_answer, wide_console
from dpx.data.prepare import prepare
from dpx.declaration import ConfigError, require
from dpx.durable import put_in_place
from dpx.files.results import read_results
from dpx.files.run_folder import RunFolder, Status
from dpx.job import finished
from dpx.job.commit import commit
from dpx.job.train import Train
from dpx.launch import search_space, sweep
from dpx.launch.elsewhere import Command, Told
from dpx.launch.refused import remove_if_new
from dpx.launch.same_run import require_same_claim, require_same_run
from dpx.launch.sweep import Outcome
from dpx.mechanism.mechanism_protocol import Mechanism
from dpx.processes import interruption, team
from dpx.processes.interruption import Interrupted
from dpx.processes.mesh import simulate_devices
from dpx.processes.place import require_processes
from dpx.statement import outside_code

log = logging.getLogger("dpx")

# The only settings, in addition to `run=`, that may differ from the config of an existing run.
_BESIDE_RUN = ("mesh", "schedule", "microbatch")

# Keys that a chain reads itself; every other belongs to a stage.
_OF_A_CHAIN = ("experiment", "base", "job", "chain", "name", "replicate", "point", "hydra", "list", "plan", "run")


class Launcher:
    """Runs what Hydra composes. `failures` and `outcomes` are in the order of the launch.

    A launcher of other processes pickles it; a copy in another process belongs to `command`, and tells it what its points came to.
    """

    def __init__(self, command: Command | None = None) -> None:
        self.failures: list[Exception] = []
        self.outcomes: list[Outcome] = []
        self.is_sweep = self.is_search = False
        self._command, self._is_copy = command, command is not None
        if command is not None:
            command.adopt()
        self._mesh: Any = None
        self._is_draw = False
        self._job = ""

    def __reduce__(self) -> tuple[type["Launcher"], tuple[Command]]:
        return Launcher, (self.elsewhere(),)

    def elsewhere(self) -> Command:
        """Returns what other processes know of this command, and where they tell what their points came to."""
        self._command = self._command or Command.of_this_process()
        return self._command

    def gather(self) -> None:
        """Adds the outcomes and failures of points that ran in other processes."""
        command, self._command = self._command, None
        for told in () if command is None else command.gathered():
            self.is_sweep, self.is_search = True, self.is_search or told.is_trial
            self._add(told)

    def __call__(self, cfg: DictConfig) -> float:
        """One job of one config; returns the score that a search maximises: 0, the worst possible accuracy, for failed points.

        Errors are kept: if they were raised here, Hydra would add lines to the output, and the other points of a sweep would not run.
        """
        settings = HydraConfig.get()
        self.is_sweep = settings.mode == RunMode.MULTIRUN
        path, point = Path(settings.runtime.output_dir), tuple(settings.overrides.task)
        self._job = job = str(settings.runtime.choices.get("job"))
        status, is_left_alone = Status(path, job), False
        try:
            # A point that was complete when the signal came has finished; the next one does not begin.
            if interruption.is_requested():
                raise Interrupted
            if self.is_sweep and job == "train":
                cfg, path = _own_place(cfg, path)
                # So the record holds the overrides that lead to this folder.
                point += (f"replicate={cfg.replicate}",) if path != Path(settings.runtime.output_dir) else ()
                status = Status(path, job)
                is_left_alone = status.read().get("state") == "finished"
                if is_left_alone:
                    self._adopt(cfg, path, status, point)
                    return self._record(path, point, "finished before", status.read().get("score"))
            self._check_launch(cfg, settings, point)
            if cfg.run is not None:
                cfg, path = _of_finished_run(cfg, list(point))
                status = Status(path, job)
            elif job not in finished.JOBS:
                require_same_run(cfg, path)
            RunFolder(path).require_no_links()
            if job in finished.JOBS and not self.is_sweep and finished.has_finished(path, config.resolved(cfg)):
                is_left_alone = True
                finished.say(path)
                return self._record(path, point, "finished before", _score(path))
            if job in finished.JOBS:
                is_left_alone = True
                with RunFolder(path).read_by_another():
                    is_left_alone = False
            self._run(cfg, path, status, point)
        except Interrupted as interrupted:
            self._note_interrupted(interrupted, path, status)
            raise
        except Exception as error:
            # A finished run that a search may not count has still finished, and a run that another process trains has not failed.
            words = self._note_failed(error, path, None if is_left_alone else status)
            return self._record(path, point, "failed", failed=(words, error))
        return self._record(path, point, "finished", status.read().get("score"))

    def _check_launch(self, cfg: DictConfig, settings: Any, point: tuple[str, ...]) -> None:
        """Raises `ConfigError` for a sweep that cannot run here, and for an override that no stage of a chain reads."""
        require(
            team().is_alone or self._job in (*finished.JOBS, "chain"),
            f"job={self._job}",
            f"is done by one process, and this job has {team().count}",
            "Start one process for it; several are for job=train, resume and chain",
        )
        if self.is_sweep:
            self._check_sweep(cfg, settings, point)
        if cfg.get("chain") is not None:
            _require_read_by_chain(point)

    def _note_failed(self, error: Exception, path: Path, status: Status | None) -> str:
        """Notes the error in `path` if `status` is that of the failed job, and returns it as text. A refused command that has not done
        anything leaves no folder."""
        refused = as_refused(error)
        if refused is not None and remove_if_new(path, self._job):
            return str(refused)
        log.exception("the job stopped")
        words = str(refused or f"{type(error).__name__}: {error}")
        # On a full disk the user must see this error, not that it could not be noted; it is also not written through a symbolic link.
        with contextlib.suppress(OSError, ConfigError):
            if status is not None:
                status.write("failed", error=words)
        return words

    def _run(self, cfg: DictConfig, path: Path, status: Status, point: tuple[str, ...]) -> None:
        experiment, job = build(cfg)
        require(callable(job), f"job={cfg.get('job')}", "is not a job", "Choose one: python -m dpx --help lists them")
        if cfg.run is None:
            # Only for new work: jobs on an existing run accept any config that it had.
            _check_noise(experiment.mechanism, point)
            if status.job in finished.JOBS:
                require_same_claim(experiment, cfg, path, point)
        require_processes(experiment.mesh, team().count)
        simulate_devices(experiment.mesh, experiment.mesh.simulated_here(team().count))
        if cfg.run is None:
            # Only now: it may import jax.
            experiment.require_new()
        began, code = time.monotonic(), commit()
        with self._trial(experiment, job, path, status, point, cfg.get("fork")) as experiment:
            if self._is_copy and self._command is not None:
                self._command.begin(HydraConfig.get().job.num, path.absolute())
            status.write("running", pid=os.getpid(), commit=code)
            folder = RunFolder(path, OmegaConf.to_yaml(OmegaConf.create(config.resolved(cfg))), cfg.get("fork"))
            if self.is_sweep and status.job == "plan":
                # Plans of a sweep are printed at its end, equal ones once (`sweep.show_plans`).
                job.write(experiment, folder)
            else:
                job(experiment, folder)
            status.write("finished", seconds=round(time.monotonic() - began, 1), commit=code, score=_score(path))

    @contextlib.contextmanager
    def _trial(
        self, experiment: Experiment, job: Any, path: Path, status: Status, point: tuple[str, ...], fork: str | None
    ) -> Iterator[Experiment]:
        """Counts a trial of a search, whatever its result. Training points of a sweep are trials. A run that began as a trial remains one,
        according to its folder, not the command line."""
        is_point = experiment.tune is not None and self.is_sweep and status.job == "train"
        # An external job may also train.
        trains = status.job in finished.JOBS or bool(outside_code.packages_of(job))
        study = Study(path.parent, experiment.name) if is_point else Study.of_run(path) if trains else None
        if study is None:
            _require_no_search(experiment, status.job, self.is_sweep and trains)
            yield dataclasses.replace(experiment, tune=None)
            return
        if is_point:
            assert experiment.tune is not None
            sweeper = HydraConfig.get().sweeper
            check_charge(sweeper, experiment.tune)
            if experiment.tune.charge == "repeat_and_select":
                search_space.require_settled(sweeper)
            check_fork(fork, experiment.tune)
            check_init(experiment.init, experiment.tune)
            # Text that cannot be prepared raises here, before a trial begins.
            prepare(experiment.data, experiment.privacy)
            self.is_search = True
        else:
            experiment = dataclasses.replace(experiment, tune=study.first_tune(experiment.tune))
        study.begin(experiment, path, point, search_space.composed)
        # The same command draws new trials and does not resume this one.
        self._is_draw = experiment.tune is not None and experiment.tune.charge == "repeat_and_select"
        try:
            yield experiment
        except Exception as error:
            study.end(experiment, path, "failed", error=str(as_refused(error) or f"{type(error).__name__}: {error}"))
            raise
        study.end(experiment, path, "finished", _score(path))

    def _adopt(self, cfg: DictConfig, path: Path, status: Status, point: tuple[str, ...]) -> None:
        """Adds a point that was trained separately before to a charged search: it becomes a trial with its result and is charged."""
        experiment, job = build(cfg)
        if experiment.tune is None or experiment.tune.charge == "uncharged" or Study(path.parent, experiment.name).has(path):
            return
        with self._trial(experiment, job, path, status, point, cfg.get("fork")):
            pass

    def _record(
        self, path: Path, point: tuple[str, ...], state: str, score: float | None = None, failed: tuple[str, Exception] | None = None
    ) -> float:
        """Keeps the outcome of one point; `failed` is its error, as text and itself. Returns the score that a search maximises."""
        error, failure = failed or (None, None)
        told = Told(Outcome(path, point, state, score, error, self._job), taken_answer(), failure, self.is_search)
        if self._is_copy and self._command is not None:
            self._command.tell(HydraConfig.get().job.num, told)
        else:
            self._add(told)
        return score or 0.0

    def _add(self, told: Told) -> None:
        """Adds the outcome of one point, and prints it under `--json`."""
        one = told.outcome
        self.outcomes.append(one)
        if told.error is not None:
            self.failures.append(told.error)
        facts = {"folder": str(one.folder), "overrides": list(one.point), "state": one.state, "score": one.score, "error": one.error}
        tell_answer(job=one.job, **facts, answer=told.answer)

    def _note_interrupted(self, interrupted: Interrupted, path: Path, status: Status) -> None:
        """Notes how to resume and the state of the run; a job that had not begun has no state, and one that left nothing has no folder."""
        resume = f"python -m dpx job=resume run={os.path.relpath(path)}"
        if self.is_sweep and self._is_draw and interrupted.done is not None:
            interrupted.how = f"{resume} resumes this trial, and then the same command with the sweep"
        elif self.is_sweep or self._job == "chain":
            interrupted.how = f"the same command resumes the {'sweep' if self.is_sweep else 'chain'}"
        elif interrupted.done is not None:
            interrupted.how = f"the same command resumes from there, and so does {resume}"
        if status.read().get("state") == "running" and not remove_if_new(path, self._job):
            with contextlib.suppress(OSError):
                status.write("interrupted", steps=interrupted.done)

    def _check_sweep(self, cfg: DictConfig, settings: Any, point: tuple[str, ...]) -> None:
        """Raises `ConfigError` for a recipe's own sweep as a point of another one, and for a second mesh in one process."""
        keys = {override.lstrip("+").partition("=")[0] for override in point}
        own = set(settings.sweeper.get("params") or {})
        if own and not own & keys:
            raise ConfigError(
                f"experiment={cfg.name}",
                "this recipe is a sweep, so it cannot be one point of another sweep",
                "Launch each sweep by itself",
            )
        require(
            cfg.get("tune") is None or Path(settings.runtime.output_dir).resolve().parent == Path(settings.sweep.dir).resolve(),
            f"hydra.sweep.subdir={settings.sweep.subdir}",
            "the trials of a search must be in the same folder as its study, which counts them",
            "Remove it",
        )
        mesh = OmegaConf.to_container(cfg.mesh) if OmegaConf.is_config(cfg.get("mesh")) else None
        if self._mesh not in (None, mesh):
            raise ConfigError(f"mesh={cfg.mesh.get('name')}", "one process can use one mesh only", "Launch each mesh by itself")
        self._mesh = mesh


class CloseStudy(Callback):
    """Hydra's callback at the end of a search, also if no trial was left: writes its statement and prints a table of all trials.

    Hydra creates it and turns its exceptions into warnings, so errors are added to `failures`, which `__main__` reads.
    """

    failures: ClassVar[list[Exception]] = []

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """`config` is the recipe's base point, Hydra's own node included."""
        try:
            self._close(config)
        except Exception as error:
            log.exception("the search could not be closed")
            self.failures.append(error)

    def _close(self, config: DictConfig) -> None:
        experiment, job = build(config)
        if experiment.tune is None or not isinstance(job, Train):
            return
        study = Study(Path(config.hydra.sweep.dir), experiment.name)
        # Optuna writes the best settings and score beside the runs; both depend on held-out rows.
        found = study.outputs / "optimization_results.yaml"
        if found.is_file():
            put_in_place(found, study.private / found.name)
        trials = study.close(experiment)
        if study.is_empty(experiment.tune):
            stage("the secret number of trials is 0, which tune.shape=.inf allows: nothing is trained and nothing is spent")
        shown = [Outcome(study.outputs / one.folder, one.point, one.state, one.score, one.error) for one in trials]
        sweep.show(shown, wide_console())
        sweep.write_table(shown, wide_console(), study.private / "trials.csv")


def _require_no_search(experiment: Experiment, job: str, is_sweep: bool) -> None:
    """Raises `ConfigError` if a search is declared, but the launched run would not be one of its trials."""
    require(
        experiment.tune is None or job != "train" or is_sweep,
        "tune",
        "a search is a sweep, but this command starts one run",
        "Launch it with -m, or remove the search with ~tune",
    )
    require(
        experiment.tune is None or job != "resume",
        "private/trial.json",
        "is missing, but this run began as a trial of a search",
        "Restore the file",
    )
    require(
        experiment.tune is None or not is_sweep,
        f"job={job} with tune",
        "code from another package may train in this job, but only job=train counts the trials of a search",
        "Use job=train, or remove the search with ~tune",
    )


def _check_noise(mechanism: Mechanism, overrides: tuple[str, ...]) -> None:
    """Raises `ConfigError` for noise settings with a mechanism that adds no noise: this mistake would lose the guarantee."""
    asked = [override for override in overrides if override.lstrip("+").startswith(("noise.", "noise="))]
    require(
        not asked or mechanism.is_private,
        ", ".join(asked),
        f"mechanism={mechanism.name} adds no noise and gives no guarantee",
        "Remove one of them",
    )


def _own_place(cfg: DictConfig, path: Path) -> tuple[DictConfig, Path]:
    """The config and folder of one point of a sweep. Under `repeat_and_select` a point that is drawn a second time is a second draw of the
    mechanism, with fresh noise: it runs again, as the next replicate. The result of the first is not reused."""
    if OmegaConf.select(cfg, "tune.charge") != "repeat_and_select":
        return cfg, path
    while path.exists() and any((path / "private" / name).exists() for name in ("ledger", "trial.json")):
        cfg = cfg.copy()
        OmegaConf.set_readonly(cfg, False)
        cfg.replicate += 1
        path = path.with_name(config.run_name(cfg))
    return cfg, path


def _require_read_by_chain(overrides: tuple[str, ...]) -> None:
    """Raises `ConfigError` for an override that no stage of a chain would read."""
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        fix = f"Write chain.common.values.{key}, chain.common.options.{key} or the same of a stage"
        reason = "the stages of a chain have their own configs, and none reads this"
        require(key.partition(".")[0].partition("@")[0] in _OF_A_CHAIN, override, reason, fix)


def _score(path: Path) -> float | None:
    """The headline held-out figure of a run that trained."""
    try:
        results = read_results(path / "private")
        score = results.heldout[results.metric]
        # A score that cannot be compared is not used.
        return score if math.isfinite(score) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _of_finished_run(cfg: DictConfig, overrides: list[str]) -> tuple[DictConfig, Path]:
    """The config and folder of the run that `cfg.run` names, under this command's job."""
    loaded, path = config.load(str(cfg.run))
    loaded.job = cfg.job
    for name in ("analysis", *NODES_OF_JOBS):
        if name in cfg:
            loaded[name] = cfg[name]
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        group = key.partition(".")[0]
        if group in _BESIDE_RUN:
            OmegaConf.update(loaded, key, OmegaConf.select(cfg, key), merge=False, force_add=True)
        elif group not in ("job", "run", "hydra", *NODES_OF_JOBS):
            raise ConfigError(override, f"the run {cfg.run} has its own config", f"Remove this override, or remove run={cfg.run}")
    return loaded, path
