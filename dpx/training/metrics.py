"""Writes the measurements of a run to TensorBoard and as one JSON line for each step, shows its progress, and writes released telemetry.

Measurements are private, because they depend on the data without noise. A record that cannot be written is dropped and counted. A run
never depends on its measurements. The training thread writes them, record by record: a queue in between would fill, and block, when its
writer fails, as that of `tensorboardX.SummaryWriter` does. `release/telemetry.jsonl` holds the values of each step that the privacy
statement covers, and no others.
"""

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from rich.progress import BarColumn, Progress, TextColumn
from tensorboardX import summary
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import masked_crc32c

from dpx.claim.search_record import key_of
from dpx.config.declared_loggers import DEFAULT, Loggers
from dpx.console import figure, progress_console, stage
from dpx.durable import make_folder, naming, not_following, sync, write_durably
from dpx.files.records import to_json
from dpx.files.results import LINES, require_counted_from_one
from dpx.privacy.hash_chain import Mark
from dpx.training.loggers import TABLE, Table

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

    def publish(self, mark: Mark | None) -> list[dict[str, Any]]:
        """Appends the kept values and returns their lines; call it only after a statement that charges for them is on disk."""
        held, self._held = self._held, []
        if not held:
            return []
        named = {"ledger": to_json(mark) if mark else None}
        with naming(self._path), open(self._path, "a", opener=not_following) as file:
            file.write("".join(json.dumps(line | named) + "\n" for line in held))
            file.flush()
            os.fsync(file.fileno())
        sync(self._path.parent)
        return held


# TensorBoard sorts groups by name: what a run costs, what it learnt and how fast come first.
_GROUPS = {
    "privacy/": "1_privacy/",
    "heldout/": "2_utility/heldout_",
    "train/examples_per_s": "3_speed/examples_per_s",
    "profile/seconds": "3_speed/seconds",
    "profile/": "3_speed/share_of_",
}
_OF_LEARNING = ("loss", "accuracy", "perplexity", "rmse")

# What TensorBoard shows beside a curve, by the beginning of the metric's name; the first that fits is used.
_DESCRIPTIONS = {
    "privacy/epsilon": "Epsilon that is spent after this step, by the accountant of the run, at the declared delta.",
    "heldout/loss": "Mean loss over the held-out rows. Computed from text without noise.",
    "heldout/": "Metric over the held-out rows. Computed from text without noise.",
    "train/examples_per_s": "Examples of this step, divided by its seconds.",
    "train/examples": "Examples drawn for this step. The number depends on the draw and is not published.",
    "train/non_finite_examples": "Examples with a gradient that is not finite; they add nothing to the sum.",
    "train/tokens": "Tokens of the drawn examples, without padding.",
    "train/padded_tokens": "Tokens of the drawn examples, with padding.",
    "train/learning_rate": "Learning rate of this step.",
    "train/expected_batch_size": "Batch size by which the noisy sum is divided: the expected one, not the drawn one.",
    "train/": "Mean over the examples drawn for this step, before the update. Computed without noise.",
    "grad/norm": "L2 norm of the clipped sum without noise, divided by the expected batch size.",
    "grad/snr": "L2 norm of the clipped sum, divided by the L2 norm of its noise.",
    "grad/noise_norm": "L2 norm of the noise, divided by the expected batch size.",
    "grad/clipped_fraction": "Share of the units whose gradient was clipped.",
    "grad/example_norm": "Mean L2 norm of the units' gradients before clipping.",
    "forward/clipped_fraction": "Share of the units whose vector was clipped.",
    "forward/vector_norm": "Mean L2 norm of the units' vectors before clipping.",
    "weights/": "L2 norm of a weight after this step.",
    "gradients/": "L2 norm of a weight's part of the clipped sum, divided by the expected batch size.",
    "released/": "Value with noise, as in release/telemetry.jsonl. The statement charges for it.",
    "carriers/": "Share of the squared norm of a matrix that its low-rank carriers keep.",
    "profile/seconds": "Seconds since the last line of measurements.",
    "profile/": "Share of the time since the last line of measurements.",
}
# Columns of TensorBoard's table of runs that come first, after the keys of the command line.
_FIRST = ("epsilon", "learning_rate")
_NOT_SETTINGS = ("job", "run", "fork", "hydra")


