"""Writes one split of a store row by row, in constant memory, hashing as it goes."""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dpx.data.keyed import Split
from dpx.data.pairs import Row
from dpx.data.store import column_types
from dpx.data.vocabulary import SpecialIds
from dpx.durable import put_in_place

_COPIED_ROWS = 65_536


class HashedFile:
    """A file written once, front to back, with the SHA-256 of what was written."""

    def __init__(self, path: Path):
        self.path = path
        self._file: BinaryIO = path.open("wb")
        self._digest = hashlib.sha256()
        self._bytes = 0

    def write(self, block: bytes) -> None:
        try:
            self._file.write(block)
        except OSError:
            self.release()
            raise
        self._digest.update(block)
        self._bytes += len(block)

    def release(self) -> None:
        """Lets go of the file, whole or not; a full disk may refuse what is still held back."""
        with suppress(OSError):
            self._file.close()

    def close(self) -> dict[str, Any]:
        """Size and hash, once the bytes are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


class SplitWriter:
    """Appends the rows of one split; under a `limit` so many rows are kept of a unit, and they end up one after another.

    Memory: 16 bytes a unit, and at `finish` 12 bytes a row where some unit came more than once under a limit.
    """

    def __init__(self, folder: Path, split: Split, *, sequence_length: int, vocabulary_size: int, special: SpecialIds, limit: int | None):
        self._folder, self._split = folder, split
        self._length, self._special, self._limit = sequence_length, special, limit
        self._types = column_types(vocabulary_size)
        self._files = {name: HashedFile(folder / f"{split}.{name}") for name in self._types}
        self._unit_file = HashedFile(folder / f"{split}.units.jsonl")
        self._priority_file = HashedFile(folder / f"{split}.priority") if limit is not None else None
        self._units = 0
        self._some_unit_came_again = False
        self.row_count = 0
        self.token_counts = np.zeros(vocabulary_size, np.int64)

    @property
    def unit_count(self) -> int:
        return self._units

    def add_unit(self, unit_id: str) -> int:
        """The number of a unit that is new to this split."""
        self._unit_file.write((json.dumps(unit_id) + "\n").encode())
        self._units += 1
        return self._units - 1

    def add_document(self, unit: int, rows: list[Row], priority: Callable[[int], int], *, again: bool) -> None:
        """Appends a document's rows. When there are too many, those of the lowest `priority` (64 bits, by row number) are kept."""
        self._some_unit_came_again |= again
        priorities: list[int] = []
        if self._limit is not None:
            ranked = sorted((priority(row), row) for row in range(len(rows)))[: self._limit]
            kept = sorted((row, place) for place, row in ranked)
            rows, priorities = [rows[row] for row, _ in kept], [place for _, place in kept]
        if rows:
            columns = self._columns(unit, rows)
            for name, file in self._files.items():
                file.write(columns[name].tobytes())
            if self._priority_file is not None:
                self._priority_file.write(np.array(priorities, "<u8").tobytes())
            self.token_counts += np.bincount(columns["tokens"].ravel(), minlength=len(self.token_counts))
            self.row_count += len(rows)

    def _columns(self, unit: int, rows: list[Row]) -> dict[str, np.ndarray]:
        special = self._special
        columns = {name: np.zeros((len(rows), self._length) if name == "tokens" else len(rows), kind) for name, kind in self._types.items()}
        columns["tokens"][:] = special.pad_id
        columns["unit"][:] = unit
        for place, row in enumerate(rows):
            tokens = [special.cls_id, *row.first, special.sep_id]
            columns["segment_start"][place] = len(tokens)
            if row.second:
                tokens += [*row.second, special.sep_id]
            columns["tokens"][place, : len(tokens)] = tokens
            columns["length"][place] = len(tokens)
            columns["is_next"][place] = row.is_next
        return columns

    def release(self) -> None:
        """Lets go of every file, for a preparation that failed."""
        for file in (*self._files.values(), self._unit_file, *filter(None, [self._priority_file])):
            file.release()

    def finish(self) -> dict[str, dict[str, Any]]:
        """Size and hash of every file of this split, surplus rows dropped."""
        found = {file.path.name: file.close() for file in (*self._files.values(), self._unit_file)}
        if self._priority_file is not None:
            self._priority_file.close()
            if self._some_unit_came_again and self.row_count and self._limit is not None:
                found |= self._by_unit(self._limit)
            self._priority_file.path.unlink()
        return found

    def _by_unit(self, limit: int) -> dict[str, dict[str, Any]]:
        """Rewrites the arrays unit by unit, without the rows that are past a unit's limit by priority; a unit's rows keep their order."""
        unit_N = np.fromfile(self._files["unit"].path, self._types["unit"])
        priority_N = np.fromfile(self._folder / f"{self._split}.priority", "<u8")
        order_N = np.lexsort((np.arange(len(unit_N)), priority_N, unit_N))
        sorted_N = unit_N[order_N]
        rank_N = np.arange(len(unit_N)) - np.searchsorted(sorted_N, sorted_N, side="left")
        kept = order_N[rank_N < limit]
        kept = kept[np.lexsort((kept, unit_N[kept]))]
        found = {}
        for name, kind in self._types.items():
            path = self._files[name].path
            old = np.memmap(path, kind, mode="r", shape=(self.row_count, self._length) if name == "tokens" else (self.row_count,))
            fresh = HashedFile(path.with_suffix(".kept"))
            for start in range(0, len(kept), _COPIED_ROWS):
                fresh.write(old[kept[start : start + _COPIED_ROWS]].tobytes())
            found[path.name] = fresh.close()
            put_in_place(fresh.path, path)
        self.row_count = len(kept)
        return found
