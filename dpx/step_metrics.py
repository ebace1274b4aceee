"""Reads the measurements of a run's steps: `private/metrics.jsonl`, one JSON object for each step that was measured.

`step` counts from 1, as on the screen, in TensorBoard and in `release/telemetry.jsonl`: it is the number of steps done. A step that drew
no example has no loss, no accuracy and no share of clipped examples.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dpx.declaration import ConfigError, require

LINES = "metrics.jsonl"


def read(private: Path) -> list[dict[str, Any]]:
    """Returns the lines in the private tree of a run; raises `ConfigError` if they are missing, damaged, or counted from 0."""
    path = private / LINES
    require(path.is_file(), path, "holds no measurements", "Train the run on this machine, or restore its private folder")
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line]
    except ValueError as error:
        raise ConfigError(path, f"is not one JSON object a line ({error})", "Restore the file") from error
    require(all(isinstance(line, dict) for line in lines), path, "is not one JSON object a line", "Restore the file")
    require_counted_from_one(path, lines)
    return lines


def require_counted_from_one(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Raises `ConfigError` for lines that an older dpx wrote, which counted steps from 0."""
    is_old = any(line.get("step") == 0 for line in lines)
    require(
        not is_old, path, "counts its steps from 0, as an older dpx did", "Use the dpx that wrote it, or train again under another name"
    )
