"""A source of text that a package brings."""

from typing import TYPE_CHECKING, Any, ClassVar

from dpx.data.schema import Schema, running_text


class PackageSource:
    """Declared in YAML, opened when rows are prepared."""

    if TYPE_CHECKING:

        @property
        def kind(self) -> str: ...

    # Whether opening it downloads: a plan then counts nothing, and asks for `data.declared_size`.
    is_remote: ClassVar[bool] = False

    @property
    def names_units(self) -> bool:
        """Whether every document says whose it is (`Document.unit_id`), so that an author can be the unit of privacy."""
        return False

    def columns(self, sequence_length: int, vocabulary_size: int, is_paired: bool) -> Schema:
        """What rows hold; by default those of running text. A source of labelled `Example`s says `label` too, and has `labels`."""
        return running_text(sequence_length, vocabulary_size, is_paired)

    def open(self) -> Any:
        """A `dpx.data.documents.Source`: `documents()` yields `Document`s or `Example`s, the same at every pass; `fingerprint()` is a text
        that changes whenever they do."""
        raise NotImplementedError
