"""Runs of tests: killed before a step; and sessions that compute alike share what they compile, since tracing is most of a small run."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from dpx import config
from dpx.run_folder import RunFolder
from dpx.training import loop, session


class Killed(Exception):
    """Stands for a SIGKILL before a chosen step."""


def run_job(cfg: DictConfig, path: Path, fork: str | None = None, until: int | None = None) -> bool:
    """Runs the job of `cfg` in `path`, killed before step `until`; whether it came to its end."""
    experiment, job = config.build(cfg)
    folder, whole = RunFolder(path, OmegaConf.to_yaml(OmegaConf.create(config.resolved(cfg))), fork), loop.one_step

    def mortal(*arguments: Any) -> Any:
        if arguments[-2] == until:
            raise Killed
        return whole(*arguments)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(loop, "one_step", mortal)
        job(experiment, folder)
        return True
    return False


def shared(make: Callable[..., Any], key: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """`make`, called once for each `key` of its arguments."""
    kept: dict[tuple[Any, ...], Any] = {}

    def made(*given: Any) -> Any:
        name = key(*given)
        if name not in kept:
            kept[name] = make(*given)
        return kept[name]

    return made


@contextlib.contextmanager
def shared_programs(
    step_key: Callable[..., tuple[Any, ...]], evaluation_key: Callable[..., tuple[Any, ...]]
) -> Iterator[pytest.MonkeyPatch]:
    """Within it sessions share steps by `step_key` and evaluations by `evaluation_key` of what they are made from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "make_step", shared(session.make_step, step_key))
        patch.setattr(session, "held_out", shared(session.held_out, evaluation_key))
        yield patch
