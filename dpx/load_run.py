"""A finished run, loaded from Python: its declaration, its parameters and its claim."""

import dataclasses
from pathlib import Path
from typing import Any

from dpx import config
from dpx.claim.seals import STATEMENT
from dpx.declaration import require
from dpx.experiment import Experiment
from dpx.run_folder import read_json


@dataclasses.dataclass(frozen=True)
class Loaded:
    """`params` is the nested dict of the model's `parameter_shapes`; `privacy` the run's `privacy.json`.

    `is_checked`: whether the release was compared with the run's ledger, which a copy of `release/` alone comes without.
    """

    experiment: Experiment
    params: Any
    privacy: dict[str, Any]
    is_checked: bool


def load(run: str | Path) -> Loaded:
    """The run in folder `run`, or of that experiment name; raises `ConfigError` where it released no parameters, their
    statement is gone, or its parts disagree."""
    cfg, path = config.load(str(run))
    require((path / "release" / "params").exists(), f"run={path}", "holds no released parameters", "Let it train to its end")
    require((path / "release" / STATEMENT).exists(), f"run={path}", "holds no statement", f"Restore its release/{STATEMENT}")
    from dpx.claim import agreement
    from dpx.training.checkpoint import released

    is_checked = agreement.check(path) is not None
    experiment, _ = config.build(cfg)
    params, privacy = released(path / "release" / "params"), read_json(path / "release" / STATEMENT)
    return Loaded(experiment, params, privacy, is_checked)
