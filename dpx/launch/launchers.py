"""What Hydra makes for `hydra/launcher=`: launchers whose killed points are failed rows. Imports what they need when one is chosen."""

from importlib import import_module
from typing import Any

from hydra.core.plugins import Plugins

from dpx.declaration import require
from dpx.launch.late import LateLauncher

_JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
_SUBMITIT = "hydra_plugins.hydra_submitit_launcher.submitit_launcher"

_launcher: LateLauncher | None = None


def register_launchers(launcher: LateLauncher) -> None:
    """Lets the launchers of other processes run the points of `launcher`."""
    global _launcher
    _launcher = launcher
    # Hydra instantiates launchers of the package hydra_plugins alone, and finds what stands for one by its module and name.
    made: dict[str, Any] = {"hydra_plugins.dpx_processes.Processes": processes, _JOBLIB: _as_joblib}
    made |= {f"{_SUBMITIT}.LocalLauncher": _on_this_machine, f"{_SUBMITIT}.SlurmLauncher": _by_slurm}
    Plugins.instance().class_name_to_class.update(made)


def processes(**settings: Any) -> Any:
    """Returns the launcher of `hydra/launcher=processes` (`dpx.launch.side_by_side`)."""
    from dpx.launch.side_by_side import Processes

    assert _launcher is not None
    Processes.launcher = _launcher.get()
    return Processes(**settings)


def _as_joblib(n_jobs: int = -1, **settings: Any) -> Any:
    """Returns the same for `hydra/launcher=joblib`: where one worker of joblib's pool is killed, joblib ends all others and loses their
    points.

    Raises `ConfigError` for settings of that pool, which would have no effect.
    """
    default = import_module("hydra_plugins.hydra_joblib_launcher.config").JobLibLauncherConf
    for name, value in settings.items():
        reason = "has no effect: dpx starts a process for each point, and no pool of joblib"
        require(value == getattr(default, name, None), f"hydra.launcher.{name}={value}", reason, "Remove it")
    reason = "is not a number of points that can run at once"
    require(n_jobs != 0, "hydra.launcher.n_jobs=0", reason, "Use 1 or more, or -1 for all processors")
    return processes(n_jobs=import_module("joblib").effective_n_jobs(n_jobs))


# Hydra makes what it finds under a name of a module.
def _on_this_machine(**settings: Any) -> Any:
    """Returns the launcher of `hydra/launcher=submitit_local` (`dpx.launch.submitted`)."""
    return _submitted("LocalLauncher", settings)


def _by_slurm(**settings: Any) -> Any:
    """Returns the launcher of `hydra/launcher=slurm` and `submitit_slurm`."""
    return _submitted("SlurmLauncher", settings)


def _submitted(name: str, settings: dict[str, Any]) -> Any:
    from dpx.launch.submitted import Submitted

    assert _launcher is not None
    return Submitted(name, _launcher.get(), settings)
