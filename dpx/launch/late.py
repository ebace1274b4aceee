"""Defers the imports of a command until Hydra has composed its config: a typing error or `--help` is answered without them.

What Hydra makes for `hydra/launcher=` are launchers whose killed points are failed rows; each imports what it needs when it is chosen.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from dpx.config.hydra_version import register_resolver
from dpx.declaration import require

if TYPE_CHECKING:
    from dpx.launch.sweep import Sweep

_JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
_BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
_SUBMITIT = "hydra_plugins.hydra_submitit_launcher.submitit_launcher"


def register_resolvers() -> None:
    """Registers `${hydra_files:}` for Hydra's folder, and `${search_name:}`, `${search_storage:}` and `${trials_left:}` for a search
    (`dpx.launch.search`).

    Further calls change nothing.
    """
    for name in ("hydra_files", "search_name", "search_storage", "trials_left"):

        def resolver(*, _root_: DictConfig, name: str = name) -> Any:
            return getattr(import_module("dpx.launch.search"), name)(_root_)

        register_resolver(name, resolver)


class LateSweep:
    """The sweep of this process (`dpx.launch.sweep`), made for the first point. `failures` also holds errors from before it."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.made: Sweep | None = None

    def __call__(self, cfg: DictConfig) -> float:
        """Runs one point, as the sweep does."""
        return self.get()(cfg)

    def __reduce__(self) -> Any:
        # A launcher such as joblib pickles the function of the job: the other process gets the sweep itself.
        return self.get().__reduce__()

    def get(self) -> "Sweep":
        """Returns the sweep."""
        if self.made is None:
            from dpx.launch.search import CloseStudy
            from dpx.launch.sweep import Sweep

            self.made = Sweep()
            self.made.failures = CloseStudy.failures = self.failures
        return self.made

    def show(self) -> None:
        """Shows the sweep; one that was refused before its first point leaves no file."""
        if self.made is not None:
            self.made.show()
            return
        from dpx.launch.refused import remove_sweep_if_new

        remove_sweep_if_new()


_sweep: LateSweep | None = None


def register_launchers(sweep: LateSweep) -> None:
    """Lets the launchers of other processes run the points of `sweep`, and Hydra's basic sweeper expand several recipes."""
    global _sweep
    _sweep = sweep
    # Hydra instantiates launchers of the package hydra_plugins alone, and finds what stands for one by its module and name.
    made: dict[str, Any] = {"hydra_plugins.dpx_processes.Processes": processes, _JOBLIB: _as_joblib}
    made[_BASIC] = _of_recipes
    made |= {f"{_SUBMITIT}.LocalLauncher": _on_this_machine, f"{_SUBMITIT}.SlurmLauncher": _by_slurm}
    Plugins.instance().class_name_to_class.update(made)


def _of_recipes(**settings: Any) -> Any:
    """Returns what stands for Hydra's basic sweeper (`dpx.launch.recipe_sweeper`)."""
    from dpx.launch.recipe_sweeper import RecipeSweeper

    return RecipeSweeper(**settings)


def processes(**settings: Any) -> Any:
    """Returns the launcher of `hydra/launcher=processes` (`dpx.launch.side_by_side`)."""
    from dpx.launch.side_by_side import Processes

    assert _sweep is not None
    Processes.sweep = _sweep.get()
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
    """Returns the launcher of `hydra/launcher=submitit_local` (`dpx.launch.side_by_side`)."""
    return _submitted("LocalLauncher", settings)


def _by_slurm(**settings: Any) -> Any:
    """Returns the launcher of `hydra/launcher=slurm` and `submitit_slurm`."""
    return _submitted("SlurmLauncher", settings)


def _submitted(name: str, settings: dict[str, Any]) -> Any:
    from dpx.launch.side_by_side import Submitted

    assert _sweep is not None
    return Submitted(name, _sweep.get(), settings)
