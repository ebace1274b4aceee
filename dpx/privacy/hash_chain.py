"""Keeps an append-only text file that shows whether it was cut or changed: each line has a keyed digest of itself and all lines before it.

A line is `<digest> <JSON>`. The key is drawn when the file is made and is in its first line; the file is under private/, so a released file
may contain a digest: without the key it reveals nothing about the lines (HMAC; Bellare, Canetti, Krawczyk 1996, by keyed BLAKE2b). A `Mark`
names a line of the file: every file that follows from the lines up to there contains the mark, and can be checked against the chain later.

This detects accidents (a lost, cut, edited or older file). It does not detect changes by somebody who has the key, nor a file that was
rolled back together with all its marks.
"""

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dpx.declaration import ConfigError, require
from dpx.durable import naming, write_durably
from dpx.files.records import described, from_json, record

DIGEST_BYTES = 16
RESTORE = "Restore the file. A new run goes into its own folder (replicate=1), and the privacy spent here stays spent"


@record
class Mark:
    """A position in a chain: the chain's name, the number of lines up to there, and the digest of the last of them."""

    chain: str = described("Random name of the chain.")
    position: int = described("Number of lines up to there.")
    digest: str = described("Keyed digest of those lines.")


def mark_of(node: Any) -> Mark | None:
    """Returns the mark that was written as `node`, or `None` for anything else."""
    try:
        return from_json(Mark, node, "mark")
    except ConfigError:
        return None


class Chain:
    """The chain in the file at `path`; a missing file is created durably.

    `formats`, by name, are in the first line of a new file; that of an existing file may have others that are `readable`. `lines` are the
    JSON values after the first line. A last line without its line feed was never acknowledged and is dropped. Raises `ConfigError` for a
    file that is not a chain or has another format, and for lines that do not follow from each other.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        formats: dict[str, int] | None = None,
        readable: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ):
        self.path = Path(path)
        self._handle: int | None = None
        formats = formats or {}
        if not self.path.exists():
            write_durably(self.path, _first_line({"chain": secrets.token_hex(8)} | formats))
        self._read()
        for name, known in formats.items():
            found = self.first.get(name)
            require(
                found in readable.get(name, (known,)),
                self.path,
                f"is in format {found}, not {known}",
                "Use the version of dpx that wrote it",
            )

    @property
    def mark(self) -> Mark:
        """Returns the mark of the last line."""
        return Mark(chain=self.name, position=len(self._digests), digest=self._digests[-1].hex())

    def missing(self, mark: Mark | None) -> str | None:
        """Returns the reason, as text, why `mark` is not a line of this chain; `None` if it is.

        A file without a mark does not follow from a chain.
        """
        if mark is None:
            return "is a chain of lines, and the file that depends on it names no line"
        if mark.chain != self.name:
            return f"is another chain ({self.name}) than the chain that it names ({mark.chain})"
        if mark.position < 1:
            return "has no line with that number"
        if mark.position > len(self._digests):
            return f"ends at line {len(self._digests)}, but it names line {mark.position}"
        if self._digests[mark.position - 1].hex() != mark.digest:
            return f"has another line {mark.position} than the line that it names"
        return None

    def append(self, values: Iterable[Any]) -> None:
        """Appends JSON values in one synced write; after a failure the next write starts from the last whole line."""
        values, digests, data = list(values), [self._digests[-1]], b""
        for value in values:
            text = json.dumps(value).encode()
            digests.append(_digest(self._key, digests[-1], text))
            data += digests[-1].hex().encode() + b" " + text + b"\n"
        self._write(data)
        self.lines += values
        self._digests += digests[1:]

    def _write(self, data: bytes) -> None:
        if self._handle is None:
            self._handle = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW)
            os.ftruncate(self._handle, self._length)
        try:
            with naming(self.path):
                if os.pwrite(self._handle, data, self._length) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._handle)
        except OSError:
            self.close()
            raise
        self._length += len(data)

    def _read(self) -> None:
        *whole, torn = self.path.read_bytes().split(b"\n")
        self._length = self.path.stat().st_size - len(torn)
        try:
            self.first = json.loads(whole[0].partition(b" ")[2])
            self.name, self._key = str(self.first["chain"]), bytes.fromhex(self.first["key"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(self.path, "is not a chain of checksummed lines, or its first line was changed", RESTORE) from error
        self.lines: list[Any] = []
        self._digests: list[bytes] = []
        for number, line in enumerate(whole):
            self._take(number, *line.partition(b" ")[::2])

    def _take(self, number: int, digest: bytes, text: bytes) -> None:
        expected = _digest(self._key, self._digests[-1] if number else b"", text)
        require(digest == expected.hex().encode(), self.path, f"line {number + 1} was changed, or one before it is missing", RESTORE)
        self._digests.append(expected)
        if number:
            self.lines.append(json.loads(text))

    def close(self) -> None:
        """Closes the file handle; a later append opens it again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __del__(self):
        if hasattr(self, "_handle"):
            self.close()


def _first_line(facts: dict[str, Any]) -> bytes:
    key = secrets.token_bytes(32)
    text = json.dumps(facts | {"key": key.hex()}).encode()
    return _digest(key, b"", text).hex().encode() + b" " + text + b"\n"


def _digest(key: bytes, before: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(before + text, key=key, digest_size=DIGEST_BYTES).digest()
