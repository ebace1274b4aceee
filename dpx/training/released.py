"""Writes `release/telemetry.jsonl`: the values of each step that the privacy statement covers, and no others."""

import json
import os
from pathlib import Path
from typing import Any

from dpx.durable import naming, not_following, sync
from dpx.files.records import to_json
from dpx.files.results import require_counted_from_one
from dpx.privacy.hash_chain import Mark

PREFIX = "released/"


class Released:
    """The released values of a run, held back until the statement that charges for them is on disk (`publish`).

    One JSON line per step, counted from 1, with its noise epoch and the ledger line it follows from. Written lines are never removed,
    since they may have been read; a replayed step would give the same line again.
    """

    def __init__(self, path: Path):
        self._path = path
        self._held: list[dict[str, Any]] = []
        published = self._whole_lines()
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

    def _whole_lines(self) -> list[dict[str, Any]]:
        """Returns the lines on disk; a line cut short by a kill is removed, and its step is published again."""
        if not self._path.exists():
            return []
        text = self._path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            os.truncate(self._path, len(whole))
        return [json.loads(line) for line in whole.splitlines()]
