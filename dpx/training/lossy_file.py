"""Writes a file of measurements: a record that cannot be written is dropped and counted, and the run does not wait for it.

A run never depends on its measurements. The training thread writes them, record by record: a queue in between would fill, and block,
when its writer fails, as that of `tensorboardX.SummaryWriter` does.

Writes `release/telemetry.jsonl`: the values of each step that the privacy statement covers, and no others.
"""

import contextlib
import json
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from tensorboardX import summary
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import masked_crc32c

from dpx.durable import make_folder, naming, not_following, sync
from dpx.files.records import to_json
from dpx.files.results import require_counted_from_one
from dpx.privacy.hash_chain import Mark

# Made while their modules are imported.
_Event: Any = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
_SessionLog: Any = event_pb2.SessionLog  # pyright: ignore[reportAttributeAccessIssue]
_Summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
_VERSION = "brain.Event:2"


class LossyFile:
    """A file at `path` to which records are appended; `start` is written before the first record.

    A record is written completely or not at all. After a fault (a full disk, a missing folder) the next record is tried again.
    `dropped` counts records that were not written, `fault` is the reason for the last of them, as text.
    """

    def __init__(self, path: Path, start: bytes = b""):
        self.path, self._start = path, start
        self.dropped, self.fault = 0, ""
        self._handle: int | None = None
        self._length = 0

    def append(self, record: bytes) -> None:
        """Appends one record, or drops and counts it if it cannot be written."""
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
        """Closes the file."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)


class EventFile(LossyFile):
    """A new event file in `folder`. TensorBoard then ignores what earlier files there hold of `first_step`, at least 1, and the steps
    after it."""

    def __init__(self, folder: Path, first_step: int):
        now = time.time()
        begun = [
            _Event(wall_time=now, file_version=_VERSION),
            _Event(wall_time=now, step=first_step, session_log=_SessionLog(status=_SessionLog.START)),
        ]
        # Two starts within one second get different names.
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{time.time_ns() % 10**9:09d}"
        super().__init__(folder / name, b"".join(map(_record, begun)))

    def add_scalars(self, scalars: dict[str, tuple[float, str]], step: int) -> None:
        """Adds values of one step, each with its description (Markdown, or nothing), by their names in TensorBoard."""
        named = [summary.scalar(name, number, summary_description=text) for name, (number, text) in scalars.items()]
        values = [value for one in named for value in one.value]
        for value in values:
            if value.HasField("metadata"):
                # Without it TensorBoard's readers ignore the description.
                value.metadata.plugin_data.plugin_name = "scalars"
        self.add(values, step)

    def add_text(self, name: str, text: str) -> None:
        """Adds a text under `name`."""
        self.add(summary.text(name, text).value)

    def add(self, values: Any, step: int = 0) -> None:
        """Adds the values of a `Summary` (protocol buffer) as one event."""
        self.append(_record(_Event(wall_time=time.time(), step=step, summary=_Summary(value=values))))


def _record(event: Any) -> bytes:
    """Returns an event in TensorFlow's record format: length, its checksum, content, its checksum."""
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


PREFIX = "released/"


class Released:
    """The released values of a run, held back until the statement that charges for them is on disk (`publish`).

    One JSON line per step, counted from 1, with its noise epoch and the ledger line it follows from. Written lines are never removed,
    since they may have been read; a replayed step would give the same line again.
    """

    def __init__(self, path: Path):
        self._path = path
        self._held: list[dict[str, Any]] = []
        published = []
        if path.exists():
            text = path.read_bytes()
            # A line cut short by a kill is removed, and its step is published again.
            whole = text[: text.rfind(b"\n") + 1]
            if whole != text:
                os.truncate(path, len(whole))
            published = [json.loads(line) for line in whole.splitlines()]
        require_counted_from_one(path, published)
        self._published = {(line["epoch"], line["step"]) for line in published}

    def hold(self, epoch: int, step: int, metrics: dict[str, Any]) -> None:
        """Keeps the released values among `metrics` for the next `publish`."""
        values = {name.removeprefix(PREFIX): float(value) for name, value in metrics.items() if name.startswith(PREFIX)}
        if values and (epoch, step) not in self._published:
            self._published.add((epoch, step))
            self._held.append({"epoch": epoch, "step": step, **values})

    def publish(self, mark: Mark | None) -> None:
        """Appends the kept values; call it only after a statement that charges for them is on disk."""
        held, self._held = self._held, []
        if not held:
            return
        named = {"ledger": to_json(mark) if mark else None}
        with naming(self._path), open(self._path, "a", opener=not_following) as file:
            file.write("".join(json.dumps(line | named) + "\n" for line in held))
            file.flush()
            os.fsync(file.fileno())
        sync(self._path.parent)
