"""What a source gives: documents one after another, and a fingerprint of its content."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dpx.data.declarations import Embedded, Hub, RandomRows, Synthetic, TextFiles
from dpx.data.declarations import Source as Declared
from dpx.declaration import Refused


@dataclass(frozen=True, slots=True)
class Document:
    """One text, paragraph by paragraph, and the unit of privacy it belongs to.

    `unit_id=None` names the unit by the document's own content. A position in the corpus would not do: deleting one
    document would rename, and so re-split and re-draw, every later one. Equal documents then are one unit, kept once.
    """

    paragraphs: tuple[str, ...]
    unit_id: str | None = None

    def content(self) -> str:
        """128-bit hash of the text, as 32 hexadecimal digits."""
        return hashlib.sha256("\n".join(self.paragraphs).encode("utf-8", "surrogatepass")).hexdigest()[:32]


@runtime_checkable
class Source(Protocol):
    """Re-readable documents: preparation passes over them once, or twice when it fits a vocabulary."""

    def documents(self) -> Iterator[Document]: ...

    def fingerprint(self) -> str: ...


def open_source(declared: Declared) -> Source:
    """The reader of a declared source."""
    match declared:
        case Embedded():
            from dpx.data.embedded import EmbeddedSource

            return EmbeddedSource()
        case TextFiles():
            from dpx.data.text_files import TextFilesSource

            return TextFilesSource(declared)
        case Synthetic():
            from dpx.data.synthetic import SyntheticSource

            return SyntheticSource(declared)
        case Hub():
            from dpx.data.hub import HubSource

            return HubSource(declared)
        case RandomRows():
            raise Refused(
                "data.source.kind=random", "random rows hold nothing to train on", "Use job=benchmark or job=plan, or another data"
            )
