"""Reads the user's text: `.txt` and `.jsonl` files, plain or gzipped, and folders of them."""

import hashlib
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from dpx.data.declared_data import TextFiles
from dpx.data.documents import Document
from dpx.data.files import digest_of, lines, named, parsed, require_characters
from dpx.data.unit_names import unit_name
from dpx.declaration import ConfigError, require

_SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")
# A short .gz file may hold a line that no memory holds.
_LONGEST = 1 << 26
_BLANK_LINE = re.compile(r"\n[ \t]*\n")


class TextFilesSource:
    """Yields documents of text files, one file after another, a line at a time.

    Without `unit_field` a document's unit is named by its content, not by file and line: the deletion of one document would rename every
    later one.
    """

    def __init__(self, declared: TextFiles):
        self._declared = declared
        self._files = named(declared.paths, _SUFFIXES, "data.source.paths")
        plain = [file for file in self._files if file.name.endswith((".txt", ".txt.gz"))]
        for key, default in (("text_field", "text"), ("unit_field", None)):
            field = getattr(declared, key)
            require(
                field == default or not plain,
                f"data.source.{key}={field}",
                f"{(plain or [''])[0]} is plain text, which has no fields",
                f"Remove data.source.{key}, or write the text as .jsonl with this field",
            )

    def fingerprint(self) -> str:
        """Returns a hash of the bytes of every file, in the order read."""
        return hashlib.sha256(b"".join(self._digests)).hexdigest()

    def parts(self) -> list[str]:
        """Returns the SHA-256 of every file."""
        return [digest.hex() for digest in self._digests]

    @cached_property
    def _digests(self) -> list[bytes]:
        return [digest_of(file) for file in self._files]

    def documents(self) -> Iterator[Document]:
        """Yields the documents.

        Raises `ConfigError`, naming file and line, for text that is missing, empty or not UTF-8, and for a line that is not a record.
        """
        for file in self._files:
            is_empty = True
            for document in self._documents(file):
                is_empty = False
                yield document
            require(not is_empty, file, "is empty", "Remove it from data.source.paths, or give it text")

    def _documents(self, file: Path) -> Iterator[Document]:
        if file.name.endswith((".jsonl", ".jsonl.gz")):
            for number, line in lines(file, longest=_LONGEST):
                document = self._record(f"{file}:{number}", line)
                if self._declared.document_per == "paragraph":
                    yield from (Document((paragraph,), document.unit_id) for paragraph in document.paragraphs)
                else:
                    yield document
        elif self._declared.document_per == "line":
            for _, line in lines(file, longest=_LONGEST):
                yield Document(paragraphs=(line,))
        else:
            text = "\n".join(line for _, line in lines(file, keep_blank=True, longest=_LONGEST))
            blocks = _BLANK_LINE.split(text) if _BLANK_LINE.search(text) else text.split("\n")
            paragraphs = tuple(" ".join(block.split()) for block in blocks if block.strip())
            if paragraphs:
                yield Document(paragraphs=paragraphs)

    def _record(self, place: str, line: str) -> Document:
        declared = self._declared
        record = parsed(place, line)
        if not isinstance(record, dict) or not isinstance(record.get(declared.text_field), str):
            fields = f"; its fields are {_fields_of(record)}" if isinstance(record, dict) else ""
            raise ConfigError(place, f"has no text under {declared.text_field!r}{fields}", "Name the field with data.source.text_field")
        require_characters(place, record[declared.text_field])
        unit_field = declared.unit_field
        fix = f"Give every record the name of its unit, or name the field with data.source.unit_field; its fields are {_fields_of(record)}"
        unit_id = None if unit_field is None else unit_name(place, record.get(unit_field), unit_field, fix)
        paragraphs = tuple(part for part in record[declared.text_field].split("\n") if part.strip())
        return Document(paragraphs=paragraphs, unit_id=unit_id)


def _fields_of(record: dict[str, Any]) -> str:
    return ", ".join(map(str, list(record)[:8]))
