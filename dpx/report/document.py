"""A page as Markdown blocks and figures: README.md as it is, and one HTML page that makes no network request and runs no script."""

import dataclasses
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from dpx.report.theme import CSS_COLOURS

# Not by colour alone.
_SIGNS = {"pass": "✅ pass", "fail": "❌ fail", "not run": "◻️ not run"}


@dataclasses.dataclass(frozen=True)
class Text:
    """Markdown without HTML; with a `summary` it is folded away until asked for."""

    text: str
    summary: str = ""


@dataclasses.dataclass(frozen=True)
class Figure:
    """An SVG drawing that follows the reader's theme; `name` is its file name without ending, `png` the same on white if asked for."""

    name: str
    svg: str
    caption: str
    png: bytes = b""


@dataclasses.dataclass(frozen=True)
class Section:
    """`anchor` is the target of links within the page."""

    title: str
    blocks: Sequence[Text | Figure]
    anchor: str


@dataclasses.dataclass(frozen=True)
class Document:
    title: str
    lead: Sequence[str]
    sections: Sequence[Section]

    @property
    def figures(self) -> list[Figure]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Figure)]


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]], summary: str = "") -> Text:
    """Returns a table as Markdown; a cell that is a verdict (`pass`, `fail`, `not run`) gets its sign."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ([str(_SIGNS.get(cell, cell)).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return Text("\n".join(f"| {' | '.join(line)} |" for line in cells), summary)


def items(lines: Sequence[str], summary: str = "") -> Text:
    """Returns a list as Markdown."""
    return Text("\n".join(f"- {line}" for line in lines), summary)


def markdown(document: Document) -> str:
    """Returns the whole page as Markdown, its figures in `figures/` beside it."""
    parts = [f"# {document.title}", *document.lead]
    for section in document.sections:
        parts.append(f'<a id="{section.anchor}"></a>\n\n## {section.title}')
        for block in section.blocks:
            if isinstance(block, Figure):
                parts.append(f"![{block.caption}](figures/{block.name}.svg)\n\n*{block.caption}*")
            else:
                text = f"<details><summary>{block.summary}</summary>\n\n{block.text}\n\n</details>"
                parts.append(text if block.summary else block.text)
    return "\n\n".join(parts) + "\n"


def html(document: Document) -> str:
    """Returns the whole page as one HTML file, light or dark by the reader's setting."""
    links = "".join(f'<a href="#{section.anchor}">{escape(section.title)}</a>' for section in document.sections)
    colours = f":root {{ {CSS_COLOURS[0]} }} @media (prefers-color-scheme: dark) {{ :root {{ {CSS_COLOURS[1]} }} }}"
    style = f"{colours}\n{(Path(__file__).parent / 'page.css').read_text()}"
    # An empty icon: otherwise a browser asks the server for one.
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    body = [
        f"<h1>{escape(document.title)}</h1>",
        *(f'<div class="lead">{_html(line)}</div>' for line in document.lead),
        f"<nav>{links}</nav>",
    ]
    for section in document.sections:
        blocks = "\n".join(_block(block) for block in section.blocks)
        body.append(f'<section id="{section.anchor}"><h2>{escape(section.title)}</h2>\n{blocks}</section>')
    head += f"<title>{escape(document.title)}</title><style>{style}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _block(block: Text | Figure) -> str:
    if isinstance(block, Figure):
        return f"<figure>{block.svg}<figcaption>{escape(block.caption)}</figcaption></figure>"
    return f"<details><summary>{escape(block.summary)}</summary>{_html(block.text)}</details>" if block.summary else _html(block.text)


def _html(text: str) -> str:
    """Returns Markdown as HTML; each cell of a table has the name of its column, which is shown when a narrow screen stacks the cells."""
    rendered = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    columns = [escape(re.sub(r"<[^>]+>", "", column)) for column in re.findall(r"<th>(.*?)</th>", rendered)]
    places = iter(range(rendered.count("<td>")))
    named = re.sub("<td>", lambda _: f'<td data-column="{columns[next(places) % len(columns)]}">', rendered)
    return named.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
