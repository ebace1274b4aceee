"""A finished run as a library sees it: what was declared, what was learnt, what is claimed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from dpx import config
from dpx.declaration import require
from dpx.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class Loaded:
    """`params` is the nested dict of the model's `parameter_shapes`; `privacy` the run's `privacy.json`."""

    experiment: Experiment
    params: Any
    privacy: dict[str, Any]


def load(run: str | Path) -> Loaded:
    """The run in folder `run`, or of that experiment name; raises `Refused` where it released no parameters."""
    cfg, path = config.load(str(run))
    require((path / "release" / "params").exists(), f"run={path}", "holds no released parameters", "Let it train to its end")
    from dpx.training.checkpoint import released

    experiment, _ = config.build(cfg)
    return Loaded(experiment, released(path / "release" / "params"), json.loads((path / "release" / "privacy.json").read_text()))
