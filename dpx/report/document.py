"""A page as data: sections of paragraphs, tables, lists and figures, from which HTML and Markdown are written alike."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Paragraph:
    text: str


@dataclasses.dataclass(frozen=True)
class Items:
    """A list; with a `summary` it is folded away until asked for."""

    items: Sequence[str]
    summary: str = ""


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table. Cells equal to a verdict (`pass`, `fail`, `not run`) are drawn as one; a `summary` folds it away."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    summary: str = ""


@dataclasses.dataclass(frozen=True)
class Figure:
    """An SVG drawing that follows the reader's theme; `name` is its file name without ending, `png` the same on white where asked for."""

    name: str
    svg: str
    caption: str
    png: bytes = b""


Block = Paragraph | Items | Grid | Figure


@dataclasses.dataclass(frozen=True)
class Section:
    """`anchor` is the target of links within the page."""

    title: str
    blocks: Sequence[Block]
    anchor: str = ""


@dataclasses.dataclass(frozen=True)
class Document:
    title: str
    lead: Sequence[str]
    sections: Sequence[Section]

    @property
    def figures(self) -> list[Figure]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Figure)]
