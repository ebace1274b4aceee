"""What Hydra's own node of dpx's YAML may ask for: where its files go, what a search stores, and how many trials it has left."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from dpx import config
from dpx.declaration import ConfigError, require
from dpx.launch import search_space
from dpx.launch.finished import JOBS, has_finished
from dpx.one_process import require_one_process
from dpx.run_folder import RunFolder
from dpx.tuning.study import Study, check_charge


def register_resolvers() -> None:
    """`${hydra_files:}` for Hydra's folder, `${search_storage:}` and `${trials_left:}` for a search; safe to call twice."""
    OmegaConf.register_new_resolver("hydra_files", lambda *, _root_: _hydra_files(_root_), replace=True)
    OmegaConf.register_new_resolver("search_storage", lambda *, _root_: _search_storage(_root_), replace=True)
    OmegaConf.register_new_resolver("trials_left", lambda *, _root_: _trials_left(_root_), replace=True)


def _hydra_files(root: DictConfig) -> str | None:
    """Where Hydra keeps what it composed, below the run's folder; nowhere for a run that has finished, which nothing may touch, and for one
    that is refused in one of several processes.

    Hydra asks for it before it writes there: the private folder is then made. Raises `ConfigError` where a symbolic link lies in the run's
    folder."""
    place = OmegaConf.select(root, "hydra.runtime.output_dir", throw_on_missing=False)
    if place is None:
        return "private/hydra"
    if _job(root) in JOBS and not _is_one_process():
        return None
        return "private/hydra"
    folder = RunFolder(Path(place))
    folder.require_no_links()
    if _job(root) in JOBS and _has_finished(root, folder):
        return None
    folder.made_private()
    return "private/hydra"


def _is_one_process() -> bool:
    try:
        require_one_process()
    except ConfigError:
        return False
    return True


def _has_finished(root: DictConfig, folder: RunFolder) -> bool:
    try:
        return has_finished(folder.path, config.resolved(root))
    except ConfigError:
        return False


def _job(root: DictConfig) -> str:
    """The job that a config chooses, by its option's name."""
    return str(OmegaConf.select(root, "hydra.runtime.choices.job", default="train"))


class NothingLeft(BaseException):
    """A search has no trial left when it is launched. `config` is its base config, with Hydra's own node.

    It is not an `Exception`: OmegaConf would wrap it, and it has to end the launch, since Optuna fails where it draws no trial."""

    def __init__(self, config: DictConfig):
        super().__init__("the search has had all its trials")
        self.config = config


def _search_storage(root: DictConfig) -> str | None:
    """Where Optuna stores its trials. `None` for independent trials, since settings can be put into a stored study by hand, and for a job
    that trains nothing, such as a plan, from which there is nothing to learn."""
    if OmegaConf.select(root, "tune.charge") == "repeat_and_select" or _job(root) != "train":
        return None
    return f"sqlite:///{root.hydra.sweep.dir}/studies/{root.name}/private/optuna.db"


def _trials_left(root: DictConfig) -> int:
    """What the recipe's study still has to begin: a search launched again goes on to its number, not past it. What a `repeat_and_select`
    draws, and its secret number, are settled here."""
    node = config.resolved(OmegaConf.create({"tune": root.get("tune")}))["tune"]
    require(node is not None, "hydra/sweeper=search", "no search is declared", "Add tune=search")
    tune = config.make(node, "tune")
    # Before the first trial, not at each.
    check_charge(root.hydra.sweeper, tune)
    if _job(root) != "train":
        return tune.trials
    study = Study(Path(root.hydra.sweep.dir), root.name)
    if tune.charge == "repeat_and_select":
        study.settle(tune, search_space.declared(root))
    left = study.left(tune)
    if not left:
        raise NothingLeft(root)
    return left
