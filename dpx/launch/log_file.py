"""The handler of `private/dpx.log`."""

import contextlib
import logging


class LogFile(logging.FileHandler):
    """A log that never stops what it tells of: a message that cannot be written (a full disk, a folder that was closed) is dropped.

    Python's own drops one only while its file is open, and opens it for the first message.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one message, if that is possible."""
        with contextlib.suppress(OSError):
            super().emit(record)
