"""Writes one split of a store row by row, in constant memory, and hashes it at the same time."""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dpx.data.schema import Columns, Schema, stored
from dpx.data.store import UNIT
from dpx.data.unit_names import Split
from dpx.durable import draft_of, not_following

_COPIED_ROWS = 65_536


class HashedFile:
    """Writes a file once, from start to end, and computes the SHA-256 of its content."""

    def __init__(self, path: Path):
        self.path = path
        self._file: BinaryIO = open(path, "wb", opener=not_following)
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
        """Closes the file, complete or not; on a full disk the buffered bytes may be lost."""
        with suppress(OSError):
            self._file.close()

    def close(self) -> dict[str, Any]:
        """Closes the file and returns its size and hash, once the bytes are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


class SplitWriter:
    """Appends the rows of one split, with the columns of one schema; with a `limit`, at most that many rows of a unit are kept.

    In the end the rows of a unit follow one another. Memory: 16 bytes a unit, and at `finish` 12 bytes a row if a unit was added several
    times under a limit.
    """

    def __init__(self, folder: Path, split: Split, *, schema: Schema, vocabulary_size: int, limit: int | None):
        self._folder, self._split, self._limit = folder, split, limit
        self._schema, self._kept = schema, schema | {"unit": UNIT}
        self._files = {name: HashedFile(folder / f"{split}.{name}") for name in self._kept}
        self._unit_file = HashedFile(folder / f"{split}.units.jsonl")
        self._priority_file = HashedFile(folder / f"{split}.priority") if limit is not None else None
        self._some_unit_came_again = False
        self.row_count = self.unit_count = self.dropped_rows = 0
        self.token_counts = np.zeros(vocabulary_size, np.int64)

    def add_unit(self, unit_id: str) -> int:
        """Returns the number of a unit that is new to this split."""
        self._unit_file.write((json.dumps(unit_id) + "\n").encode())
        self.unit_count += 1
        return self.unit_count - 1

    def add_document(self, unit: int, rows: Columns, priority: Callable[[int], int], *, again: bool) -> None:
        """Appends a document's rows. If there are too many, those with the lowest `priority` (64 bits, by row number) are kept.

        Raises `ConfigError` for rows that do not fit the schema.
        """
        self._some_unit_came_again |= again
        rows, count = stored(rows, self._schema, f"{self._split} row {self.row_count}"), len(next(iter(rows.values())))
        priorities: list[int] = []
        if self._limit is not None:
            ranked = sorted((priority(row), row) for row in range(count))[: self._limit]
            kept = sorted((row, place) for place, row in ranked)
            rows, priorities = {name: values[[row for row, _ in kept]] for name, values in rows.items()}, [place for _, place in kept]
            self.dropped_rows += count - len(kept)
            count = len(kept)
        if count:
            for name, values in (rows | {"unit": np.full(count, unit, UNIT.dtype)}).items():
                self._files[name].write(values.tobytes())
            if self._priority_file is not None:
                self._priority_file.write(np.array(priorities, "<u8").tobytes())
            self.token_counts += np.bincount(rows["tokens"].ravel(), minlength=len(self.token_counts))
            self.row_count += count

    def release(self) -> None:
        """Closes every file after a preparation that failed."""
        for file in (*self._files.values(), self._unit_file, *filter(None, [self._priority_file])):
            file.release()

    def finish(self) -> dict[str, dict[str, Any]]:
        """Returns the size and hash of every file of this split, with surplus rows dropped."""
        files = {file.path.name: file.close() for file in (*self._files.values(), self._unit_file)}
        if self._priority_file is not None:
            self._priority_file.close()
            if self._some_unit_came_again and self.row_count and self._limit is not None:
                files |= self._by_unit(self._limit)
            self._priority_file.path.unlink()
        return files

    def _by_unit(self, limit: int) -> dict[str, dict[str, Any]]:
        """Rewrites the arrays unit by unit, without the rows beyond a unit's limit by priority; a unit's rows keep their order."""
        unit_N = np.fromfile(self._files["unit"].path, UNIT.dtype)
        priority_N = np.fromfile(self._folder / f"{self._split}.priority", "<u8")
        order_N = np.lexsort((np.arange(len(unit_N)), priority_N, unit_N))
        sorted_N = unit_N[order_N]
        rank_N = np.arange(len(unit_N)) - np.searchsorted(sorted_N, sorted_N, side="left")
        kept = order_N[rank_N < limit]
        kept = kept[np.lexsort((kept, unit_N[kept]))]
        files = {}
        for name, column in self._kept.items():
            path = self._files[name].path
            old = np.memmap(path, column.dtype, mode="r", shape=(self.row_count, *column.shape))
            with draft_of(path) as draft:
                fresh = HashedFile(draft)
                for start in range(0, len(kept), _COPIED_ROWS):
                    fresh.write(old[kept[start : start + _COPIED_ROWS]].tobytes())
                files[path.name] = fresh.close()
        self.dropped_rows += self.row_count - len(kept)
        self.row_count = len(kept)
        return files
