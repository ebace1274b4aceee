"""A file of measurements: what cannot be written is dropped and counted, and nothing waits for it.

Measurements follow from a run; the run never depends on them. They are written by the thread that trains, record by record: a queue in
between would fill, and block, when its writer fails.
"""

import contextlib
import os
from pathlib import Path

from dpx.durable import make_folder, not_following


class LossyFile:
    """Whole records, appended to the file at `path`; `start` comes before the first one.

    A record is written whole or not at all. After a fault (a full disk, a folder that is gone) the next record is tried again.
    `dropped` counts records that were not written, `fault` says why in words, of the last one.
    """

    def __init__(self, path: Path, start: bytes = b""):
        self.path, self._start = path, start
        self.dropped, self.fault = 0, ""
        self._handle: int | None = None
        self._length = 0

    def append(self, record: bytes) -> None:
        try:
            self._write(record)
        except OSError as fault:
            self.dropped += 1
            self.fault = (fault.strerror or type(fault).__name__).lower()

    def _write(self, record: bytes) -> None:
        if self._handle is None:
            make_folder(self.path.parent)
            self._handle = not_following(self.path, os.O_WRONLY | os.O_CREAT)
            self._length = os.fstat(self._handle).st_size
        data = record if self._length else self._start + record
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._handle, data[written:], self._length + written)
        except OSError:
            # The next record takes the place of what was written of this one.
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._length)
            raise
        self._length += len(data)

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)
