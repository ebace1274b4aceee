"""TensorBoard's event files, written without the queue and the thread of `tensorboardX.SummaryWriter`, which block when a write fails."""

import socket
import struct
import time
from pathlib import Path
from typing import Any

from tensorboardX import summary
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import masked_crc32c

from dpx.training.lossy_file import LossyFile

# Made while their modules are imported.
_Event: Any = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
_SessionLog: Any = event_pb2.SessionLog  # pyright: ignore[reportAttributeAccessIssue]
_Summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
_VERSION = "brain.Event:2"


class EventFile(LossyFile):
    """A new event file in `folder`. TensorBoard forgets what earlier files there hold of `first_step` and the steps after it."""

    def __init__(self, folder: Path, first_step: int):
        now = time.time()
        begun = [_Event(wall_time=now, file_version=_VERSION)]
        if first_step:
            begun.append(_Event(wall_time=now, step=first_step, session_log=_SessionLog(status=_SessionLog.START)))
        # Two starts within one second get different names.
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{time.time_ns() % 10**9:09d}"
        super().__init__(folder / name, b"".join(map(_record, begun)))

    def add_scalars(self, scalars: dict[str, float], step: int) -> None:
        """Values of one step, by their names in TensorBoard."""
        self.add([value for name, number in scalars.items() for value in summary.scalar(name, number).value], step)

    def add_text(self, name: str, text: str) -> None:
        self.add(summary.text(name, text).value)

    def add(self, values: Any, step: int = 0) -> None:
        """Values of a `Summary` (protocol buffer) as one event."""
        self.append(_record(_Event(wall_time=time.time(), step=step, summary=_Summary(value=values))))


def _record(event: Any) -> bytes:
    """An event in TensorFlow's record format: length, its checksum, content, its checksum."""
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
