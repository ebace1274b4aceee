"""Ctrl-C and SIGTERM: work that must not be cut is finished first, anything else ends where it is, and a second signal ends at once.

The interpreter runs a signal's handler between two bytecodes of the main thread, which may wait minutes for a device. So a thread of its
own hears of signals too: it ends the process at the second one, whatever the main thread waits for.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_received: list[int] = []
_is_deferred = False


class Interrupted(BaseException):
    """The user ended the program. `done` is how many steps a run has saved, `None` outside training; `how` says how to go on."""

    def __init__(self, done: int | None = None):
        super().__init__()
        self.done = done
        self.how = "the same command starts again"

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, as a shell has it: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (_received[0] if _received else signal.SIGINT)

    def __str__(self) -> str:
        return f"interrupted{'' if self.done is None else f' after step {self.done}'}: {self.how}"


def install() -> None:
    """Handles both signals from here on; call it from the main thread, once."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in SIGNALS:
        signal.signal(number, _handle)
    threading.Thread(target=_listen, args=(reader,), daemon=True, name="signals").start()


def is_requested() -> bool:
    """Whether SIGINT or SIGTERM came since `install`."""
    return bool(_received)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Inside, a signal raises nothing: the work asks `is_requested` where it may stop."""
    global _is_deferred
    _is_deferred = True
    try:
        yield
    finally:
        _is_deferred = False


def _handle(number: int, frame: Any) -> None:
    """Ends what is not deferred, where it is."""
    _received.append(number)
    if not _is_deferred:
        raise Interrupted


def _listen(reader: int) -> None:
    """Notes the first signal; ends the process at the second."""
    heard = 0
    while True:
        number = os.read(reader, 1)[0]
        if number not in SIGNALS:
            continue
        heard += 1
        if heard > 1:
            os._exit(128 + number)
        _received.append(number)
        # In a log, the line at the end is enough; a person who waits for the step would press again.
        if _is_deferred and sys.stderr.isatty():
            print("finishing the step and saving; once more ends at once", file=sys.stderr)
