"""Records of a source: documents or labelled examples one after another, and a fingerprint of its content."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


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


@dataclass(frozen=True, slots=True)
class Example:
    """One row's content: a text, a pair of texts that are read together, or, for multiple choice, several of these.

    `label` is the position in the declared list of labels, or of the right text among `texts`. Units are named as for documents.
    An example of a test set (`is_test`) stays in it, whatever its unit, and all of them count, equal ones too.
    """

    texts: tuple[tuple[str, ...], ...]
    label: int
    unit_id: str | None = None
    is_test: bool = False

    @property
    def paragraphs(self) -> tuple[str, ...]:
        return tuple(segment for text in self.texts for segment in text)

    def content(self) -> str:
        """128-bit hash of label and texts, each framed, as 32 hexadecimal digits."""
        framed = json.dumps([self.label, self.texts])
        return hashlib.sha256(framed.encode()).hexdigest()[:32]


@runtime_checkable
class Source(Protocol):
    """Re-readable records: preparation passes over them once, or twice when it fits a vocabulary.

    They are documents, which are cut into rows, or examples, each of which is one; `columns` of the declaration says what rows hold.
    """

    def documents(self) -> Iterator[Document] | Iterator[Example]: ...

    def fingerprint(self) -> str: ...
