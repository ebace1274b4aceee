"""One composed config, which runs as one job in one run folder, and what is refused before it runs.

A command whose folder holds a run of another config is told which keys differ and how to branch from that run.
"""

import contextlib
import logging
import math
import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dpx import config
from dpx.claim.search_record import different_keys
from dpx.config import build
from dpx.config.command_line import as_refused
from dpx.config.declared_tuning import Tune
from dpx.config.experiment import Experiment
from dpx.config.identity import identity
from dpx.config.instantiate import NODES_OF_JOBS
from dpx.declaration import ConfigError, require, several
from dpx.files.results import read_results
from dpx.files.run_folder import RunFolder, Status
from dpx.job.train import TRAINING, commit, has_finished, is_of, say_finished
from dpx.launch.refused import remove_if_new
from dpx.mechanism.mechanism_protocol import Mechanism
from dpx.processes import team
from dpx.processes.interruption import Interrupted
from dpx.processes.mesh import simulate_devices
from dpx.processes.place import require_processes
from dpx.statement import agreement

log = logging.getLogger("dpx")

# The only settings, in addition to `run=`, that may differ from the config of an existing run.
_BESIDE_RUN = ("mesh", "schedule", "microbatch")
# Where its values go is the choice of this command: the folder may come from somebody else.
_OF_THE_COMMAND = ("logger", "callbacks")
# Keys that a chain reads itself; every other belongs to a stage.
_OF_A_CHAIN = ("experiment", "base", "job", "chain", "name", "replicate", "point", "hydra", "list", "plan", "run")
# Jobs that compute no step; a plan counts with any mesh.
_WITHOUT_MESH = ("plan", "analyse")
# Overrides that name the folder of this run, and so do not belong to a branch of it.
_OF_THIS_FOLDER = ("hydra.run.dir", "fork", "run", "job")


