"""Divides the time of a run among what the device computes and what the host does while the device has nothing to do.

The host records its activities one after the other (`host`). The device runs programs one after the other: a program is busy from its
start, or from the end of the program before it, until its result is ready, which a thread of this module waits for (`device`). Every
moment counts once: for the program that runs, else for the activity of the host, else as `other`. So rows that are read while the device
computes do not count as data wait, and shares add up to one.

Times are those of the host's clock; the waiting thread may see a result some milliseconds late while the host holds Python's lock.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

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
