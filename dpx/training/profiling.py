"""Measures where the time of a run's steps goes, and traces chosen steps (`profile=...`). It changes no number that a run computes.

`Unprofiled` is what a run uses that measures nothing: it adds no wait, no thread and no copy.

The time is divided among what the device computes and what the host does while the device has nothing to do. The host records its
activities one after the other (`host`). The device runs programs one after the other: a program is busy from its start, or from the end of
the program before it, until its result is ready, which a thread of this module waits for (`device`). Every moment counts once: for the
program that runs, else for the activity of the host, else as `other`. So rows that are read while the device computes do not count as data
wait, and shares add up to one.

Times are those of the host's clock; the waiting thread may see a result some milliseconds late while the host holds Python's lock.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax

from dpx.config.experiment import StepProfile
from dpx.console import stage
from dpx.training.step import Step

# What the host does.
DATA_WAIT, LEDGER, CHECKPOINT, EVALUATION = "data_wait", "ledger", "checkpoint", "evaluation"
# It waits until all processes have compared their sums, or until the sum of a repeated step has been compared with the earlier one.
AGREEMENT = "agreement"
# What the device does: programs that move parameters and sums between devices, and all others.
COLLECTIVES, COMPUTE = "collectives", "compute"
OTHER = "other"
ALL: tuple[str, ...] = (COMPUTE, COLLECTIVES, DATA_WAIT, AGREEMENT, LEDGER, CHECKPOINT, EVALUATION, OTHER)


class Span(NamedTuple):
    """One activity, in seconds of `time.perf_counter`."""

    name: str
    began: float
    ended: float


class _Program(NamedTuple):
    name: str
    called: float
    ready: "Future[float]"


class Timeline:
    """The activities of host and device since the last call of `shares`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._waiting = ThreadPoolExecutor(1, "timeline")
        self._host: list[Span] = []
        self._programs: list[_Program] = []
        self._device_free = self._since = clock()
        self._is_within = False

    @contextlib.contextmanager
    def host(self, name: str) -> Iterator[None]:
        """Records what the host does in the block; a block inside another one is a part of that one."""
        if self._is_within:
            yield
            return
        began, self._is_within = self._clock(), True
        try:
            yield
        finally:
            self._is_within = False
            self._host.append(Span(name, began, self._clock()))

    def each(self, name: str, values: Iterable[Any]) -> Iterator[Any]:
        """Yields from `values`; the time until each is there is recorded."""
        iterator = iter(values)
        while True:
            with self.host(name):
                try:
                    value = next(iterator)
                except StopIteration:
                    return
            yield value

    def device(self, name: str, called: float, result: Any) -> "Future[float]":
        """Records a program that was called at the time `called`, and returns when it will have ended, on the same clock.

        `result` are arrays of its output. They must not be donated to another program before that.
        """
        self._programs.append(_Program(name, called, self._waiting.submit(self._ready, result)))
        return self._programs[-1].ready

    def _ready(self, result: Any) -> float:
        jax.block_until_ready(result)
        return self._clock()

    def drain(self) -> None:
        """Waits until every recorded program has ended."""
        for program in self._programs:
            program.ready.result()

    def shares(self) -> tuple[float, dict[str, float]]:
        """Returns the seconds since the last call, and the share of each activity in them; starts the next period."""
        since, now = self._since, self._clock()
        spans, waiting, free = [], [], self._device_free
        for place, program in enumerate(self._programs):
            if not program.ready.done():
                # The programs behind it have not begun.
                spans.append(Span(program.name, max(program.called, free, since), now))
                waiting = self._programs[place:]
                break
            ended = program.ready.result()
            spans.append(Span(program.name, max(program.called, free, since), min(ended, now)))
            free = max(free, ended)
        found = divided(since, now, spans, self._host)
        self._programs, self._host, self._device_free, self._since = waiting, [], free, now
        return now - since, found

    def close(self) -> None:
        """Ends the waiting thread."""
        self._waiting.shutdown()


def divided(since: float, until: float, device: list[Span], host: list[Span]) -> dict[str, float]:
    """Returns the share of each activity in the time from `since` to `until`; neither list has spans that overlap."""
    seconds = dict.fromkeys(ALL, 0.0)
    for span in device:
        seconds[span.name] += max(0.0, span.ended - span.began)
    for span in host:
        seconds[span.name] += max(0.0, _overlap(span, since, until) - sum(_overlap(span, one.began, one.ended) for one in device))
    whole = max(until - since, 1e-9)
    seconds[OTHER] = max(0.0, whole - sum(seconds.values()))
    return {name: value / whole for name, value in seconds.items()}


def _overlap(span: Span, began: float, ended: float) -> float:
    return max(0.0, min(span.ended, ended) - max(span.began, began))


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
