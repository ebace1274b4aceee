"""The handler of `private/dpx.log`, and what is written there since no caller can catch it."""

import contextlib
import logging
import sys
import threading
from typing import Any


class LogFile(logging.FileHandler):
    """A log that never stops what it tells of: a message that cannot be written (a full disk, a folder that was closed) is dropped.

    Python's own drops one only while its file is open, and opens it for the first message.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one message, if that is possible."""
        with contextlib.suppress(OSError):
            super().emit(record)


def log_uncaught() -> None:
    """Logs errors of threads and of callbacks, which Python would print: a command that fails prints one line."""
    sys.unraisablehook = _note
    threading.excepthook = _note


def _note(uncaught: Any) -> None:
    error = uncaught.exc_value
    # Where one write of a checkpoint fails, the results of the others arrive after Orbax has stopped waiting for them.
    is_late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    if not is_late and not isinstance(error, SystemExit):
        logging.getLogger("dpx").error("an error that nothing caught", exc_info=(uncaught.exc_type, error, uncaught.exc_traceback))
