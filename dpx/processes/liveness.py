"""Tells the supervising process of a worker that it makes progress, so that one that hangs or was stopped is ended.

A step, a batch of an evaluation and a message between the processes are progress. A compiler at work counts as progress of every process
of the job, since the others wait for its program.
"""

import contextlib
import math
import os
import struct
import threading
from collections.abc import Iterator

from dpx.processes.team import Team

# Set in the working process: the handle of the pipe on which it tells its progress.
HANDLE = "DPX_PROGRESS_FD"
# Set in the working process: how often the job was started again.
RESTART = "DPX_RESTART"
# What is told: the seconds within which more is told (infinite: no limit), and how often the job may be started again.
MESSAGE = struct.Struct("<dq")
_SECONDS = 1.0
# The names that jax gives to tracing, lowering and compiling.
_OF_COMPILER = "/jax/core/compile/"

_compiling = 0
_lock = threading.Lock()
_is_listening = False


def restart() -> int:
    """Returns how often the supervising process started this job again by itself."""
    return int(os.environ.get(RESTART, "0"))


@contextlib.contextmanager
def told(team: Team, deadline_s: float | None, restarts: int) -> Iterator[None]:
    """Tells the supervising process how many `restarts` it may make, and, inside the block, that this process makes progress.

    Where it tells nothing for `deadline_s` seconds, it is ended; `None` sets no limit.
    """
    handle = os.environ.get(HANDLE, "")
    if team.is_alone or not handle.isdecimal():
        yield
        return
    pipe, ended = int(handle), threading.Event()
    os.write(pipe, MESSAGE.pack(math.inf if deadline_s is None else deadline_s, restarts))
    if deadline_s is None:
        yield
        return
    _listen_to_compiler()
    thread = threading.Thread(target=_tell, args=(team, pipe, MESSAGE.pack(deadline_s, restarts), ended), daemon=True, name="liveness")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        os.write(pipe, MESSAGE.pack(math.inf, restarts))


def _tell(team: Team, pipe: int, message: bytes, ended: threading.Event) -> None:
    seen, was_compiling = -1, False
    while not ended.wait(_SECONDS):
        is_compiling = _compiling > 0
        if is_compiling != was_compiling:
            team.say_compiling(is_compiling)
            was_compiling = is_compiling
        if team.progress != seen or is_compiling or team.is_compiling():
            seen = team.progress
            os.write(pipe, message)


def _listen_to_compiler() -> None:
    global _is_listening
    if _is_listening:
        return
    import jax.monitoring

    _is_listening = True
    # jax tells a scalar where such work begins, and a duration where it ends.
    jax.monitoring.register_scalar_listener(_begin)
    jax.monitoring.register_event_duration_secs_listener(_end)


def _begin(event: str, value: float | int, **kwargs: str | int) -> None:
    _count(event, 1)


def _end(event: str, duration_secs: float, **kwargs: str | int) -> None:
    _count(event, -1)


def _count(event: str, change: int) -> None:
    global _compiling
    if event.startswith(_OF_COMPILER):
        with _lock:
            # Work that began before this process listened ends without having been counted.
            _compiling = max(0, _compiling + change)
