"""Whether a run has trained to its end: the same command then says so and touches nothing."""

import json
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from dpx import config
from dpx.launch.sweep import Status
from dpx.run_folder import read_json

# What a run leaves at its end; where one of them was taken away, the same command makes it again.
_LEFT = ("release/params", "release/privacy.json", "private/results.json")
JOBS = ("train", "resume")


def has_finished(folder: Path, plain: dict[str, Any]) -> bool:
    """Whether the run that the resolved config `plain` names stands finished in `folder`."""
    if not all((folder / name).exists() for name in _LEFT):
        return False
    if not any(Status(folder, job).read().get("state") == "finished" for job in JOBS):
        return False
    try:
        held = config.identity(cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(folder / "release" / "config.yaml"))))
    except Exception:
        return False
    # As YAML has it: a tuple is a list there.
    return held == config.identity(json.loads(json.dumps(plain, default=str)))


def say(folder: Path) -> None:
    """Holds the folder against its ledger, then shows what the run came to; raises `ConfigError` where its parts do not agree."""
    from dpx.claim import agreement
    from dpx.console import stage
    from dpx.job.train import show

    agreement.check(folder)
    results, claim = (read_json(folder / name) for name in ("private/results.json", "release/privacy.json"))
    stage("this run has finished; nothing was done. With replicate=1 it is run again, with fresh noise and a cost of its own.")
    show(results, claim, folder)
