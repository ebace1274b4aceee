"""Opens each kind of declared source: reads text files, tables and data sets one after another, a record at a time.

A document or a row without a named unit is named by its content, not by its position: the deletion of one would rename every later one.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from dpx import packages
from dpx.data.completions import answered, halves
from dpx.data.declared_data import Embedded, Hub, RandomRows, Synthetic, SyntheticLabels, TextFiles
from dpx.data.declared_data import Source as DeclaredSource
from dpx.data.documents import Document, Example, Prompted, Source
from dpx.data.embedded import EmbeddedSource, SyntheticLabelsSource, SyntheticSource
from dpx.data.labelled import Table, labels_of, number_of
from dpx.data.record_reader import content_of, digest_of, label_of, lines, load, named, parsed, require_characters, text_of, value_of
from dpx.data.schema import PackageSource
from dpx.data.unit_names import unit_name
from dpx.declaration import ConfigError, require


class HubSource:
    """Yields the documents of several corpora, one after another; with `streaming` only the current block is downloaded."""

    def __init__(self, declared: Hub):
        self._declared = declared

    def fingerprint(self) -> str:
        """Returns a hash of the declaration, and of the content of folders on this machine.

        A hub corpus is identified by its name and `revision` alone, so a prepared store opens again without a network.
        """
        whole = hashlib.sha256(json.dumps([dict(corpus) for corpus in self._declared.corpora], sort_keys=True).encode())
        for corpus in self._declared.corpora:
            folder = Path(str(corpus["name"]))
            whole.update(content_of(folder) if folder.is_dir() else b"")
        return whole.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yields the documents. Raises `ConfigError` if a corpus cannot be loaded, or a record lacks the declared field."""
        for corpus in self._declared.corpora:
            text_field = corpus.get("text_field") or "text"
            named = {"split": corpus.get("split") or "train", "config": corpus.get("config"), "revision": corpus.get("revision")}
            loaded = load(str(corpus["name"]), asked="data=hub", streaming=self._declared.streaming, **named)
            for number, record in enumerate(loaded):
                yield _document(record, f"{corpus['name']}[{number}]", text_field, corpus.get("unit_field"))


def _document(record: Mapping[str, Any], place: str, text_field: str, unit_field: str | None) -> Document:
    for field in filter(None, (text_field, unit_field)):
        if record.get(field) is None:
            reason = f"has no value under {field!r}; its fields are {sorted(record)}"
            raise ConfigError(place, reason, "Correct the corpus in data.source.corpora")
    fix = "Give every record this field, or correct data.source.corpora"
    unit_id = unit_name(place, record[unit_field], unit_field, fix) if unit_field else None
    paragraphs = tuple(part for part in str(record[text_field]).split("\n") if part.strip())
    return Document(paragraphs=paragraphs, unit_id=unit_id)


