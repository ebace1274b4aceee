"""Defers the imports of a command until Hydra has composed its config: a typing error or `--help` is answered without them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from dpx.launch.launcher import Launcher


class NothingLeft(BaseException):
    """Raised if a search has no trial left when it is launched. `config` is its base config, with Hydra's own node.

    It is not an `Exception`, which OmegaConf would wrap; it must end the launch, since Optuna fails if it draws no trial."""

    def __init__(self, config: DictConfig):
        super().__init__("all trials of the search are done")
        self.config = config


def register_resolvers() -> None:
    """Registers `${hydra_files:}` for Hydra's folder, and `${search_name:}`, `${search_storage:}` and `${trials_left:}` for a search
    (`dpx.launch.resolvers`).

    Further calls change nothing.
    """
    for name in ("hydra_files", "search_name", "search_storage", "trials_left"):

        def resolver(*, _root_: DictConfig, name: str = name) -> Any:
            return getattr(import_module("dpx.launch.resolvers"), name)(_root_)

        OmegaConf.register_new_resolver(name, resolver, replace=True)


class LateLauncher:
    """The launcher of this process (`dpx.launch.launcher`), made for the first job. `failures` also holds errors from before it."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.made: Launcher | None = None

    def __call__(self, cfg: DictConfig) -> float:
        """Runs one job of one config, as the launcher does."""
        return self.get()(cfg)

    def __reduce__(self) -> Any:
        # A launcher such as joblib pickles the function of the job: the other process gets the launcher itself.
        return self.get().__reduce__()

    def get(self) -> "Launcher":
        """Returns the launcher."""
        if self.made is None:
            from dpx.launch.launcher import CloseStudy, Launcher

            self.made = Launcher()
            self.made.failures = CloseStudy.failures = self.failures
        return self.made
