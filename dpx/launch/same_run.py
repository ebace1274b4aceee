"""Refuses a command whose folder holds a run of another config, and says which keys differ and how to branch from that run."""

import os
import shlex
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from dpx import config
from dpx.claim.calibration import claim_checksum
from dpx.config import build
from dpx.config.experiment import Experiment
from dpx.config.identity import identity
from dpx.declaration import require, several
from dpx.files.run_folder import RunFolder
from dpx.job import finished
from dpx.statement import agreement

# Overrides that name the folder of this run, and so do not belong to a branch of it.
_OF_THIS_FOLDER = ("hydra.run.dir", "fork", "run", "job")


def require_same_run(cfg: DictConfig, path: Path) -> None:
    """Raises `ConfigError` if a job that does not train would read the run in `path` with another config than the run's."""
    require(
        not RunFolder(path).has_begun or finished.is_of(path, config.resolved(cfg)),
        path,
        "contains a run with another config",
        f"To use that run with its own config, give run={os.path.relpath(path)}",
    )


def require_same_claim(experiment: Experiment, cfg: DictConfig, path: Path, overrides: tuple[str, ...]) -> None:
    """Raises `ConfigError` if training would continue the run in `path` under another declaration; `overrides` are those of the command.

    The message names the keys that differ, and a command that branches from the newest checkpoint into a new folder.
    """
    if not RunFolder(path).has_begun:
        return
    held = config.read(config.place_of(path))
    if claim_checksum(build(held)[0]) == claim_checksum(experiment):
        return
    before = identity(cast(dict[str, Any], OmegaConf.to_container(held)))
    changed = several(sorted(_differing(before, identity(config.resolved(cfg)), "")), most=6)
    steps = [int(one.name) for one in (path / "private" / agreement.CHECKPOINTS).glob("[0-9]*") if one.name.isdigit()]
    own = [shlex.quote(one) for one in overrides if one.lstrip("+~").partition("=")[0] not in _OF_THIS_FOLDER]
    branch = " ".join(["python -m dpx", *own, shlex.quote(f"fork={os.path.relpath(path)}@{max(steps, default=0)}")])
    fix = f"Restore it, or branch into a new folder: {branch}" if steps else "Restore it, or give another hydra.run.dir"
    require(False, path, f"holds a run with another config: {changed} differ", fix)


def _differing(one: Any, other: Any, path: str) -> list[str]:
    """Returns the dotted keys whose values differ."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return [path] if one != other else []
    keys = [key for key in (*one, *(key for key in other if key not in one)) if key not in ("name", "schedule")]
    return [found for key in keys for found in _differing(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))]