class TableSource:
    """Yields the training rows, then the rows of the test set, which are marked (`Example.is_test`)."""

    def __init__(self, declared: Table):
        self._declared = declared
        self._training, self._test = declared.training_sets(), declared.test_sets()
        both = sorted({one.identity for one in self._training} & {one.identity for one in self._test})
        require(not both, (both or [""])[0], "is named both as training data and as the test set", "Name it once")

    def fingerprint(self) -> str:
        """Returns a hash of the bytes of every file, in the order read, and of the name and revision of a data set on the hub."""
        whole, count = hashlib.sha256(), len(self._training)
        for group in (self.digests[:count], self.digests[count:]):
            whole.update(len(group).to_bytes(8, "little") + b"".join(group))
        return whole.hexdigest()

    @cached_property
    def digests(self) -> list[bytes]:
        """The checksum of every file and data set."""
        return [one.digest() for one in (*self._training, *self._test)]

    def documents(self) -> Iterator[Example | Prompted]:
        """Returns the rows. Raises `ConfigError`, naming file and row, for a row that lacks a column, a text or a declared label."""
        declared, seen = self._declared, set[int]()
        place = {label: number for number, label in enumerate(declared.classes)}
        for one in self._training:
            for where, record in one.records():
                row = self._row(place, where, record, is_test=False)
                if isinstance(row, Example):
                    seen |= _seen(row.label)
                yield row
        unseen = [label for label, number in place.items() if number not in seen]
        kinds = {"target_field": declared.target_field, "label_names": declared.label_names}
        key = next((name for name, one in kinds.items() if one is not None), "labels")
        reason = "no training row has this label" if len(unseen) == 1 else f"no training row has these {len(unseen)} labels"
        require(
            not unseen or declared.allow_unseen_labels,
            f"data.source.{key}: {', '.join(unseen[:3])}",
            "no training row has a number there" if declared.target_field is not None else reason,
            "Correct the list, or add data.source.allow_unseen_labels=true",
        )
        for one in self._test:
            for where, record in one.records():
                yield self._row(place, where, record, is_test=True)

    def _row(self, place: Mapping[str, int], where: str, record: Mapping[str, Any], *, is_test: bool) -> Example | Prompted:
        """Returns a record as a labelled row, whose label has its number in `place`, or as a prompt with its completion."""
        declared = self._declared
        if not declared.has_completions:
            texts, unit_id = declared.texts.read_texts(where, record), _unit(where, record, declared.unit_field)
            if declared.target_field is not None:
                return Example(texts, number_of(where, record, declared.target_field), unit_id, is_test, where)
            if declared.label_names is not None:
                several = labels_of(where, record, declared.classes, declared.labels_field)
                return Example(texts, several, unit_id, is_test, where)
            label = label_of(where, record, declared.label_field)
            if label not in place:
                known = ", ".join(list(place)[:5]) + (", ..." if len(place) > 5 else "")
                raise ConfigError(where, f"has the label {label!r}, which is not among {known}", "Correct the row, or data.source.labels")
            return Example(texts, place[label], unit_id, is_test, where)
        unit_id = _unit(where, record, declared.unit_field)
        if declared.messages_field is not None:
            fields = declared.messages_field, declared.tools_field, declared.documents_field
            return Prompted(where, chat=answered(where, record, *fields, declared.loss_on), unit_id=unit_id, is_test=is_test)
        assert declared.prompt_field is not None and declared.completion_field is not None
        first, second = halves(declared.template)
        prompt = first.format(prompt=text_of(where, record, declared.prompt_field))
        completion = second.format(completion=text_of(where, record, declared.completion_field))
        return Prompted(where, texts=(prompt, completion), unit_id=unit_id, is_test=is_test)


_SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")
# A short .gz file may hold a line that no memory holds.
_LONGEST = 1 << 26
_BLANK_LINE = re.compile(r"\n[ \t]*\n")


def _seen(label: Any) -> set[int]:
    """Returns the numbers of the declared labels that a row has; the column of a number is label 0."""
    if isinstance(label, tuple):
        return {number for number, is_true in enumerate(label) if is_true == 1}
    return {label} if isinstance(label, int) else set() if label is None else {0}


def _unit(where: str, record: Mapping[str, Any], field: str | None) -> str | None:
    return None if field is None else unit_name(where, value_of(where, record, field), field)


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
        return hashlib.sha256(b"".join(self.digests)).hexdigest()

    @cached_property
    def digests(self) -> list[bytes]:
        """The SHA-256 of every file."""
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


class _OfPackage:
    """Adapts a package's source to `Source`; its fingerprint also covers the version of the package."""

    def __init__(self, declared: PackageSource):
        self._kind, self._source = type(declared), declared.open()

    def documents(self) -> Iterator[Document | Example | Prompted]:
        return self._source.documents()

    def fingerprint(self) -> str:
        kind = self._kind
        version = packages.version_of(kind.__module__.partition(".")[0])
        return f"{kind.__module__}.{kind.__qualname__} {version} {self._source.fingerprint()}"


def parts_of(source: Source) -> list[str]:
    """Returns a checksum of each whole file that a source reads; that of the whole source if it does not read files."""
    is_of_files = isinstance(source, TextFilesSource | TableSource)
    return [digest.hex() for digest in source.digests] if is_of_files else [source.fingerprint()]


def open_source(declared: DeclaredSource) -> Source:
    """Returns the reader of a declared source."""
    match declared:
        case Embedded():
            return EmbeddedSource()
        case TextFiles():
            return TextFilesSource(declared)
        case Table():
            return TableSource(declared)
        case Synthetic():
            return SyntheticSource(declared)
        case SyntheticLabels():
            return SyntheticLabelsSource(declared)
        case Hub():
            return HubSource(declared)
        case PackageSource():
            return _OfPackage(declared)
        case RandomRows():
            raise ConfigError(
                "data.source.kind=random",
                "random rows contain nothing that a model can learn",
                "Use job=benchmark, job=plan with data.declared_size=<rows>, or another data",
            )
