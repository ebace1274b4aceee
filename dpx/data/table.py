"""Labelled rows of the user's files, one file after another, a row at a time.

Like text files, rows without a named unit are named by their content and not by their place.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from dpx.data.documents import Example
from dpx.data.files import named, reading
from dpx.data.labelled import Table
from dpx.data.records import SUFFIXES, label_of, records, value_of
from dpx.declaration import ConfigError, require


class TableSource:
    """Training rows, then those of the test set, which say so (`Example.is_test`)."""

    def __init__(self, declared: Table):
        self._declared = declared
        self._training = named(declared.paths, SUFFIXES, "data.source.paths")
        self._test = [] if declared.test_paths is None else named(declared.test_paths, SUFFIXES, "data.source.test_paths")
        both = sorted({file.resolve() for file in self._training} & {file.resolve() for file in self._test})
        require(not both, (both or [""])[0], "is named for training and as test set", "Name it once")

    def fingerprint(self) -> str:
        """Hash of the bytes of every file, in the order read."""
        whole = hashlib.sha256()
        for group in (self._training, self._test):
            whole.update(len(group).to_bytes(8, "little"))
            for file in group:
                with reading(file), file.open("rb") as opened:
                    whole.update(hashlib.file_digest(opened, "sha256").digest())
        return whole.hexdigest()

    def documents(self) -> Iterator[Example]:
        """Raises `ConfigError`, naming file and row, for one that lacks a column, a text or a declared label."""
        declared = self._declared
        place = {label: number for number, label in enumerate(declared.classes)}
        seen: set[int] = set()
        for file in self._training:
            for where, record in records(file):
                example = _example(declared, place, where, record, is_test=False)
                seen.add(example.label)
                yield example
        unseen = [label for label, number in place.items() if number not in seen]
        require(
            not unseen or declared.allow_unseen_labels,
            f"data.source.labels: {', '.join(unseen[:3])}",
            "no training row has this label" if len(unseen) == 1 else f"no training row has these {len(unseen)} labels",
            "Correct the list, or add data.source.allow_unseen_labels=true",
        )
        for file in self._test:
            for where, record in records(file):
                yield _example(declared, place, where, record, is_test=True)


def _example(declared: Table, place: Mapping[str, int], where: str, record: Mapping[str, Any], *, is_test: bool) -> Example:
    label = label_of(where, record, declared.label_field)
    if label not in place:
        known = ", ".join(list(place)[:5]) + (", ..." if len(place) > 5 else "")
        raise ConfigError(where, f"has the label {label!r}, which is not among {known}", "Correct the row, or data.source.labels")
    pairs = declared.texts.of(where, record)
    unit_id = None if declared.unit_field is None else _name(where, record, declared.unit_field)
    return Example(texts=pairs, label=place[label], unit_id=unit_id, is_test=is_test)


def _name(where: str, record: Mapping[str, Any], field: str) -> str:
    value = value_of(where, record, field)
    is_name = isinstance(value, str | int) and str(value) != ""
    require(is_name, where, f"names no unit under {field!r}", "Give every row one, or unset data.source.unit_field")
    return str(value)
