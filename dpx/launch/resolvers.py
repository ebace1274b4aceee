"""Resolvers for Hydra's own node in dpx's YAML: the folder of its files, the storage of a search, and the trials that are
left."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from dpx import config
from dpx.claim.study import Study, check_charge
from dpx.config.experiment import require_name
from dpx.declaration import require
from dpx.files.run_folder import RunFolder
from dpx.job.train import TRAINING, has_ended
from dpx.launch import search
from dpx.launch.late import NothingLeft


def hydra_files(root: DictConfig) -> str | None:
    """Returns the folder, below the run's, where Hydra stores the composed config.

    It is `None` for a finished run, which must not change. Hydra resolves it before it writes there, so the private folder is made here.
    Raises `ConfigError` if the run's folder contains a symbolic link.
    """
    place = OmegaConf.select(root, "hydra.runtime.output_dir", throw_on_missing=False)
    if place is None:
        return "private/hydra"
    folder = RunFolder(Path(place))
    folder.require_no_links()
    if _job(root) in TRAINING and has_ended(folder.path):
        return None
    folder.made_private()
    return "private/hydra"


def _job(root: DictConfig) -> str:
    """Returns the job that a config chooses, as the name of its option."""
    return str(OmegaConf.select(root, "hydra.runtime.choices.job", default="train"))


def search_name(root: DictConfig) -> str:
    """Returns the name of the search, which is a part of paths. A recipe may have set it to something else than a name."""
    name = str(root.name)
    require_name(name)
    return name


def search_storage(root: DictConfig) -> str | None:
    """Returns the storage of Optuna's trials; `None` if the trials are not stored.

    They are not stored for independent trials, since settings can be added to a stored study by hand, and for a job that does not train,
    such as a plan, whose result is not useful to Optuna.
    """
    if OmegaConf.select(root, "tune.charge") == "repeat_and_select" or _job(root) != "train":
        return None
    return f"sqlite:///{root.hydra.sweep.dir}/studies/{search_name(root)}/private/optuna.db"


def trials_left(root: DictConfig) -> int:
    """Returns the number of trials that the recipe's study still has to begin: a search launched again continues up to its number, not
    beyond.

    The distribution and the secret number of a `repeat_and_select` are fixed here.
    """
    node = config.resolved(OmegaConf.create({"tune": root.get("tune")}))["tune"]
    require(node is not None, "hydra/sweeper=search", "the config declares no search", "Add tune=search")
    tune = config.make(node, "tune")
    # Checked before the first trial, not at each one.
    check_charge(root.hydra.sweeper, tune)
    if _job(root) != "train":
        return tune.trials
    study = Study(Path(root.hydra.sweep.dir), search_name(root))
    if tune.charge == "repeat_and_select":
        study.settle(tune, search.declared(root))
    left = study.left(tune)
    if not left:
        raise NothingLeft(root)
    return left
