"""Measures where the time of a run's steps goes, and traces chosen steps (`profile=...`). It changes no number that a run computes.

`Unprofiled` is what a run uses that measures nothing: it adds no wait, no thread and no copy.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from dpx.console import stage
from dpx.step_profile import StepProfile
from dpx.training.step import Step
from dpx.training.timeline import ALL, COLLECTIVES, COMPUTE, Timeline

# The period of a process's first metrics includes compiling, so the summary leaves it out.
_COMPILES = 1


class Unprofiled:
    """Measures nothing; the interface of what the loop and the session call."""

    def steps(self, steps: Iterable[int]) -> Iterator[int]:
        """Yields the steps; what happens until the next one is asked for is a part of the step."""
        yield from steps

    def host(self, name: str) -> AbstractContextManager[None]:
        """Returns a context in which the host does what `name` says."""
        return contextlib.nullcontext()

    def each(self, name: str, values: Iterable[Any]) -> Iterable[Any]:
        """Returns `values`; the host does what `name` says until each of them is there."""
        return values

    def metrics(self) -> dict[str, float]:
        """Returns the measurements since the last call, by metric name."""
        return {}

    def summary(self) -> str | None:
        """Returns the measurements of all steps in one line, `None` without any."""
        return None

    def watched(self, step: Step) -> Step:
        """Returns `step`, whose programs are measured."""
        return step

    def close(self) -> None:
        """Ends the measurement."""


class Profiling(Unprofiled):
    """Measures what `profile` asks for, and writes traces below `private`/tensorboard; `devices` are those of the mesh."""

    def __init__(self, profile: StepProfile, private: Path, devices: int):
        self._profile, self._private, self._devices = profile, private, devices
        self._timeline = Timeline()
        self._gathered: Future[float] | None = None
        self._is_tracing = False
        self._periods, self._seconds = 0, dict.fromkeys(ALL, 0.0)

    def steps(self, steps: Iterable[int]) -> Iterator[int]:
        for step in steps:
            is_traced = step + 1 in self._profile.trace_steps
            if self._is_tracing and not is_traced:
                self._stop_trace()
            if is_traced and not self._is_tracing:
                self._start_trace()
            with jax.profiler.StepTraceAnnotation("step", step_num=step + 1):
                yield step
        self._stop_trace()

    @contextlib.contextmanager
    def host(self, name: str) -> Iterator[None]:
        with jax.profiler.TraceAnnotation(name), self._timeline.host(name):
            yield

    def each(self, name: str, values: Iterable[Any]) -> Iterable[Any]:
        return self._timeline.each(name, values)

    def metrics(self) -> dict[str, float]:
        seconds, shares = self._timeline.shares()
        if not self._profile.shares:
            return {}
        if self._periods >= _COMPILES:
            self._seconds = {name: value + seconds * shares[name] for name, value in self._seconds.items()}
        self._periods += 1
        return {f"profile/{name}": share for name, share in shares.items()} | {"profile/seconds": seconds}

    def summary(self) -> str | None:
        whole = sum(self._seconds.values())
        if not whole:
            return None
        parts = ", ".join(f"{name.replace('_', ' ')} {self._seconds[name] / whole:.1%}" for name in ALL)
        return f"time of {self._periods - _COMPILES} steps: {parts}"

    def watched(self, step: Step) -> Step:
        # Between devices these two move parameters and sums; on one device they compute.
        moving = COLLECTIVES if self._devices > 1 else COMPUTE

        def gather(params: Any) -> Any:
            gathered, self._gathered = self._timed(moving, step.gather, lambda params: jax.tree.leaves(params)[:1], params)
            return gathered

        def accumulate(*arguments: Any) -> Any:
            # The sums before are donated to this program, and nobody may wait for a donated array.
            self._timeline.drain()
            return self._timed(COMPUTE, step.accumulate, lambda sums: sums["count"], *arguments)[0]

        def reduce(*arguments: Any) -> Any:
            return self._timed(moving, step.reduce, lambda reduced: reduced["checksum"], *arguments)[0]

        def finish(*arguments: Any) -> Any:
            # The parameters are donated, and what was gathered may be the same arrays.
            if self._gathered is not None:
                self._gathered.result()
            return self._timed(COMPUTE, step.finish, lambda ended: ended[1]["gradient_norm"], *arguments)[0]

        return dataclasses.replace(step, gather=gather, accumulate=accumulate, reduce=reduce, finish=finish)

    def _timed(self, name: str, run: Callable[..., Any], result: Callable[[Any], Any], *arguments: Any) -> tuple[Any, "Future[float]"]:
        """Returns the output of `run`, and when its arrays that `result` picks will be ready."""
        called = time.perf_counter()
        output = run(*arguments)
        return output, self._timeline.device(name, called, result(output))

    def _start_trace(self) -> None:
        try:
            jax.profiler.start_trace(self._private / "tensorboard")
            self._is_tracing = True
        except (OSError, RuntimeError) as fault:
            stage(f"no trace: {fault}")

    def _stop_trace(self) -> None:
        if not self._is_tracing:
            return
        self._is_tracing = False
        # What the traced steps started is a part of them.
        self._timeline.drain()
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as fault:
            stage(f"no trace: {fault}")

    def close(self) -> None:
        self._stop_trace()
        self._timeline.close()


def profiling(profile: StepProfile, private: Path, devices: int) -> Unprofiled:
    """Returns what measures as `profile` declares."""
    return Profiling(profile, private, devices) if profile.is_on else Unprofiled()
