"""Whether a run has trained to its end: the same command then says so and touches nothing."""

from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from dpx import config
from dpx.claim.seals import STATEMENT
from dpx.launch.sweep import Status
from dpx.places import without_places
from dpx.run_folder import read_json

# What a run leaves at its end; where one of them was taken away, the same command makes it again.
_LEFT = ("release/params", f"release/{STATEMENT}", "private/results.json")
JOBS = ("train", "resume")


def has_finished(folder: Path, plain: dict[str, Any]) -> bool:
    """Whether the run that the resolved config `plain` names stands finished in `folder`."""
    if not all((folder / name).exists() for name in _LEFT):
        return False
    if not any(Status(folder, job).read().get("state") == "finished" for job in JOBS):
        return False
    try:
        return is_of(folder, plain)
    except Exception:
        return False


def is_of(folder: Path, plain: dict[str, Any]) -> bool:
    """Whether the run in `folder` is the one that the resolved config `plain` names. Raises `ConfigError` where its config is none."""
    place = config.place_of(folder)
    held = cast(dict[str, Any], OmegaConf.to_container(config.read(place)))
    text = OmegaConf.to_yaml(OmegaConf.create(plain))
    # A copy of release/ holds no paths of the machine that it was made on.
    named = OmegaConf.to_container(OmegaConf.create(text if place.parent.name == "private" else without_places(text)))
    return config.identity(held) == config.identity(cast(dict[str, Any], named))


def say(folder: Path) -> None:
    """Holds the folder against its ledger, then shows what the run came to; raises `ConfigError` where its parts do not agree."""
    from dpx.claim import agreement
    from dpx.console import stage
    from dpx.job.train import show

    agreement.check(folder)
    results, claim = (read_json(folder / name) for name in ("private/results.json", f"release/{STATEMENT}"))
    stage("this run has finished; nothing was done. With replicate=1 it is run again, with fresh noise and a cost of its own.")
    show(results, claim, folder)
