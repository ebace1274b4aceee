"""Handles Ctrl-C and SIGTERM: work that must not be cut is finished first, other work stops at once, and a second signal ends the
process.

The interpreter runs a signal's handler between two bytecodes of the main thread, which may wait minutes for a device. So a separate thread
receives signals too: it ends the process at the second one, even while the main thread waits.

That thread needs the interpreter's lock, and compiled code that hangs may hold it. So a small process, the guard, receives signals first:
it forwards them, and kills this process if it still exists some seconds after the second one.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)

# Seconds that the guard waits after the second signal.
GRACE_SECONDS = 5

# Seconds that threads have to end after an error has been told.
LEFT_BEHIND_SECONDS = 10

# The guard ends with its parent: its standard input, the pipe that signals are written to, then has no writer left.
_GUARD = """
import os, signal, time
for number in {signals}:
    signal.signal(number, signal.SIG_IGN)
heard = 0
while heard < 2 and (found := os.read(0, 1)):
    heard += found[0] in {signals}
    try:
        os.write(1, found)
    except OSError:
        pass
time.sleep({grace} if heard > 1 else 0)
if heard > 1 and os.getppid() == {parent}:
    os.kill({parent}, signal.SIGKILL)
"""

# Kept, since an object of a process that still runs warns when it is deleted.
_guards: list[subprocess.Popen[bytes]] = []
_writer: int | None = None
_before: dict[int, Any] = {}
_received: list[int] = []
_is_deferred = False


class Interrupted(BaseException):
    """Says that the user ended the program.

    `done` is the number of steps that a run has saved, `None` outside training; `how` says how to resume.
    """

    def __init__(self, done: int | None = None):
        super().__init__()
        self.done = done
        self.how = "the same command starts again"

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number, as in a shell: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (_received[0] if _received else signal.SIGINT)

    def __str__(self) -> str:
        return f"interrupted{'' if self.done is None else f' after step {self.done}'}: {self.how}"


def install() -> None:
    """Handles both signals from now on, until `release`; call it from the main thread."""
    global _writer
    if _writer is None:
        reader, _writer = os.pipe()
        os.set_blocking(_writer, False)
        threading.Thread(target=_listen, args=(_guard(reader), reader), daemon=True, name="signals").start()
    signal.set_wakeup_fd(_writer)
    for number in SIGNALS:
        _before[number] = signal.signal(number, _handle)


def release() -> None:
    """Handles signals as before `install`. No thread runs while the interpreter exits, so this module would not receive a signal then."""
    signal.set_wakeup_fd(-1)
    for number, handler in _before.items():
        signal.signal(number, handler)
    _before.clear()


def received() -> int | None:
    """Returns the number of the first signal that was received since `install`, `None` if none was."""
    return _received[0] if _received else None


def note(number: int) -> None:
    """Records a signal that another process of the job received."""
    _received.append(number)


def is_requested() -> bool:
    """Returns whether SIGINT or SIGTERM was received since `install`."""
    return bool(_received)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defers signals inside the block: they raise nothing, and the work asks `is_requested` at points where it may stop."""
    global _is_deferred
    _is_deferred = True
    try:
        yield
    finally:
        _is_deferred = False


def end_in_time(code: int) -> None:
    """Lets the process end with `code` at most `LEFT_BEHIND_SECONDS` after its last line, whatever its threads wait for.

    Where a save fails, some of Orbax's threads wait ten minutes for others that have ended.
    """
    begun = threading.Event()

    def watch() -> None:
        begun.wait()
        time.sleep(LEFT_BEHIND_SECONDS)
        os._exit(code)

    threading.Thread(target=watch, name="end", daemon=True).start()
    # Exit handlers of `atexit` run after threads have been waited for; this runs before, as that of concurrent.futures does.
    threading._register_atexit(begun.set)  # pyright: ignore[reportAttributeAccessIssue]


def _handle(number: int, frame: Any) -> None:
    """Raises `Interrupted` at the current point of the program, unless signals are deferred."""
    _received.append(number)
    if not _is_deferred:
        raise Interrupted


def _listen(*readers: int) -> None:
    """Records the first signal and ends the process at the second. If the reader ends, as it does when the guard ends, the next reader
    is used."""
    heard = 0

    def say_deferred() -> None:
        with contextlib.suppress(OSError):
            print("finishing the step and saving; once more ends at once", file=sys.stderr)

    for found in itertools.chain.from_iterable(iter(partial(os.read, reader, 1), b"") for reader in readers):
        number = found[0]
        if number not in SIGNALS:
            continue
        heard += 1
        if heard > 1:
            os._exit(128 + number)
        _received.append(number)
        # In a log, the line at the end is enough; a person who waits for the step would press again.
        if _is_deferred and sys.stderr.isatty():
            # A stopped terminal accepts no output, and this thread must still receive the next signal.
            threading.Thread(target=say_deferred, daemon=True).start()


def _guard(reader: int) -> int:
    """Starts the guard of this process, which reads signals from `reader`; returns the handle that it forwards them to."""
    handed_on, to_guard = os.pipe()
    code = _GUARD.format(parent=os.getpid(), signals={int(number) for number in SIGNALS}, grace=GRACE_SECONDS)
    # If no process can be started, only the thread listens.
    with contextlib.suppress(OSError):
        _guards.append(
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code],
                stdin=reader,
                stdout=to_guard,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
    os.close(to_guard)
    return handed_on
