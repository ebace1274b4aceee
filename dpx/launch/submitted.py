"""Runs the points of a sweep as jobs of submitit, on this machine or of Slurm: one that ends without a result is a failed point.

Hydra's plugin would end the command at the first such job, with a traceback, while the other jobs go on.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher as HydraLauncher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from dpx.durable import make_folder
from dpx.launch.elsewhere import composed
from dpx.launch.launcher import Launcher

_PLUGIN = "hydra_plugins.hydra_submitit_launcher."
# States that say nothing of why a job has no result.
_PLAIN = ("FINISHED", "COMPLETED", "UNKNOWN")


class Submitted(HydraLauncher):
    """Hydra's launcher. `name` is that of the plugin's, `LocalLauncher` or `SlurmLauncher`, which each job pickles and calls."""

    def __init__(self, name: str, launcher: Launcher, settings: dict[str, Any]):
        plugin: Any = import_module(_PLUGIN + "submitit_launcher")
        self._job: Any = getattr(plugin, name)(**settings)
        self._launcher = launcher

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Takes what Hydra gives."""
        self._job.setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self._context, self._config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submits all points, waits for them, and returns their scores, in the order of `job_overrides`."""
        make_folder(Path(str(self._config.hydra.sweep.dir)))
        numbers = range(initial_job_idx, initial_job_idx + len(job_overrides))
        command, count = self._launcher.elsewhere(), len(numbers)
        ids, states = [f"job_id_for_{number}" for number in numbers], [Singleton.get_state()] * count
        jobs = self._executor().map_array(self._job, list(map(list, job_overrides)), ["hydra.sweep.dir"] * count, numbers, ids, states)
        found = []
        for job, number, overrides in zip(jobs, numbers, job_overrides, strict=True):
            point = composed(self._context, self._config, number, overrides)
            job.wait()
            how = "without a result" if job.state in _PLAIN else job.state.lower().replace("_", " ")
            found.append(command.returned(point, how))
        return found

    def _executor(self) -> Any:
        """Returns submitit's executor with the plugin's settings."""
        kind, settings = self._job._EXECUTOR, dict(self._job.params)
        first = {"folder": settings.pop("submitit_folder")}
        if (restarts := settings.pop("max_num_timeout", None)) is not None:
            first[f"{kind}_max_num_timeout"] = restarts
        executor = import_module("submitit").AutoExecutor(cluster=kind, **first)
        of_all = set(OmegaConf.structured(import_module(_PLUGIN + "config").BaseQueueConf).keys())
        executor.update_parameters(**{key if key in of_all else f"{kind}_{key}": value for key, value in settings.items()})
        return executor