class Point:
    """What Hydra composed: a config, its folder, its job by name, and the overrides of the command. Searches count some as trials.

    `is_left_alone` says that the folder holds a state that an error of this command does not change.
    """

    def __init__(self, cfg: DictConfig, settings: Any):
        self.cfg, self.path = cfg, Path(settings.runtime.output_dir)
        self.job, self.overrides = str(settings.runtime.choices.get("job")), tuple(settings.overrides.task)
        self.is_sweep = settings.mode == RunMode.MULTIRUN
        self.is_left_alone = self.is_trial = self.is_draw = False

    @property
    def status(self) -> Status:
        return Status(self.path, self.job)

    @property
    def fork(self) -> str | None:
        return self.cfg.get("fork")

    def require_alone(self) -> None:
        """Raises `ConfigError` in several processes for a job that one process does."""
        reason = f"is done by one process, and this job has {team().count}"
        fix = "Start one process for it; several are for job=train, resume and chain"
        require(team().is_alone or self.job in (*TRAINING, "chain"), f"job={self.job}", reason, fix)

    def require_read(self) -> None:
        """Raises `ConfigError` for an override that no stage of a chain reads."""
        for override in self.overrides if self.cfg.get("chain") is not None else ():
            key = override.lstrip("+~").partition("=")[0]
            fix = f"Write chain.common.values.{key}, chain.common.options.{key} or the same of a stage"
            reason = "the stages of a chain have their own configs, and none reads this"
            require(key.partition(".")[0].partition("@")[0] in _OF_A_CHAIN, override, reason, fix)

    def require_fits_sweep(self, settings: Any) -> None:
        """Raises `ConfigError` for a recipe's own sweep as a trial of a search, and for trials outside the folder of their study."""
        keys = {override.lstrip("+").partition("=")[0] for override in self.overrides}
        # A plan of a search is no trial.
        own, is_trial = set(settings.sweeper.get("params") or {}), self.cfg.get("tune") is not None and self.job != "plan"
        reason = "this recipe is a sweep, so it cannot be a trial of a search"
        require(not (is_trial and own) or bool(own & keys), f"experiment={self.cfg.get('name')}", reason, "Launch it by itself")
        require(
            not is_trial or Path(settings.runtime.output_dir).resolve().parent == Path(settings.sweep.dir).resolve(),
            f"hydra.sweep.subdir={settings.sweep.subdir}",
            "the trials of a search must be in the same folder as its study, which counts them",
            "Remove it",
        )

    def require_one_mesh(self, used: Any, settings: Any) -> Any:
        """Returns the mesh of this process, `used` by the points before. Raises `ConfigError` for another one, with the command that runs
        the points of this recipe. A job that computes no step uses none."""
        mesh: Any = OmegaConf.to_container(self.cfg.mesh) if OmegaConf.is_config(self.cfg.get("mesh")) else None
        if self.job in _WITHOUT_MESH:
            return used
        if used not in (None, mesh):
            own = {*(settings.sweeper.get("params") or {})} - {"mesh"}
            shared = [one for one in self.overrides if one.lstrip("+").partition("=")[0] not in own]
            reason = f"one process can use one mesh only, here {used['name']}"
            fix = f"Run these points by another command: {shlex.join(['python', '-m', 'dpx', *shared])}"
            raise ConfigError(f"mesh={mesh and mesh['name']}", reason, fix)
        return mesh

    def require_no_search(self, tune: Tune | None, trains: bool) -> None:
        """Raises `ConfigError` for a declared search of which this point would be no trial; `trains` says whether its job may train."""
        fix, is_sweep = "Launch it with -m, or remove the search with ~tune", self.is_sweep and trains
        is_one = tune is not None and self.job == "train" and not is_sweep
        require(not is_one, "tune", "a search is a sweep, but this command starts one run", fix)
        reason = "is missing, but this run began as a trial of a search"
        require(tune is None or self.job != "resume", "private/trial.json", reason, "Restore the file")
        reason = "code from another package may train in this job, but only job=train counts the trials of a search"
        fix = "Use job=train, or remove the search with ~tune"
        require(tune is None or not is_sweep, f"job={self.job} with tune", reason, fix)

    def is_done(self) -> bool:
        """Returns whether the run that this config names has finished, and then shows it. Takes the config and the folder of `run=`."""
        if self.cfg.run is not None:
            self.cfg, self.path = _of_finished_run(self.cfg, list(self.overrides))
        elif self.job not in TRAINING:
            require_same_run(self.cfg, self.path)
        folder = RunFolder(self.path)
        folder.require_no_links()
        if self.job not in TRAINING:
            return False
        if not self.is_sweep and has_finished(self.path, config.resolved(self.cfg)):
            self.is_left_alone = True
            say_finished(self.path)
            return True
        self.is_left_alone = True
        with folder.read_by_another():
            self.is_left_alone = False
        return False

    def built(self) -> tuple[Experiment, Any]:
        """Returns the declarations and the job of the config, which can run here and in this folder."""
        experiment, job = build(self.cfg)
        require(callable(job), f"job={self.cfg.get('job')}", "is not a job", "Choose one: python -m dpx --help lists them")
        # Only for new work: jobs on an existing run accept any config that it had.
        is_new = self.cfg.run is None
        if is_new:
            _check_noise(experiment.mechanism, self.overrides)
            if self.job in TRAINING and RunFolder(self.path).has_begun:
                require_same_claim(experiment.claim_checksum, self.cfg, self.path, self.overrides)
        require_processes(experiment.mesh, team().count)
        simulate_devices(experiment.mesh, experiment.mesh.simulated_here(team().count))
        if is_new:
            # Only now: it may import jax.
            experiment.require_new()
        elif self.job in TRAINING:
            # The loggers of a run that goes on are those of this command.
            experiment.logger.require_usable()
        return experiment, job

    def run(self, work: Callable[[RunFolder], None]) -> None:
        """Does the `work` of the job, and notes in the folder that it runs and that it has finished."""
        began, code, status = time.monotonic(), commit(), self.status
        status.write("running", pid=os.getpid(), commit=code)
        folder = RunFolder(self.path, OmegaConf.to_yaml(OmegaConf.create(config.resolved(self.cfg))), self.fork)
        work(folder)
        status.write("finished", seconds=round(time.monotonic() - began, 1), commit=code, score=score_of(self.path))

    def note_failed(self, error: Exception) -> str:
        """Notes the error in the folder, unless that is left alone, and returns it as text.

        A refused command that has not done anything leaves no folder.
        """
        refused = as_refused(error)
        if refused is not None and remove_if_new(self.path, self.job):
            return str(refused)
        log.exception("the job stopped")
        words = str(refused or f"{type(error).__name__}: {error}")
        # On a full disk the user must see this error, not that it could not be noted; it is also not written through a symbolic link.
        with contextlib.suppress(OSError, ConfigError):
            # A finished run that a search may not count has still finished, and a run that another process trains has not failed.
            if not self.is_left_alone:
                self.status.write("failed", error=words)
        return words

    def note_interrupted(self, interrupted: Interrupted) -> None:
        """Notes how to resume and the state of the run; a job that had not begun has no state, and one that left nothing has no folder."""
        resume = f"python -m dpx job=resume run={os.path.relpath(self.path)}"
        if self.is_sweep and self.is_draw and interrupted.done is not None:
            interrupted.how = f"{resume} resumes this trial, and then the same command with the sweep"
        elif self.is_sweep or self.job == "chain":
            interrupted.how = f"the same command resumes the {'sweep' if self.is_sweep else 'chain'}"
        elif interrupted.done is not None:
            interrupted.how = f"the same command resumes from there, and so does {resume}"
        if self.status.read().get("state") == "running" and not remove_if_new(self.path, self.job):
            with contextlib.suppress(OSError):
                self.status.write("interrupted", steps=interrupted.done)


