"""Writes measurements to TensorBoard and as one JSON line for each step.

Both are private, because they depend on the data without noise.
"""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import summary

from dpx.console import stage
from dpx.durable import write_durably
from dpx.training.lossy_file import EventFile, LossyFile

LINES = "metrics.jsonl"

# TensorBoard sorts groups by name: what a run costs, what it learnt and how fast come first.
_GROUPS = {
    "privacy/": "1_privacy/",
    "heldout/": "2_utility/heldout_",
    "train/examples_per_s": "3_speed/examples_per_s",
    "profile/seconds": "3_speed/seconds",
    "profile/": "3_speed/share_of_",
}
_OF_LEARNING = ("loss", "accuracy", "perplexity")


def _shown(name: str) -> str:
    """Returns a metric's name in TensorBoard; in `metrics.jsonl` its name is unchanged."""
    for start, group in _GROUPS.items():
        if name.startswith(start):
            return group + name.removeprefix(start)
    if name.startswith("train/") and name.endswith(_OF_LEARNING):
        return "2_utility/train_" + name.removeprefix("train/")
    return name


def _name_shortly(private: Path) -> None:
    """Links `<outputs>/tensorboard/<run>` to the run's events, so that TensorBoard shows runs by their own names."""
    run = private.absolute().parent
    place = run.parent / "tensorboard"
    with contextlib.suppress(OSError):
        place.mkdir(exist_ok=True)
        (place / run.name).symlink_to(Path("..") / run.name / private.name / "tensorboard")


class MetricsWriter:
    """A writer that appends scalars to `private/tensorboard` and `private/metrics.jsonl`; steps from `first_step` on are written again.

    What cannot be written is dropped, and counted in one line when the writer is closed: a full disk does not stop a run here.
    """

    def __init__(self, private: Path, first_step: int):
        _keep_before(private / LINES, first_step)
        _name_shortly(private)
        self._lines = LossyFile(private / LINES)
        self._events = EventFile(private / "tensorboard", first_step)

    def describe(self, config_yaml: str, hparams: dict[str, Any]) -> None:
        """Writes the resolved config as text and the swept settings as hparams."""
        self._events.add_text("config", f"```yaml\n{config_yaml}\n```")
        self._events.add_text("hparams", "\n".join(f"- {key}: {value}" for key, value in hparams.items()))

    def hparams(self, hparams: dict[str, Any], results: Iterable[str]) -> None:
        """Writes the run's row of TensorBoard's HParams table, with the scalars named `results`, once they exist.

        A value of `None` stays empty.

        Written with the run's own scalars: `add_hparams` would make it a second run.
        """
        columns = {name: 0.0 if value is None else value for name, value in hparams.items()}
        experiment, _, _ = summary.hparams(columns, dict.fromkeys(map(_shown, results), 0.0))
        _, begun, ended = summary.hparams(hparams, {})
        for part in (experiment, begun, ended):
            self._events.add(part.value)

    def write(self, step: int, scalars: dict[str, Any]) -> None:
        """Writes one step's scalars; vectors (one value per layer) become `name/layer_00`, ..."""
        flat = {}
        for name, value in scalars.items():
            array = np.asarray(value, np.float64)
            if array.ndim == 0:
                flat[name] = float(array)
            else:
                flat |= {f"{name}/layer_{index:02d}": float(part) for index, part in enumerate(array)}
        self._lines.append((json.dumps({"step": step, **flat}) + "\n").encode())
        self._events.add_scalars({_shown(name): value for name, value in flat.items()}, step)

    def close(self) -> None:
        """Reports in one line what was dropped, if anything was, and closes the files."""
        self._lines.close()
        self._events.close()
        lost = [
            f"{file.dropped} of {name}" for name, file in (("metrics.jsonl", self._lines), ("TensorBoard", self._events)) if file.dropped
        ]
        if lost:
            fault = self._lines.fault or self._events.fault
            stage(f"measurements that could not be written were dropped ({' and '.join(lost)} records): {fault}")


def _keep_before(path: Path, first_step: int) -> None:
    """Removes the lines from `first_step` on, because a replayed step is measured again.

    A line cut short by a kill is removed with them.
    """
    if path.exists():
        kept = [line for line in path.read_text(errors="replace").splitlines() if _is_before(line, first_step)]
        write_durably(path, "".join(line + "\n" for line in kept))


def _is_before(line: str, first_step: int) -> bool:
    try:
        return json.loads(line)["step"] < first_step
    except (ValueError, TypeError, KeyError):
        return False
