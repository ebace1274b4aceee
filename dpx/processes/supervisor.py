"""Starts the working process of a host, and turns the ways in which jax ends it into one line and one exit code.

jax ends a process whose peers are gone by an abort, from compiled code, so a parent must report it.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from dpx.console import tell
from dpx.interruption import SIGNALS
from dpx.processes.team import LOST

# Set in the working process: the handle of a pipe that ends when its supervisor does.
LIFELINE = "DPX_LIFELINE_FD"
# Exit codes that a command line of dpx gives by itself.
_OWN = (0, 1, 2, 130, 143, LOST)


def supervise(work: Callable[[], int]) -> int:
    """Returns the exit code of `work` in the working process; the process that a launcher started runs the same command again as one."""
    handle = os.environ.pop(LIFELINE, "")
    if handle.isdecimal():
        threading.Thread(target=_end_with_supervisor, args=(int(handle),), daemon=True, name="lifeline").start()
        return work()
    return _watch()


def _watch() -> int:
    reader, writer = os.pipe()
    environment = os.environ | {LIFELINE: str(reader)}
    command = [sys.executable, *_as_started(), *sys.argv[1:]]
    # In a new process group, so that a terminal's Ctrl-C arrives once, from here.
    worker = subprocess.Popen(command, env=environment, pass_fds=(reader,), process_group=0)
    os.close(reader)
    for number in SIGNALS:
        signal.signal(number, lambda received, _: _forward(worker, received))
    code = worker.wait()
    os.close(writer)
    if code in _OWN:
        return code
    tell(f"error: process lost: a process of this job ended ({_how(code)}). Run the same command: it resumes from the last checkpoint")
    return LOST


def _as_started() -> list[str]:
    """Returns the arguments of Python that start this program: a module, or a script."""
    spec: Any = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return [sys.argv[0]]
    return ["-m", spec.name.removesuffix(".__main__")]


def _forward(worker: "subprocess.Popen[bytes]", number: int) -> None:
    if worker.poll() is None:
        worker.send_signal(number)


def _how(code: int) -> str:
    """Returns how a process ended, as text."""
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"exit code {code}"


def _end_with_supervisor(handle: int) -> None:
    """Ends this process when its supervisor, the only writer of the pipe, is gone."""
    os.read(handle, 1)
    os._exit(LOST)