def score_of(path: Path) -> float | None:
    """Returns the headline held-out figure of a run that trained."""
    try:
        results = read_results(path / "private")
        score = results.heldout[results.metric]
        # A score that cannot be compared is not used.
        return score if math.isfinite(score) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_noise(mechanism: Mechanism, overrides: tuple[str, ...]) -> None:
    """Raises `ConfigError` for noise settings with a mechanism that adds no noise: this mistake would lose the guarantee."""
    asked = [override for override in overrides if override.lstrip("+").startswith(("noise.", "noise="))]
    require(
        not asked or mechanism.is_private,
        ", ".join(asked),
        f"mechanism={mechanism.name} adds no noise and gives no guarantee",
        "Remove one of them",
    )


def _of_finished_run(cfg: DictConfig, overrides: list[str]) -> tuple[DictConfig, Path]:
    """Returns the config and folder of the run that `cfg.run` names, under this command's job."""
    loaded, path = config.load(str(cfg.run))
    loaded.job = cfg.job
    for name in ("analysis", *_OF_THE_COMMAND, *NODES_OF_JOBS):
        if name in cfg:
            loaded[name] = cfg[name]
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        group = key.partition(".")[0]
        if group in _BESIDE_RUN:
            OmegaConf.update(loaded, key, OmegaConf.select(cfg, key), merge=False, force_add=True)
        elif group not in ("job", "run", "hydra", *_OF_THE_COMMAND, *NODES_OF_JOBS):
            raise ConfigError(override, f"the run {cfg.run} has its own config", f"Remove this override, or remove run={cfg.run}")
    return loaded, path


def require_same_run(cfg: DictConfig, path: Path) -> None:
    """Raises `ConfigError` if a job that does not train would read the run in `path` with another config than the run's."""
    require(
        not RunFolder(path).has_begun or is_of(path, config.resolved(cfg)),
        path,
        "contains a run with another config",
        f"To use that run with its own config, give run={os.path.relpath(path)}",
    )


def require_same_claim(claim: str, cfg: DictConfig, path: Path, overrides: tuple[str, ...]) -> None:
    """Raises `ConfigError` if training would continue the run in `path` under a declaration with another checksum than `claim`.

    `overrides` are those of the command. The message names the keys that differ, and a command that branches from the newest checkpoint
    into a new folder.
    """
    held = config.read(config.place_of(path))
    if build(held)[0].claim_checksum == claim:
        return
    before = identity(cast(dict[str, Any], OmegaConf.to_container(held)))
    differing = different_keys(before, identity(config.resolved(cfg)))
    changed = several(sorted(key for key in differing if not {"name", "schedule"} & set(key.split("."))), most=6)
    steps = [int(one.name) for one in (path / "private" / agreement.CHECKPOINTS).glob("[0-9]*") if one.name.isdigit()]
    own = [shlex.quote(one) for one in overrides if one.lstrip("+~").partition("=")[0] not in _OF_THIS_FOLDER]
    branch = " ".join(["python -m dpx", *own, shlex.quote(f"fork={os.path.relpath(path)}@{max(steps, default=0)}")])
    fix = f"Restore it, or branch into a new folder: {branch}" if steps else "Restore it, or give another hydra.run.dir"
    require(False, path, f"holds a run with another config: {changed} differ", fix)
