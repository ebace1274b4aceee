"""Runs of tests, killed before a step; and runs that compute alike share what they compile, whichever test they belong to: tracing is
most of a run this small."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpx.config.experiment_parts import OneStep
from dpx.files.run_folder import RunFolder
from dpx.mechanism import noise
from dpx.training import evaluation, loop, opening


class Killed(Exception):
    """Stands for a SIGKILL before a chosen step."""


def run_job(composition: tuple[Any, Any, str], path: Path, fork: str | None = None, until: int | None = None) -> bool:
    """Runs a composed job in `path`, killed before step `until`; whether it came to its end."""
    experiment, job, config_yaml = composition
    folder, whole = RunFolder(path, config_yaml, fork), loop.one_step

    def mortal(*arguments: Any) -> Any:
        if arguments[-2] == until:
            raise Killed
        return whole(*arguments)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(loop, "one_step", mortal)
        job(experiment, folder)
        return True
    return False


def _step_key(declared: OneStep, objective: Any, mesh: Any, microbatch: int) -> str:
    """Everything that a step is built from; of the unit that is protected, only how many rows it has together."""
    parts = {field.name: getattr(declared, field.name) for field in dataclasses.fields(declared) if field.name != "privacy"}
    return repr((parts, declared.privacy.rows_per_example, objective, mesh, microbatch, noise.SLICE_ELEMENTS))


def _evaluation_key(objective: Any, store: Any, *rows: Any) -> str:
    # Rows that were not prepared (dpx.job.measure) have no checksum.
    return repr((objective, getattr(store.manifest, "checksum", id(store)), rows))


def _shared(make: Callable[..., Any], key: Callable[..., str]) -> Callable[..., Any]:
    """`make`, called once for each `key` of its arguments."""
    kept: dict[str, Any] = {}

    def made(*given: Any) -> Any:
        name = key(*given)
        if name not in kept:
            kept[name] = make(*given)
        return kept[name]

    return made


_MAKE_STEP = _shared(opening.make_step, _step_key)
_HELD_OUT = _shared(evaluation.held_out, _evaluation_key)


@contextlib.contextmanager
def shared_programs() -> Iterator[pytest.MonkeyPatch]:
    """Within it sessions share steps and evaluations. A test that replaces what a step is made of belongs outside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "make_step", _MAKE_STEP)
        patch.setattr(evaluation, "held_out", _HELD_OUT)
        yield patch
