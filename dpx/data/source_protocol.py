"""Defines the interface of a source of text in another package."""

from typing import TYPE_CHECKING, Any, ClassVar

from dpx.data.schema import Schema, running_text


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
