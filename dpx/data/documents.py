"""Defines the records of a source: documents or labelled examples one after another, and a fingerprint of its content."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Document:
    """Holds one text, paragraph by paragraph, and the unit of privacy that it belongs to.

    With `unit_id=None` the unit is named by the document's content; equal documents are one unit, kept once, or one unit each
    (`equal_rows` of the source). Its position in the corpus must not be its name: the deletion of one document would rename all
    later ones, and so change their split and their draws.

    Attributes:
        paragraphs: The text.
        unit_id: The name of the unit, such as an author.
    """

    paragraphs: tuple[str, ...]
    unit_id: str | None = None

    def content(self) -> str:
        """Returns the 128-bit hash of the text, as 32 hexadecimal digits."""
        return hashlib.sha256("\n".join(self.paragraphs).encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Example:
    """Holds the content of one labelled row: a text, a pair of texts that are read together, or several of these for multiple choice.

    Attributes:
        texts: One tuple of segments (one, or two of a pair) for each text.
        label: The position of the label in the declared list, or of the right text among `texts`; a number, `None` for a row without one;
            or for each of several labels 1, 0, or 2 if it is not known.
        unit_id: The name of the unit, as for a `Document`.
        is_test: Whether the example is of a test set. It stays in the test set, whatever its unit, and equal ones all count.
        where: The place of the row, for error messages.
    """

    texts: tuple[tuple[str, ...], ...]
    label: int | float | tuple[int, ...] | None
    unit_id: str | None = None
    is_test: bool = False
    where: str = field(default="a row", compare=False)

    @property
    def paragraphs(self) -> tuple[str, ...]:
        return tuple(segment for text in self.texts for segment in text)

    def content(self) -> str:
        """Returns the 128-bit hash of the label and the texts, each with its length, as 32 hexadecimal digits."""
        framed = json.dumps([self.label, self.texts])
        return hashlib.sha256(framed.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Holds what a chat template writes: messages, and the tools and documents that a row gives it, if any."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    documents: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Prompted:
    """Holds the content of one row that is a prompt and its completion.

    Attributes:
        where: The place of the row, for error messages.
        texts: The prompt and the completion; empty if a `chat` is given.
        chat: A conversation, whose last message is the completion.
        unit_id: The name of the unit, as for a `Document`.
        is_test: Whether it is of a test set, as for an `Example`.
    """

    where: str
    texts: tuple[str, ...] = ()
    chat: Conversation | None = None
    unit_id: str | None = None
    is_test: bool = False

    @property
    def paragraphs(self) -> tuple[str, ...]:
        return self.texts if self.chat is None else tuple(message.get("content") or "" for message in self.chat.messages)

    def content(self) -> str:
        """Returns the 128-bit hash of the texts, or of all that the chat template reads, as 32 hexadecimal digits."""
        chat = self.chat or Conversation(())
        beside = [] if chat.tools is chat.documents is None else [chat.tools, chat.documents]
        framed = json.dumps([self.texts, chat.messages, *beside], sort_keys=True, default=str)
        return hashlib.sha256(framed.encode()).hexdigest()[:32]


@runtime_checkable
class Source(Protocol):
    """Yields records and can be read several times: preparation reads them once, or twice if it fits a vocabulary.

    Records are documents, which are cut into rows, or examples or prompts, each of which is one row (`columns` of the declaration).
    """

    def documents(self) -> Iterator[Document | Example | Prompted]:
        """Yields all records, the same ones in the same order at every call; no record depends on another."""
        ...

    def fingerprint(self) -> str:
        """Returns a text that changes when the records change; prepared rows are identified by it."""
        ...
