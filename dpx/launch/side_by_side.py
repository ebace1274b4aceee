"""Runs the points of a sweep side by side, each in a process of this machine: `hydra/launcher=processes`, and `joblib`.

A point whose process is killed is a failed point, and the others go on. Each process holds the reading end of a pipe whose only writer is
the command: it ends as soon as the command is gone, however that ended.
"""

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobRuntime, run_job, setup_globals
from hydra.plugins.launcher import Launcher as HydraLauncher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from dpx import config
from dpx.config.with_hydra import set_up_hydra
from dpx.declaration import require
from dpx.durable import make_folder
from dpx.launch.elsewhere import Command, composed
from dpx.launch.late import register_resolvers
from dpx.launch.launcher import Launcher
from dpx.launch.refused import log_uncaught
from dpx.processes import interruption
from dpx.processes.supervisor import end_with, how_ended

_PROGRAM = ("-m", "dpx.launch.side_by_side")
# How often the command looks whether a process has ended.
_SECONDS = 0.05


class Processes(HydraLauncher):
    """Hydra's launcher. `launcher` runs a point, and is pickled for each process."""

    launcher: ClassVar[Launcher]

    def __init__(self, n_jobs: int = 2):
        self._most = n_jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Takes what Hydra gives; `task_function` runs `launcher` in this process, and is not used."""
        del task_function
        self._context, self._config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs all points and returns their scores, in the order of `job_overrides`."""
        reason = "is not a number of points that can run at once"
        require(self._most >= 1, f"hydra.launcher.n_jobs={self._most}", reason, "Use 1 or more")
        setup_globals()
        make_folder(Path(str(self._config.hydra.sweep.dir)))
        command = self.launcher.elsewhere()
        waiting = [*enumerate(job_overrides, initial_job_idx)]
        running: dict[int, _Point] = {}
        returned: dict[int, JobReturn] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self._most:
                    number, overrides = waiting.pop(0)
                    running[number] = _Point(composed(self._context, self._config, number, overrides), self._payload)
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
        return pickle.dumps((JobRuntime.instance().get("name"), loader, callbacks, self.launcher, point))


class _Point:
    """One point, and the process that runs it."""

    def __init__(self, config: DictConfig, payload: Any):
        self._config = config
        # In a new process group, so that a terminal's Ctrl-C arrives once, from the command.
        self._process = subprocess.Popen([sys.executable, *_PROGRAM], stdin=subprocess.PIPE, process_group=0)
        assert self._process.stdin is not None
        # One that ended at once is found like any other that ended.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(payload(config))
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


def main() -> None:
    """Runs the point that the command writes to standard input, and ends when the command is gone."""
    logging.raiseExceptions = False
    log_uncaught()
    interruption.install()
    try:
        _run()
    except interruption.Interrupted as interrupted:
        sys.exit(interrupted.exit_code)
    finally:
        interruption.release()


def _run() -> None:
    config.register_resolvers()
    register_resolvers()
    set_up_hydra()
    name, loader, callbacks, launcher, point = pickle.load(sys.stdin.buffer)
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    threading.Thread(target=end_with, args=(lifeline,), daemon=True, name="lifeline").start()
    GlobalHydra.instance().initialize(Hydra(name, loader))
    run_job(launcher, point, "hydra.sweep.dir", "hydra.sweep.subdir", HydraContext(config_loader=loader, callbacks=callbacks))


if __name__ == "__main__":
    main()
