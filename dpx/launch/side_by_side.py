"""Runs the points of a sweep side by side, each in a process of this machine: `hydra/launcher=processes`, and `joblib`.

A point whose process is killed is a failed point, and the others go on. Each process holds the reading end of a pipe whose only writer is
the command: it ends as soon as the command is gone, however that ended.

`hydra/launcher=submitit_local` and `slurm` run the points as jobs of submitit, on this machine or of Slurm: one that ends without a result
is a failed point. Hydra's plugin would end the command at the first such job, with a traceback, while the other jobs go on.
"""

import contextlib
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobRuntime, setup_globals
from hydra.plugins.launcher import Launcher as HydraLauncher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from dpx.declaration import require
from dpx.durable import make_folder
from dpx.launch.sweep import Command, Sweep, composed
from dpx.processes import interruption
from dpx.processes.supervisor import how_ended

# `run_point` there.
_PROGRAM = ("-m", "dpx.launch.command")
# How often the command looks whether a process has ended.
_SECONDS = 0.05
_PLUGIN = "hydra_plugins.hydra_submitit_launcher."
# States of a job that say nothing of why it has no result.
_PLAIN = ("FINISHED", "COMPLETED", "UNKNOWN")


class Processes(HydraLauncher):
    """Hydra's launcher. `sweep` runs a point, and is pickled for each process."""

    sweep: ClassVar[Sweep]

    def __init__(self, n_jobs: int = 2):
        self._most = n_jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Takes what Hydra gives; `task_function` runs `sweep` in this process, and is not used."""
        del task_function
        self._context, self._config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs all points and returns their scores, in the order of `job_overrides`."""
        reason = "is not a number of points that can run at once"
        require(self._most >= 1, f"hydra.launcher.n_jobs={self._most}", reason, "Use 1 or more")
        setup_globals()
        make_folder(Path(str(self._config.hydra.sweep.dir)))
        command = self.sweep.elsewhere()
        waiting = [*enumerate(job_overrides, initial_job_idx)]
        running: dict[int, _Point] = {}
        returned: dict[int, JobReturn] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self._most:
                    number, overrides = waiting.pop(0)
                    cfg = composed(self._context, self._config, number, overrides)
                    running[number] = _Point(cfg, self._payload(cfg))
                time.sleep(_SECONDS)
                for number, point in [(number, point) for number, point in running.items() if point.has_ended()]:
                    returned[number] = point.returned(command)
                    del running[number]
        except BaseException as error:
            for point in running.values():
                point.end_after(error)
            if isinstance(error, interruption.Interrupted):
                error.how = "the same command resumes the sweep"
            else:
                for point in running.values():
                    point.returned(command)
            raise
        return [returned[number] for number in sorted(returned)]

    def _payload(self, point: DictConfig) -> bytes:
        loader, callbacks = self._context.config_loader, self._context.callbacks
        return pickle.dumps((JobRuntime.instance().get("name"), loader, callbacks, self.sweep, point))


class _Point:
    """One point, and the process that runs it."""

    def __init__(self, config: DictConfig, payload: bytes):
        self._config = config
        # In a new process group, so that a terminal's Ctrl-C arrives once, from the command.
        self._process = subprocess.Popen([sys.executable, *_PROGRAM], stdin=subprocess.PIPE, process_group=0)
        assert self._process.stdin is not None
        # One that ended at once is found like any other that ended.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(payload)
            self._process.stdin.flush()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end_after(self, error: BaseException) -> None:
        """Waits for the process: after a signal, which it is handed, it saves first; after an error it ends as if the command were gone."""
        number = interruption.received()
        if not isinstance(error, interruption.Interrupted):
            self._close()
        elif number is not None and not self.has_ended():
            self._process.send_signal(number)
        self._process.wait()
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]

    def returned(self, command: Command) -> JobReturn:
        """Returns what Hydra wants to know of a point that has ended; a process that told nothing has failed."""
        self._close()
        return command.returned(self._config, how_ended(self._process.returncode))


class Submitted(HydraLauncher):
    """Hydra's launcher. `name` is that of the plugin's, `LocalLauncher` or `SlurmLauncher`, which each job pickles and calls."""

    def __init__(self, name: str, sweep: Sweep, settings: dict[str, Any]):
        plugin: Any = import_module(_PLUGIN + "submitit_launcher")
        self._job: Any = getattr(plugin, name)(**settings)
        self._sweep = sweep

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Takes what Hydra gives."""
        self._job.setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self._context, self._config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submits all points, waits for them, and returns their scores, in the order of `job_overrides`."""
        make_folder(Path(str(self._config.hydra.sweep.dir)))
        numbers = range(initial_job_idx, initial_job_idx + len(job_overrides))
        command, count = self._sweep.elsewhere(), len(numbers)
        ids, states = [f"job_id_for_{number}" for number in numbers], [Singleton.get_state()] * count
        # submitit's executor with the plugin's settings.
        kind, settings = self._job._EXECUTOR, dict(self._job.params)
        first = {"folder": settings.pop("submitit_folder")}
        if (restarts := settings.pop("max_num_timeout", None)) is not None:
            first[f"{kind}_max_num_timeout"] = restarts
        executor = import_module("submitit").AutoExecutor(cluster=kind, **first)
        of_all = set(OmegaConf.structured(import_module(_PLUGIN + "config").BaseQueueConf).keys())
        executor.update_parameters(**{key if key in of_all else f"{kind}_{key}": value for key, value in settings.items()})

        jobs = executor.map_array(self._job, list(map(list, job_overrides)), ["hydra.sweep.dir"] * count, numbers, ids, states)
        found = []
        for job, number, overrides in zip(jobs, numbers, job_overrides, strict=True):
            point = composed(self._context, self._config, number, overrides)
            job.wait()
            how = "without a result" if job.state in _PLAIN else job.state.lower().replace("_", " ")
            found.append(command.returned(point, how))
        return found
