"""Keeps solved accounting problems on disk, by their content, in `$DPX_CACHE` or `~/.cache/dpx`. Losing the folder costs minutes, so
every failure is ignored.

Noise multipliers are kept always, and `dpx.privacy.solve` checks one before it is used. Epsilons are kept inside `keeping` alone, where
many plans are listed: a run, a statement and a single plan compose theirs again.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from dpx.durable import write_durably

# Increased when this package's arithmetic changes, so that older results are not reused.
FORMULA = 2

# What is kept, and the name of its folder.
Kind = Literal["calibration", "epsilon"]

_is_keeping = False


def folder() -> Path:
    """Returns the folder of kept results."""
    return Path(os.environ.get("DPX_CACHE") or Path.home() / ".cache" / "dpx")


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Inside the block a kept result is used as it is: each distinct accounting problem is solved once, and never again."""
    global _is_keeping
    before, _is_keeping = _is_keeping, True
    try:
        yield
    finally:
        _is_keeping = before


def is_keeping() -> bool:
    """Returns whether this is a listing of plans (`keeping`)."""
    return _is_keeping


def key(question: dict[str, Any]) -> str:
    """Returns the name of the result for `question` with the installed version of dp-accounting."""
    text = json.dumps({"formula": FORMULA, "dp-accounting": version("dp-accounting"), **question}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read(kind: Kind, question: dict[str, Any]) -> float | None:
    """Returns the result for `question`; `None` if its file cannot be read, is damaged or holds no number from 0 on."""
    name = key(question)
    try:
        kept = json.loads((folder() / kind / f"{name}.json").read_text())
        value = float(kept["value"])
        return value if value >= 0 and kept["checksum"] == _checksum(name, value) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write(kind: Kind, question: dict[str, Any], value: float) -> None:
    """Keeps a result atomically: concurrent readers see the old file, the new one or none."""
    name = key(question)
    kept = {"value": value, "checksum": _checksum(name, value), "question": question}
    with contextlib.suppress(OSError):
        write_durably(folder() / kind / f"{name}.json", json.dumps(kept))


def _checksum(name: str, value: float) -> str:
    return hashlib.blake2b(f"{name} {value!r}".encode(), digest_size=16).hexdigest()
