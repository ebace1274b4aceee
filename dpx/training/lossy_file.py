"""A file of measurements: a record that cannot be written is dropped and counted, and the run does not wait for it.

A run never depends on its measurements. The training thread writes them, record by record: a queue in between would fill, and block,
when its writer fails.
"""

import contextlib
import os
from pathlib import Path

from dpx.durable import make_folder, not_following


class LossyFile:
    """Appends records to the file at `path`; `start` is written before the first one.

    A record is written completely or not at all. After a fault (a full disk, a missing folder) the next record is tried again.
    `dropped` counts records that were not written, `fault` is the reason for the last of them, as text.
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
            # The next record overwrites the part of this record that was written.
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._length)
            raise
        self._length += len(data)

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)
