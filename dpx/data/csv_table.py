"""Reads labelled rows, or prompts with completions, of the user's files and data sets, one after another, a row at a time.

As in text files, rows without a named unit are named by their content and not by their position.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from dpx.data.completions import answered, halves
from dpx.data.documents import Example, Prompted
from dpx.data.labelled import Table
from dpx.data.record_reader import label_of, text_of, value_of
from dpx.data.unit_names import unit_name
from dpx.declaration import ConfigError, require


class TableSource:
    """Yields the training rows, then the rows of the test set, which are marked (`Example.is_test`)."""

    def __init__(self, declared: Table):
        self._declared = declared
        self._training, self._test = declared.training_sets(), declared.test_sets()
        both = sorted({one.identity for one in self._training} & {one.identity for one in self._test})
        require(not both, (both or [""])[0], "is named both as training data and as the test set", "Name it once")

    def fingerprint(self) -> str:
        """Returns a hash of the bytes of every file, in the order read, and of the name and revision of a data set on the hub."""
        whole = hashlib.sha256()
        for group in self._digests:
            whole.update(len(group).to_bytes(8, "little"))
            for digest in group:
                whole.update(digest)
        return whole.hexdigest()

    def parts(self) -> list[str]:
        """Returns the checksum of every file and data set."""
        return [digest.hex() for group in self._digests for digest in group]

    @cached_property
    def _digests(self) -> list[list[bytes]]:
        return [[one.digest() for one in group] for group in (self._training, self._test)]

    def documents(self) -> Iterator[Example] | Iterator[Prompted]:
        """Returns the rows. Raises `ConfigError`, naming file and row, for a row that lacks a column, a text or a declared label."""
        return self._prompted() if self._declared.has_completions else self._labelled()

    def _prompted(self) -> Iterator[Prompted]:
        for group in (self._training, self._test):
            for one in group:
                for where, record in one.records():
                    yield _prompted(self._declared, where, record, is_test=group is self._test)

    def _labelled(self) -> Iterator[Example]:
        declared = self._declared
        place = {label: number for number, label in enumerate(declared.classes)}
        seen: set[int] = set()
        for one in self._training:
            for where, record in one.records():
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
        for one in self._test:
            for where, record in one.records():
                yield _example(declared, place, where, record, is_test=True)


def _example(declared: Table, place: Mapping[str, int], where: str, record: Mapping[str, Any], *, is_test: bool) -> Example:
    label = label_of(where, record, declared.label_field)
    if label not in place:
        known = ", ".join(list(place)[:5]) + (", ..." if len(place) > 5 else "")
        raise ConfigError(where, f"has the label {label!r}, which is not among {known}", "Correct the row, or data.source.labels")
    pairs = declared.texts.read_texts(where, record)
    return Example(texts=pairs, label=place[label], unit_id=_unit(where, record, declared.unit_field), is_test=is_test, where=where)


def _prompted(declared: Table, where: str, record: Mapping[str, Any], *, is_test: bool) -> Prompted:
    unit_id = _unit(where, record, declared.unit_field)
    if declared.messages_field is not None:
        fields = declared.messages_field, declared.tools_field, declared.documents_field
        return Prompted(where, chat=answered(where, record, *fields), unit_id=unit_id, is_test=is_test)
    assert declared.prompt_field is not None and declared.completion_field is not None
    first, second = halves(declared.template)
    prompt = first.format(prompt=text_of(where, record, declared.prompt_field))
    completion = second.format(completion=text_of(where, record, declared.completion_field))
    return Prompted(where, texts=(prompt, completion), unit_id=unit_id, is_test=is_test)


def _unit(where: str, record: Mapping[str, Any], field: str | None) -> str | None:
    return None if field is None else unit_name(where, value_of(where, record, field), field)
