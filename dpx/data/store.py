"""Writes and reads prepared rows on disk: the columns of one schema, memory-mapped, by record in O(1).

A store is a folder: per split an array `<split>.<column>` for each column of the manifest's schema, `<split>.unit` (the unit of each row),
`<split>.units.jsonl` (one unit id a line), `vocabulary.txt` and `manifest.json`, which lists the SHA-256 of every file. It is opened only
if every file has its checksum.

Each file is hashed once, and again if the file system says that it changed: `verified.json`, readable by its owner alone, holds for each
file its checksum, size, inode and the times of its last changes in nanoseconds. Content and names can be changed without a change of the
modification time, but not without a change of the change time. An unchanged store costs one look at each file. A disk that alters a file by
itself changes none of these: delete `verified.json` to have every file hashed again.

The rows of one unit of the protected split follow one another, so a unit is found by binary search, without an index in memory.

A split is written row by row, in constant memory, and hashed at the same time.

Shape legend: N rows of a split, n rows or units asked for, R rows a unit may have, T positions of a row.
"""

import contextlib
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from jaxtyping import Int

from dpx import durable
from dpx.console import stage
from dpx.data.schema import Column, Columns, Schema, from_json, stored
from dpx.data.tokenizer import AS_IT_CAME, BUILT_AS, DEFINITION, SpecialIds, TextTokenizer, of_path
from dpx.data.unit_names import Split
from dpx.declaration import ConfigError, require
from dpx.durable import Known, draft_of, not_following, write_durably
from dpx.privacy.declared_privacy import Privacy

VERIFIED = "verified.json"
AGAIN = "Delete the folder to prepare it again"
# Above this size hashing takes seconds, and its progress is shown.
SHOWN_BYTES = 2**30
_PARTS_SHOWN = 10


def verify(folder: Path, files: dict[str, Known]) -> None:
    """Raises `ConfigError` for a file of `files` that is missing, of another size or of another content.

    Memory does not grow with the files. A file that was hashed before and has not changed since is not hashed again.
    """
    for name, known in files.items():
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        require(size is not None, path, "is missing from its store", AGAIN)
        require(size == known["bytes"], path, f"has {size} bytes, but its manifest says {known['bytes']}", AGAIN)
    try:
        remembered = json.loads((folder / VERIFIED).read_text())
    except (OSError, ValueError):
        remembered = {}
    remembered = remembered if isinstance(remembered, dict) else {}
    changed = {name: known for name, known in files.items() if remembered.get(name) != _seen(folder / name, known)}
    if not changed:
        return
    shown = _Shown(folder, sum(known["bytes"] for known in changed.values()))
    for name, known in changed.items():
        # Its status is read before it is hashed, so that a later change is detected.
        remembered[name] = _seen(folder / name, known)
        digest = durable.of_file(folder / name, shown.read)
        require(digest == known, folder / name, "does not match the checksum in its manifest", AGAIN)
    # A store that another user owns, or a full disk, leaves it to the next opening to hash again.
    with contextlib.suppress(OSError):
        write_durably(folder / VERIFIED, json.dumps({name: remembered[name] for name in files}, indent=1, sort_keys=True) + "\n")
        os.chmod(folder / VERIFIED, 0o600)


def _seen(path: Path, known: Known) -> dict[str, Any]:
    """Returns the stored facts of a file that has the checksum `known`."""
    about = path.stat()
    return known | {"inode": about.st_ino, "modified_ns": about.st_mtime_ns, "changed_ns": about.st_ctime_ns}


class _Shown:
    """Reports how much of `total` bytes has been read, if that takes long."""

    def __init__(self, folder: Path, total: int):
        self._folder, self._total, self._done, self._parts = folder, total, 0, 0
        if total > SHOWN_BYTES:
            stage(f"checking the {total / 1e9:,.1f} GB of {folder} against their checksums, once")

    def read(self, count: int) -> None:
        self._done += count
        parts = self._done * _PARTS_SHOWN // self._total
        if self._total > SHOWN_BYTES and parts > self._parts:
            self._parts = parts
            stage(f"checked {self._done / self._total:.0%} of {self._folder.name}")


