"""Stores calibrations on disk, in `$DPX_CACHE` or `~/.cache/dpx`. Losing the folder costs seconds, so every failure is ignored."""

import contextlib
import hashlib
import json
import math
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dpx.durable import write_durably

# Increased when this package's arithmetic changes, so that older results are not reused.
FORMULA = 2


def folder() -> Path:
    """Returns the folder of stored calibrations."""
    return Path(os.environ.get("DPX_CACHE") or Path.home() / ".cache" / "dpx")


def key(question: dict[str, Any]) -> str:
    """Returns the name of the stored result for `question` with the installed version of dp-accounting."""
    text = json.dumps({"formula": FORMULA, "dp-accounting": version("dp-accounting"), **question}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read(name: str) -> float | None:
    """Returns the stored noise multiplier, or `None` if the file cannot be read or its number is not positive and finite."""
    try:
        stored = json.loads((folder() / "calibration" / f"{name}.json").read_text())
        value = float(stored["noise_multiplier"])
        return value if 0 < value < math.inf else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write(name: str, noise_multiplier: float, question: dict[str, Any]) -> None:
    """Stores a noise multiplier atomically: concurrent readers see the old file, the new one or none."""
    path = folder() / "calibration" / f"{name}.json"
    with contextlib.suppress(OSError):
        write_durably(path, json.dumps({"noise_multiplier": noise_multiplier, "question": question}))