def _shown(name: str) -> str:
    """Returns a metric's name in TensorBoard; in `metrics.jsonl` its name is unchanged."""
    for start, group in _GROUPS.items():
        if name.startswith(start):
            return group + name.removeprefix(start)
    if name.startswith("train/") and name.endswith(_OF_LEARNING):
        return "2_utility/train_" + name.removeprefix("train/")
    return name


def varied_first(columns: dict[str, Any], private: Path, config_yaml: str) -> dict[str, Any]:
    """Returns the columns of a run in TensorBoard's table in the order in which they are shown.

    The keys of the command line that made the run come first, as a sweep varies these; Hydra keeps them in `private/hydra`. Then come
    epsilon and the learning rate. A key that `columns` holds by its last name, such as `clip.clipping_norm`, has that name.
    """
    kept = private / "hydra" / "overrides.yaml"
    overrides = [str(one) for one in OmegaConf.load(kept)] if kept.is_file() else []
    config, varied = OmegaConf.create(config_yaml), {}
    for override in overrides:
        key, last = key_of(override), key_of(override).rpartition(".")[2]
        if override.startswith("~") or "@" in key or key.partition(".")[0] in _NOT_SETTINGS:
            continue
        if last in columns:
            varied[last] = columns[last]
        else:
            value = OmegaConf.select(config, key)
            # An option of a group is named by its override; TensorBoard has no kind of column for a list.
            varied[key] = value if isinstance(value, int | float | str) else override.partition("=")[2]
    first = varied | {name: columns[name] for name in _FIRST if name in columns}
    return first | {name: value for name, value in columns.items() if name not in first}


class MetricsWriter:
    """A writer that appends scalars to `private/metrics.jsonl` for a run that goes on after `steps_done` steps.

    It also writes event files to `private/tensorboard` and a table to `private/metrics.csv`, as `loggers` declares.

    What is there of later steps is removed, because a replayed step is measured again. Raises `ConfigError` for a file that counts steps
    from 0, as an older dpx did.

    What cannot be written is dropped, and counted in one line when the writer is closed: a full disk does not stop a run here.
    """

    def __init__(self, private: Path, steps_done: int, loggers: Loggers = DEFAULT):
        kept = _keep(private / LINES, steps_done)
        self._lines = LossyFile(private / LINES)
        self._table = None if loggers.csv is None else Table(private / TABLE, kept)
        self._events: EventFile | None = None
        self._described: set[str] = set()
        if loggers.tensorboard is None:
            return
        self._events = EventFile(private / "tensorboard", steps_done + 1)
        # TensorBoard shows runs by their own names where `<outputs>/tensorboard/<run>` links to the run's events.
        run = private.absolute().parent
        with contextlib.suppress(OSError):
            make_folder(run.parent / "tensorboard")
            (run.parent / "tensorboard" / run.name).symlink_to(Path("..") / run.name / private.name / "tensorboard")

    def describe(self, config_yaml: str, hparams: dict[str, Any]) -> None:
        """Writes the resolved config as text and the swept settings as hparams."""
        if self._events is None:
            return
        self._events.add_text("config", f"```yaml\n{config_yaml}\n```")
        self._events.add_text("hparams", "\n".join(f"- {key}: {value}" for key, value in hparams.items()))

    def hparams(self, hparams: dict[str, Any], results: Iterable[str]) -> None:
        """Writes the run's row of TensorBoard's HParams table, with the scalars named `results`, once they exist.

        A value of `None` stays empty.

        Written with the run's own scalars: `add_hparams` would make it a second run.
        """
        if self._events is None:
            return
        columns = {name: 0.0 if value is None else value for name, value in hparams.items()}
        experiment, _, _ = summary.hparams(columns, dict.fromkeys(map(_shown, results), 0.0))
        _, begun, ended = summary.hparams(hparams, {})
        for part in (experiment, begun, ended):
            self._events.add(part.value)

    def write(self, step: int, scalars: dict[str, Any]) -> dict[str, float]:
        """Writes and returns the scalars of one step, counted from 1; vectors (one value per layer) become `name/layer_00`, ..."""
        flat = {}
        for name, value in scalars.items():
            array = np.asarray(value, np.float64)
            if array.ndim == 0:
                flat[name] = float(array)
            else:
                flat |= {f"{name}/layer_{index:02d}": float(part) for index, part in enumerate(array)}
        self._lines.append((json.dumps({"step": step, **flat}) + "\n").encode())
        if self._table is not None:
            self._table.append({"step": step, **flat})
        if self._events is None:
            return flat
        # TensorBoard reads the description with the first value of a curve.
        text_of = {name: next((text for start, text in _DESCRIPTIONS.items() if name.startswith(start)), "") for name in flat}
        described = {_shown(name): (value, "" if name in self._described else text_of[name]) for name, value in flat.items()}
        self._events.add_scalars(described, step)
        self._described |= flat.keys()
        return flat

    def close(self) -> None:
        """Reports in one line what was dropped, if anything was, and closes the files."""
        files = {"metrics.jsonl": self._lines} | ({} if self._events is None else {"TensorBoard": self._events})
        for file in files.values():
            file.close()
        lost = [f"{file.dropped} of {name}" for name, file in files.items() if file.dropped]
        if lost:
            fault = next(file.fault for file in files.values() if file.fault)
            stage(f"measurements that could not be written were dropped ({' and '.join(lost)} records): {fault}")