MANIFEST = "manifest.json"
VOCABULARY = "vocabulary.txt"
# The setting that names the texts of a given vocabulary; it is missing where none is known.
LEARNT_FROM = "vocabulary_learnt_from"
# Above this size, read-ahead fetches hundreds of pages for each record: 8 s against 0.03 s for 2,048 of 346M rows.
_READ_AHEAD_BYTES = 2**30
# The number of examples whose rows are found together if only their lengths are requested.
_LENGTHS_AT_ONCE = 65_536


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describes the contents of a store. `checksum` covers every array, the form of the rows and the privacy settings that shaped them.

    `columns` is the schema of the rows, as JSON (`dpx.data.schema`). `vocabulary_size` is the declared size of the embedding table;
    `ids_in_use` counts the vocabulary's tokens. `name` is random, `protects` describes the units and splits, as JSON, and `read_from` has
    the checksum of each file of the source. `most_frequent_public_token_id` is counted over the rows of the public split, without special
    tokens (None if that split is empty). `documents_per_row` is 2 if false pairs take their second segment from another document.
    """

    key: str
    name: str
    rows: dict[str, int]
    units: dict[str, int]
    columns: dict[str, Any]
    sequence_length: int
    vocabulary_size: int
    vocabulary_source: Literal["public_split", "file", "protected"]
    ids_in_use: int
    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    most_frequent_public_token_id: int | None
    documents_per_row: int
    unit: str
    rows_per_unit_max: int
    settings: dict[str, Any]
    protects: dict[str, Any]
    read_from: list[str]
    files: dict[str, dict[str, Any]]
    checksum: str = ""

    @cached_property
    def schema(self) -> Schema:
        return from_json(self.columns)

    @property
    def splits(self) -> list[Split]:
        return list(self.rows)  # type: ignore[arg-type]

    def with_checksum(self) -> "Manifest":
        """Returns this manifest with `checksum` filled in; fields that describe only the origin of the content are left out of the
        checksum."""
        about = {"key", "name", "settings", "protects", "read_from", "checksum"}
        content = {name: value for name, value in asdict(self).items() if name not in about}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return replace(self, checksum=digest)

    @property
    def vocabulary_checksum(self) -> str:
        """The SHA-256 of the vocabulary, one token a line."""
        return self.files[VOCABULARY]["sha256"]

    @property
    def learnt_from(self) -> list[Any]:
        """The texts that a given vocabulary was learnt from (`dpx.data.learnt_from`), as JSON."""
        return self.settings.get(LEARNT_FROM, [])

    def write(self, path: Path) -> None:
        write_durably(path, json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """Reads the manifest of a folder. Raises `ConfigError` if it is missing or incomplete."""
        try:
            manifest = Manifest(**json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(folder, f"is not a finished store ({type(error).__name__})", AGAIN) from None
        require(manifest.with_checksum().checksum == manifest.checksum, folder / MANIFEST, "was changed after it was written", AGAIN)
        return manifest


# The unit of each row, as the position of the unit's id; not a part of the row.
UNIT = Column("uint32")


class Store:
    """Gives access to a prepared corpus."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = folder
        self.manifest = manifest
        self._columns = {split: self._opened(split) for split in manifest.splits}

    def rows(self, split: Split, indices: Int[np.ndarray, " n"] | Sequence[int], width: int | None = None) -> dict[str, np.ndarray]:
        """Returns the requested rows, in that order; work and memory grow with n alone.

        The result has every column of the manifest's schema as int32 (or float32) [n, ...], and `record` int32[n], the requested index.
        Texts have their first `width` positions, or all if `width` is `None`. Raises `IndexError` outside [0, N).
        """
        wanted_n = np.asarray(indices, dtype=np.int64)
        count = self.manifest.rows[split]
        if wanted_n.size and (wanted_n.min() < 0 or wanted_n.max() >= count):
            raise IndexError(f"{split} has records 0 to {count - 1}, but the request was for {wanted_n.min()} to {wanted_n.max()}")
        columns = {name: self._read(split, name, wanted_n, width) for name in self.manifest.schema}
        return {**columns, "record": wanted_n.astype(np.int32)}

    def _read(self, split: Split, name: str, wanted_n: np.ndarray, width: int | None = None) -> np.ndarray:
        column = self.manifest.schema[name]
        values = self._columns[split][name][wanted_n]
        return (values[..., :width] if column.is_text else values).astype(column.read_as)

    @property
    def holds_text(self) -> bool:
        """Whether the rows that a step reads are texts."""
        return any(column.is_text for column in self.manifest.schema.values())

    def population(self, privacy: Privacy) -> int:
        """Returns the number of protected records (rows, or whole units) that a step draws from."""
        return privacy.population(self.manifest)

    def examples(
        self,
        split: Split,
        indices: Int[np.ndarray, " n"] | Sequence[int],
        rows_per_example: int,
        width: int | None = None,
        epoch: int | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns the examples that a step draws: rows as `rows` returns them, or, for `rows_per_example` R above 1, whole units.

        With the number of an `epoch` from 0, `indices` are units, and each unit gives the one row that is read in this epoch: the row of
        that number, and the first one again after the last. `is_padding` bool[n] is true for a unit without rows, whose fields hold zeros.

        For units, `indices` are numbers below `units[split]`, every field is [n, R, ...], and `is_padding` bool[n, R] is true where a unit
        has no further row; those hold zeros. Time grows as n log N. Raises `IndexError` outside the split, and `ConfigError` if a unit has
        more than R rows (the store was prepared under another cap).
        """
        if epoch is None and rows_per_example == 1:
            return self.rows(split, indices, width)
        row_nR, is_padding_nR = self._rows_of_units(split, indices, rows_per_example, epoch)
        rows = self.rows(split, row_nR[~is_padding_nR], width)
        filled = {name: np.zeros((*row_nR.shape, *values.shape[1:]), values.dtype) for name, values in rows.items()}
        for name, values in rows.items():
            filled[name][~is_padding_nR] = values
        return filled | {"is_padding": is_padding_nR}

    def lengths(
        self, split: Split, indices: Int[np.ndarray, " n"] | Sequence[int], rows_per_example: int, epoch: int | None = None
    ) -> Int[np.ndarray, " n"]:
        """Returns the number of tokens of the longest text of each of the requested `examples`."""
        wanted_n = np.asarray(indices, dtype=np.int64)
        longest_n = np.zeros(len(wanted_n), np.int32)
        for start in range(0, len(wanted_n), _LENGTHS_AT_ONCE):
            block = slice(start, start + _LENGTHS_AT_ONCE)
            row_nR = wanted_n[block]
            is_padding_nR = np.zeros(len(row_nR), bool)
            if epoch is not None or rows_per_example > 1:
                row_nR, is_padding_nR = self._rows_of_units(split, row_nR, rows_per_example, epoch)
            length = self._read(split, "length", np.where(is_padding_nR, 0, row_nR).ravel()).reshape(*row_nR.shape, -1)
            longest_n[block] = np.where(is_padding_nR, 0, length.max(axis=-1)).reshape(len(row_nR), -1).max(axis=1)
        return longest_n

    def _rows_of_units(
        self, split: Split, indices: Int[np.ndarray, " n"] | Sequence[int], rows_per_example: int, epoch: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns row numbers [n, R] of these units, and a mask bool [n, R] that is true where a unit has no further row.

        In an `epoch` they are the number [n] of the row that each unit gives, and a mask [n] that is true for units without rows.
        """
        units_n = np.asarray(indices, dtype=np.int64)
        count = self.manifest.units[split]
        if units_n.size and (units_n.min() < 0 or units_n.max() >= count):
            raise IndexError(f"{split} has units 0 to {count - 1}, but the request was for {units_n.min()} to {units_n.max()}")
        # Keys of another type would make numpy convert the whole column.
        unit_N, key_n = self._columns[split]["unit"], units_n.astype(self._columns[split]["unit"].dtype)
        first_n, end_n = np.searchsorted(unit_N, key_n, side="left"), np.searchsorted(unit_N, key_n, side="right")
        if epoch is not None:
            count_n = end_n - first_n
            return first_n + epoch % np.maximum(count_n, 1), count_n == 0
        most = int((end_n - first_n).max(initial=0))
        require(most <= rows_per_example, self.folder, f"a unit has {most} rows, above the cap of {rows_per_example}", AGAIN)
        row_nR = first_n[:, None] + np.arange(rows_per_example)
        return row_nR, row_nR >= end_n[:, None]

    def unit_of_rows(self, split: Split, indices: Int[np.ndarray, " n"] | Sequence[int]) -> Int[np.ndarray, " n"]:
        """Returns the position in `unit_ids(split)` of each row's unit."""
        return self._columns[split]["unit"][np.asarray(indices, dtype=np.int64)].astype(np.int64)

    def unit_ids(self, split: Split) -> list[str]:
        """Returns the name of every unit of a split, by its number."""
        with (self.folder / f"{split}.units.jsonl").open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    def vocabulary(self) -> list[str]:
        """Returns the vocabulary's tokens, by id."""
        return (self.folder / VOCABULARY).read_text(encoding="utf-8").rstrip("\n").split("\n")

    def tokenizer(self) -> TextTokenizer:
        """Returns the tokenizer of the rows."""
        places = (self.folder / AS_IT_CAME, self.folder / DEFINITION, self.folder / VOCABULARY)
        built_as = self.manifest.settings.get(BUILT_AS)
        tokenizer = of_path(next(place for place in places if place.exists()), self.manifest.vocabulary_size, built_as)
        # A definition by itself does not say what the marks are; the manifest does.
        return replace(tokenizer, special=SpecialIds.from_ids(self.manifest))

    def _opened(self, split: Split) -> dict[str, np.ndarray]:
        count = self.manifest.rows[split]
        columns = {}
        for name, column in (self.manifest.schema | {"unit": UNIT}).items():
            shape = (count, *column.shape)
            path = self.folder / f"{split}.{name}"
            if not count:
                columns[name] = np.zeros(shape, column.dtype)
                continue
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if len(mapped) > _READ_AHEAD_BYTES and hasattr(mmap, "MADV_RANDOM"):
                mapped.madvise(mmap.MADV_RANDOM)
            columns[name] = np.frombuffer(mapped, column.dtype).reshape(shape)
        return columns


def open_store(folder: Path, key: str | None = None) -> Store:
    """Returns the store in `folder`. Raises `ConfigError` if it is incomplete, or if its key is not `key`."""
    manifest = Manifest.read(folder)
    require(key is None or manifest.key == key, folder, "was prepared from other data or settings", AGAIN)
    verify(folder, manifest.files)
    return Store(folder, manifest)


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
