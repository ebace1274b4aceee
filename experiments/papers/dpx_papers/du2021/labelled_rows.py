"""Reads labelled rows of GLUE files as declared by a data group, for analyses that read texts without preparing a run's data."""

from collections.abc import Sequence

from dpx.data.labelled import Table
from dpx.data.record_reader import RowSet, label_of
from dpx.declaration import ConfigError


def is_present(source: Table) -> bool:
    """Returns whether the files of the training rows exist on this machine."""
    try:
        return bool(source.training_sets())
    except ConfigError:
        return False


def texts_and_labels(source: Table) -> tuple[list[tuple[str, ...]], list[int]]:
    """Returns every training row's text (or pair of texts) and the index of its label among the classes. Raises `ConfigError` for a bad
    row."""
    places = {label: place for place, label in enumerate(source.classes)}
    texts, labels = [], []
    for one in source.training_sets():
        for where, record in one.records():
            texts.append(source.texts.read_texts(where, record)[0])
            labels.append(places[label_of(where, record, source.label_field)])
    return texts, labels


def count(source: Table) -> tuple[int, int]:
    """Returns the numbers of rows of the training files and of the test files, without header and blank lines."""
    return _records(source.training_sets()), _records(source.test_sets())


def _records(sets: Sequence[RowSet]) -> int:
    return sum(1 for one in sets for _ in one.records())
