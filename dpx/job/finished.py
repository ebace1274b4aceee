"""Detects a run that has trained to its end: the same command then reports this and changes nothing."""

from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from dpx import config
from dpx.config.identity import identity
from dpx.declaration import ConfigError
from dpx.files.results import read_results
from dpx.files.run_folder import Status, without_places
from dpx.statement import seals
from dpx.statement.seals import MANIFEST, STATEMENT, read_run_statement

# The files that a run writes at its end; if one of them is removed, the same command makes it again.
_LEFT = ("release/params", f"release/{STATEMENT}", f"release/{MANIFEST}", "private/results.json")
JOBS = ("train", "resume")


def has_ended(folder: Path) -> bool:
    """Returns whether `folder` holds a run that has finished, whatever its config."""
    is_whole = all((folder / name).exists() for name in _LEFT)
    return is_whole and any(Status(folder, job).read().get("state") == "finished" for job in JOBS)


def has_finished(folder: Path, plain: dict[str, Any]) -> bool:
    """Returns whether `folder` holds the run that the resolved config `plain` names, and that run has finished."""
    if not has_ended(folder):
        return False
    try:
        return is_of(folder, plain)
    except Exception:
        return False


def is_of(folder: Path, plain: dict[str, Any]) -> bool:
    """Returns whether the run in `folder` is the one that the resolved config `plain` names. Raises `ConfigError` if its config is not
    valid."""
    place = config.place_of(folder)
    held = cast(dict[str, Any], OmegaConf.to_container(config.read(place)))
    text = OmegaConf.to_yaml(OmegaConf.create(plain))
    # A copy of release/ does not contain the paths of the machine that it was made on.
    named = OmegaConf.to_container(OmegaConf.create(text if place.parent.name == "private" else without_places(text)))
    return identity(held) == identity(cast(dict[str, Any], named))


def say(folder: Path) -> None:
    """Checks the folder against its ledger and its manifest, then shows the results of the run.

    Raises `ConfigError` if its parts do not agree, or if a part of what was released is missing.
    """
    from dpx.console import stage
    from dpx.job.train import show
    from dpx.statement import agreement

    agreement.check(folder)
    release = folder / "release"
    try:
        seals.check(release)
    except ConfigError as damaged:
        fix = f"Restore it, or remove {release / seals.PARAMS} and run the same command, which releases the weights again"
        raise ConfigError(damaged.value, damaged.reason, fix) from damaged
    results, claim = read_results(folder / "private"), read_run_statement(folder / "release" / STATEMENT)
    stage("this run has finished; nothing was done. With replicate=1 it is run again, with fresh noise and its own cost.")
    show(results, claim, folder)
