"""Writes completions batch by batch, so that the same command continues after a kill, and beside them what they were made from.

A batch of lines is on disk before the next batch begins. A line that a kill cut short is removed, and its prompt is completed again.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpx.declaration import ConfigError, require
from dpx.durable import locked, naming, not_following, sync
from dpx.run_folder import read_json, write_json

# In the file beside the completions: everything that they depend on.
MADE_FROM = "made_from"
_FIX = "Restore it, or name another file with generate.output"


@contextmanager
def lines_of(path: Path, facts: Mapping[str, Any], rows: Sequence[int]) -> Iterator["Lines"]:
    """Yields the file of completions of the prompts in `rows`, locked, with the lines that it has already.

    `facts` are written beside it, as .json. Raises `ConfigError` if another process writes the file, if it holds completions that were made
    from something else, or other rows.
    """
    beside = path.with_suffix(".json")
    # Refused before anything is made: a file that is not known, and completions that were made from something else.
    if beside.exists():
        _require_same(beside, facts[MADE_FROM])
    else:
        require(not path.exists(), path, f"already exists, without {beside.name} that says what it holds", _FIX)
        write_json(beside, facts)
    try:
        with locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
            yield Lines(path, rows)
    except BlockingIOError:
        raise ConfigError(path, "another process is writing this file", "Wait for it, or name another file with generate.output") from None


def _require_same(beside: Path, made_from: Mapping[str, Any]) -> None:
    before = read_json(beside, _FIX).get(MADE_FROM)
    require(isinstance(before, dict), beside, "does not say what the completions were made from", _FIX)
    assert isinstance(before, dict)
    told = [f"{key} was {before.get(key)}, not {value}" for key, value in made_from.items() if before.get(key) != value]
    require(not told, beside, f"the completions were made from something else: {'; '.join(told)}", _FIX)


class Lines:
    """A file of one JSON object a prompt, in the order of `rows`; `count` is the number of prompts that it has."""

    def __init__(self, path: Path, rows: Sequence[int]):
        self._path = path
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            os.truncate(path, len(whole))
        try:
            found = [json.loads(line)["row"] for line in whole.splitlines()]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(path, "was changed by hand", _FIX) from None
        # A lower generate.limit than before asks for fewer prompts than there are.
        is_beginning = all(one == other for one, other in zip(found, rows, strict=False))
        require(is_beginning, path, "holds completions of other rows", _FIX)
        self.count = min(len(found), len(rows))

    def append(self, batch: Sequence[Mapping[str, Any]]) -> None:
        """Adds lines; they are on disk when this returns."""
        with naming(self._path), open(self._path, "a", encoding="utf-8", opener=not_following) as file:
            file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in batch))
            file.flush()
            os.fsync(file.fileno())
        sync(self._path.parent)
        self.count += len(batch)
