"""Defines the arrays of a row: what a task reads, a source provides and a store holds.

A column's name has one meaning everywhere. `tokens`: a text A, or two texts A and B, with the marks around them ([CLS] A [SEP] B [SEP]),
then padding. `length`: the number of tokens before the padding. `segment_start`: where the second segment begins, which is B with its
marks, equal to `length` without one.
Of a prompt and its completion, B is the completion. `is_learnt`: 1 for each token that is learnt, where some in the middle are not.
`is_next`: 1 if B truly follows A.
`label`: the class, by its index in the declared list, or the index of the right one among several texts.
`target`: a number, 0 where `has_target` is 0. `labels`: for each label of the declared list 1 if it is true of the text, else 0, or 2 if
that is not known.

A source of text in another package provides these arrays as a `PackageSource`.

Shape legend: n rows, C texts of one row (an axis that exists only if one of several texts is to be chosen), T positions of a text.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from dpx.declaration import ConfigError, require


@dataclass(frozen=True)
class Column:
    """Describes one array of a row.

    `type` is the element type on disk; integers are in [0, `below`); the last axis of `is_text` counts tokens.
    """

    type: Literal["uint8", "uint16", "uint32", "float32"]
    shape: tuple[int, ...] = ()
    below: int | None = None
    is_text: bool = False

    @property
    def dtype(self) -> np.dtype:
        """The type in the store: little-endian on every machine."""
        return np.dtype(self.type).newbyteorder("<")

    @property
    def read_as(self) -> np.dtype:
        """The type that a reader gets: int32, or float32 for values that are not integers."""
        return np.dtype(np.float32 if self.type == "float32" else np.int32)


Schema = dict[str, Column]
# The value of a label (of several) that a row does not give.
UNKNOWN = 2
Columns = dict[str, np.ndarray]  # [n, *shape] by name


def texts(sequence_length: int, vocabulary_size: int, choices: int | None = None) -> Schema:
    """Returns the columns `tokens` [T], `segment_start` and `length` [], or [C,T], [C] and [C] for rows of several texts."""
    of_text = () if choices is None else (choices,)
    tokens = Column("uint16" if vocabulary_size <= 2**16 else "uint32", (*of_text, sequence_length), vocabulary_size, is_text=True)
    place = Column("uint16" if sequence_length < 2**16 else "uint32", of_text, sequence_length + 1)
    return {"tokens": tokens, "segment_start": place, "length": place}


def running_text(sequence_length: int, vocabulary_size: int, is_paired: bool) -> Schema:
    """Returns the columns of `texts` and, for pairs, `is_next`."""
    of_text = texts(sequence_length, vocabulary_size)
    return of_text | {"is_next": classes(2)} if is_paired else of_text


def classes(count: int) -> Column:
    """Returns the column of one of `count` values a row."""
    return Column("uint8" if count <= 2**8 else "uint16" if count <= 2**16 else "uint32", (), count)


def number() -> Schema:
    """Returns the columns of a number of each row, which it may lack: `target`, and `has_target` (0 or 1)."""
    return {"target": Column("float32"), "has_target": classes(2)}


def several_labels(count: int) -> Schema:
    """Returns the column of `count` labels of each row: 0, 1, or `UNKNOWN`."""
    return {"labels": Column("uint8", (count,), UNKNOWN + 1)}


def as_json(schema: Schema) -> dict[str, Any]:
    """Returns the schema as plain values, for a manifest."""
    return {name: asdict(column) | {"shape": list(column.shape)} for name, column in schema.items()}


def from_json(plain: Mapping[str, Any]) -> Schema:
    """Returns the schema from the output of `as_json`."""
    return {name: Column(**{**column, "shape": tuple(column["shape"])}) for name, column in plain.items()}


def stored(columns: Columns, schema: Schema, where: object) -> Columns:
    """Returns `columns` in their types on disk. Raises `ConfigError`, naming `where` and the column, for any that does not fit the
    schema."""
    require(set(columns) == set(schema), where, f"returned columns {sorted(columns)}, but declared {sorted(schema)}", _SOURCE)
    found = {}
    for name, column in schema.items():
        values = np.asarray(columns[name])
        reason = f"returned {name} of shape {list(values.shape[1:])}, but declared {list(column.shape)}"
        require(values.shape[1:] == column.shape, where, reason, _SOURCE)
        if column.below is not None and values.size:
            least, most = int(values.min()), int(values.max())
            reason = f"returned {name} with values from {least} to {most}, but declared values from 0 to {column.below - 1}"
            require(0 <= least and most < column.below, where, reason, _SOURCE)
        found[name] = values.astype(column.dtype)
    return found


_SOURCE = "Correct the source, or the columns that it declares"


def require_gives(available: Schema, required: Schema, data: str, task: str) -> None:
    """Raises `ConfigError` if rows of `available` columns lack one that is `required`, or hold it in another form."""
    for name, column in required.items():
        if name not in available:
            raise ConfigError(
                f"data={data}",
                f"its rows have no column {name}, which task={task} reads",
                "Use data that has this column, or another task",
            )
        available_column = available[name]
        if available_column.shape != column.shape:
            reason = f"its column {name} has shape {list(available_column.shape)} in each row, but task={task} reads {list(column.shape)}"
            raise ConfigError(f"data={data}", reason, "Use data of that form, or another task")
        if available_column.below != column.below:
            reason = f"its column {name} has {available_column.below} different values, but task={task} is declared for {column.below}"
            raise ConfigError(f"data={data}", reason, f"Declare the task for {available_column.below} values")


class PackageSource:
    """Is the base class of the sources of packages: a source is declared in YAML, and opened when rows are prepared.

    A source must define `open`.
    """

    if TYPE_CHECKING:

        @property
        def kind(self) -> str: ...

    # Whether opening it starts a download: a plan then does not count rows, and requires `data.declared_size`.
    is_remote: ClassVar[bool] = False

    @property
    def names_units(self) -> bool:
        """Whether every document names its unit (`Document.unit_id`), so that an author can be the unit of privacy."""
        return False

    def columns(self, sequence_length: int, vocabulary_size: int, is_paired: bool) -> Schema:
        """Returns the columns of a row, by default the columns of running text.

        A source of labelled `Example`s adds the column `label`, and has an attribute `labels`.

        Args:
            sequence_length: Tokens of a row.
            vocabulary_size: V.
            is_paired: Whether a row is a pair of segments.
        """
        return running_text(sequence_length, vocabulary_size, is_paired)

    def open(self) -> Any:
        """Returns a `dpx.data.documents.Source`.

        Its `documents()` yields `Document`s or `Example`s, the same ones at every pass; its `fingerprint()` returns a text that changes
        when they change.
        """
        raise NotImplementedError
