"""Starts the working process of a host, ends it if it makes no progress, and turns the ways in which jax ends it into one line and one
exit code; starts it again where `mesh.restarts` allows it.

jax ends a process whose peers are gone by an abort, from compiled code, so a parent must report it.

A worker tells its supervising process that it makes progress, so that one that hangs or was stopped is ended. A step, a batch of an
evaluation and a message between the processes are progress. A compiler at work counts as progress of every process of the job, since the
others wait for its program.
"""

import collections
import contextlib
import math
import os
import re
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from dpx.console import tell
from dpx.processes.interruption import SIGNALS
from dpx.processes.team import HEARTBEAT_SECONDS, LOST, Team

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
    global _is_listening
    if not _is_listening:
        import jax.monitoring

        _is_listening = True
        # jax tells a scalar where such work begins, and a duration where it ends.
        jax.monitoring.register_scalar_listener(lambda event, value, **_: _count(event, 1))
        jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **_: _count(event, -1))
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


def _count(event: str, change: int) -> None:
    global _compiling
    if event.startswith(_OF_COMPILER):
        with _lock:
            # Work that began before this process listened ends without having been counted.
            _compiling = max(0, _compiling + change)


# Set in the working process: the handle of a pipe that ends when its supervisor does.
LIFELINE = "DPX_LIFELINE_FD"
# Set in the working process: the handle of the error stream of its supervisor. Its own is a pipe, into which compiled code writes.
ERRORS = "DPX_ERRORS_FD"
# A restart waits so much longer than a heartbeat.
_MORE_SECONDS = 10
# Exit codes that a command line of dpx gives by itself.
_OWN = (0, 1, 2, 130, 143, LOST)


def supervise(work: Callable[[], int]) -> int:
    """Returns the exit code of `work` in the working process; the process that a launcher started runs the same command again as one."""
    handle = os.environ.pop(LIFELINE, "")
    if handle.isdecimal():
        if (errors := os.environ.pop(ERRORS, "")).isdecimal():
            sys.stderr = open(int(errors), "w", buffering=1, encoding=sys.stderr.encoding, errors=sys.stderr.errors)
        threading.Thread(target=end_with, args=(int(handle),), daemon=True, name="lifeline").start()
        return work()
    return _watch()


def _watch() -> int:
    """Runs the working process, again after it was lost as often as it allows; returns its exit code."""
    received: list[int] = []
    number = restarts = 0
    while True:
        code, allowed = _run(number, received)
        # One that is lost before it has read its config tells nothing.
        restarts = max(restarts, allowed)
        if code != LOST or received or number >= restarts:
            return code
        number += 1
        tell(f"starting again from the last checkpoint: restart {number} of {restarts}")
        # Until then every process of the job has heard that one was lost, and has ended.
        time.sleep(HEARTBEAT_SECONDS + _MORE_SECONDS)
        if received:
            return 128 + received[0]


def _run(number: int, received: list[int]) -> tuple[int, int]:
    """Runs the working process once, after `number` restarts; returns its exit code and how many restarts it allows.

    Signals are handed on, and noted in `received`.
    """
    lifeline, writer = os.pipe()
    progress, told = os.pipe()
    # The worker's own, so that a terminal is still one to it.
    errors = os.dup(2)
    handles = {LIFELINE: lifeline, HANDLE: told, ERRORS: errors}
    environment = os.environ | {name: str(handle) for name, handle in handles.items()} | {RESTART: str(number)}
    # In a new process group, so that a terminal's Ctrl-C arrives once, from here.
    command = [sys.executable, *_as_started(), *sys.argv[1:]]
    worker = subprocess.Popen(command, env=environment, pass_fds=(*handles.values(),), process_group=0, stderr=subprocess.PIPE)
    for handle in handles.values():
        os.close(handle)
    said = _Said(worker)
    said.start()
    for one in SIGNALS:
        signal.signal(one, lambda number, _: _forward(worker, number, received))
    heard = _Heard(worker, progress)
    heard.start()
    code = worker.wait()
    os.close(writer)
    heard.join(1.0)
    # A process that the worker started may hold the pipe open.
    said.join(1.0)
    if code not in _OF_A_LOSS:
        said.show_rest()
    if heard.is_stuck:
        tell(f"error: no progress: this process did nothing for {heard.seconds:g} s (mesh.deadline_s), so it was ended. {_RESUMES}")
        return LOST, heard.restarts
    if code in _OWN:
        return code, heard.restarts
    tell(f"error: process lost: a process of this job ended ({how_ended(code)}). {_RESUMES}")
    return LOST, heard.restarts


_RESUMES = "Run the same command: it resumes from the last checkpoint"


class _Heard(threading.Thread):
    """Reads what the working process tells of its progress (`dpx.processes.supervisor`), and kills it if it tells nothing in time."""

    def __init__(self, worker: "subprocess.Popen[bytes]", progress: int):
        super().__init__(daemon=True, name="progress")
        self._worker, self._progress = worker, progress
        self.is_stuck, self.seconds, self.restarts = False, math.inf, 0

    def run(self) -> None:
        while select.select([self._progress], [], [], None if math.isinf(self.seconds) else self.seconds)[0]:
            # Whole messages: a read is a multiple of their size, and a write of one is never divided.
            text = os.read(self._progress, 64 * MESSAGE.size)
            if not text:
                os.close(self._progress)
                return
            self.seconds, self.restarts = MESSAGE.unpack(text[-MESSAGE.size :])
        self.is_stuck = True
        self._worker.kill()


class _Said(threading.Thread):
    """Shows what compiled code of the working process writes to its error stream, except jax's reports of a lost process.

    Such a report is a stack of C++ and says nothing that the one line does not; where a process ends otherwise, `show_rest` shows it.
    """

    def __init__(self, worker: "subprocess.Popen[bytes]"):
        super().__init__(daemon=True, name="errors")
        assert worker.stderr is not None
        self._pipe = worker.stderr
        self._reports: collections.deque[bytes] = collections.deque(maxlen=200)

    def run(self) -> None:
        is_report = False
        with self._pipe:
            for line in self._pipe:
                if (head := _HEAD_OF_RECORD.match(line)) is not None:
                    is_report = any(word in head[0].lower() for word in _OF_A_LOST_PEER)
                if is_report:
                    self._reports.append(line)
                else:
                    _show(line)

    def show_rest(self) -> None:
        """Shows the reports that were kept back."""
        while self._reports:
            _show(self._reports.popleft())


# A line with which a record of jax's log begins: severity, date and time, and the place in the code.
_HEAD_OF_RECORD = re.compile(rb"[IWEF]\d{4} [\d:.]+ +\d+ [\w./]+:\d+\].*")
_OF_A_LOST_PEER = (b"coordination", b"distributed service", b"heartbeat")
# Exit codes of a process that ends because another one is lost: its own, and those of an abort.
_OF_A_LOSS = (LOST, -signal.SIGABRT, 128 + signal.SIGABRT)


def _show(line: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(2, line)


def _as_started() -> list[str]:
    """Returns the arguments of Python that start this program: a module, or a script."""
    spec: Any = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return [sys.argv[0]]
    return ["-m", spec.name.removesuffix(".__main__")]


def _forward(worker: "subprocess.Popen[bytes]", number: int, received: list[int]) -> None:
    received.append(number)
    if worker.poll() is None:
        worker.send_signal(number)


def how_ended(code: int) -> str:
    """Returns how a process ended, as text."""
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"exit code {code}"


def end_with(handle: int) -> None:
    """Ends this process when the process that started it, the only writer of the pipe, is gone."""
    os.read(handle, 1)
    os._exit(LOST)