def _keep(path: Path, steps_done: int) -> list[dict[str, Any]]:
    """Keeps, and returns, the lines up to step `steps_done`; a line cut short by a kill is removed with the later ones."""

    def step_of(line: str) -> int | None:
        try:
            step = json.loads(line)["step"]
        except (ValueError, TypeError, KeyError):
            return None
        return step if isinstance(step, int) else None

    if not path.exists():
        return []
    lines = [(line, step_of(line)) for line in path.read_text(errors="replace").splitlines()]
    require_counted_from_one(path, [{"step": step} for _, step in lines])
    kept = [line for line, step in lines if step is not None and step <= steps_done]
    write_durably(path, "".join(line + "\n" for line in kept))
    return [json.loads(line) for line in kept]


ROWS_SHOWN = 20


class RunProgress:
    """The progress display: steps done, examples/s, loss, accuracy, epsilon spent of planned, time left. Use it as a context manager.

    The first step of a process compiles, so neither its speed nor its time is shown or counted.
    """

    def __init__(self, first_step: int, steps: int):
        self._steps, self._first = steps, first_step
        self._every = max(1, steps // ROWS_SHOWN)
        self._console = progress_console()
        self.planned: float | None = None
        # The newest epsilon and the step after which it was composed; a bar shows it until the next one.
        self._epsilon: tuple[float, int] | None = None
        self._compiled: float | None = None
        self._bar = None
        if self._console.is_terminal:
            # The bar fits into eighty columns, also on a wider terminal.
            columns = (BarColumn(10), TextColumn("{task.completed}/{task.total}"), TextColumn("{task.fields[facts]}"))
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("training", total=steps, completed=first_step, facts="")

    def __enter__(self) -> "RunProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a separate line above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def stage(self, text: str) -> None:
        """Shows the activity that takes time from now on: in the bar, or on a separate line."""
        if self._bar:
            self._bar.update(self._task, facts=text)
        else:
            self.say(text)

    def shows(self, done: int) -> bool:
        """Returns whether a line, and epsilon with it, is due after `done` steps."""
        return done % self._every == 0 or done in (self._first + 1, self._steps)

    def step(self, done: int, examples_per_s: float, loss: float | None, accuracy: float | None, epsilon: float | None) -> None:
        """Shows the state after `done` steps; `epsilon` belongs to these steps, and is `None` if it was not composed.

        `loss` is `None` for a step that drew no example, `accuracy` also for a task without one.
        """
        now = time.monotonic()
        if epsilon is not None:
            self._epsilon = epsilon, done
        facts = ["no example drawn"] if loss is None else [f"loss {figure(loss, 2)}"]
        facts += [] if loss is None or accuracy is None else [f"accuracy {accuracy:.1%}"]
        if self.planned is not None and self._epsilon is not None:
            spent, at = self._epsilon
            facts.append(f"epsilon {figure(spent, 2)}/{figure(self.planned, 2)}" + ("" if at == done else f" at {at}"))
        if self._compiled is None:
            self._compiled = now
        else:
            left = (now - self._compiled) / (done - self._first - 1) * (self._steps - done)
            facts = [f"{examples_per_s:,.0f} examples/s", *facts, f"{left:,.0f} s left"]
        if self._bar:
            self._bar.update(self._task, completed=done, facts="  ".join(facts))
        elif self.shows(done):
            self.say("  ".join([f"step {done}/{self._steps}", *facts]))
