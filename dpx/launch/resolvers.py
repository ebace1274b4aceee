"""What Hydra's own node of dpx's YAML may ask for: where its files go, and how many trials a search has left."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from dpx import config
from dpx.declaration import ConfigError, require
from dpx.launch.finished import JOBS, has_finished
from dpx.one_process import require_one_process
from dpx.tuning.study import Study, check_charge


def register_resolvers() -> None:
    """`${hydra_files:}` for Hydra's folder and `${trials_left:}` for a search; safe to call twice."""
    OmegaConf.register_new_resolver("hydra_files", lambda *, _root_: _hydra_files(_root_), replace=True)
    OmegaConf.register_new_resolver("trials_left", lambda *, _root_: _trials_left(_root_), replace=True)


def _hydra_files(root: DictConfig) -> str | None:
    """Where Hydra keeps what it composed, below the run's folder; nowhere for a run that has finished, which nothing may touch, and for one
    that is refused in one of several processes."""
    place = OmegaConf.select(root, "hydra.runtime.output_dir", throw_on_missing=False)
    if place is None or OmegaConf.select(root, "hydra.runtime.choices.job", default="train") not in JOBS:
        return "private/hydra"
    try:
        require_one_process()
    except ConfigError:
        return None
    try:
        return None if has_finished(Path(place), config.resolved(root)) else "private/hydra"
    except ConfigError:
        return "private/hydra"


def _trials_left(root: DictConfig) -> int:
    """What the recipe's study still has to begin: a search launched again goes on to its number, not past it."""
    node = config.resolved(OmegaConf.create({"tune": root.get("tune")}))["tune"]
    require(node is not None, "hydra/sweeper=search", "no search is declared", "Add tune=search")
    tune = config.make(node, "tune")
    # Before the first trial, not at each.
    check_charge(root.hydra.sweeper, tune)
    return Study(Path(root.hydra.sweep.dir), root.name).left(tune)
