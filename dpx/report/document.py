"""A page as Markdown blocks and figures: README.md as it is, and one HTML page that makes no network request and runs no script."""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from dpx.report.theme import CSS_COLOURS

# Not by colour alone.
_SIGNS = {"pass": "✅ pass", "fail": "❌ fail", "not run": "◻️ not run"}


@dataclasses.dataclass(frozen=True)
class Figure:
    """An SVG drawing that follows the reader's theme; `name` is its file name without ending, `png` the same on white if asked for."""

    name: str
    svg: str
    caption: str
    png: bytes = b""


@dataclasses.dataclass(frozen=True)
class Section:
    """`blocks` are Markdown without HTML, and figures; `anchor` is the target of links within the page."""

    title: str
    blocks: Sequence[str | Figure]
    anchor: str


@dataclasses.dataclass(frozen=True)
class Document:
    title: str
    lead: Sequence[str]
    sections: Sequence[Section]

    @property
    def figures(self) -> list[Figure]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Figure)]


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]], summary: str = "") -> str:
    """Returns a table as Markdown; a cell that is a verdict (`pass`, `fail`, `not run`) gets its sign."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ([str(_SIGNS.get(cell, cell)).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return folded("\n".join(f"| {' | '.join(line)} |" for line in cells), summary)


def items(lines: Sequence[str], summary: str = "") -> str:
    """Returns a list as Markdown."""
    return folded("\n".join(f"- {line}" for line in lines), summary)


def folded(text: str, summary: str) -> str:
    """Returns Markdown that is folded away under its summary until a reader opens it; without a summary the text itself."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>" if summary else text


def markdown(document: Document) -> str:
    """Returns the whole page as Markdown, its figures in `figures/` beside it."""
    parts = [f"# {document.title}", *document.lead]
    for section in document.sections:
        parts.append(f'<a id="{section.anchor}"></a>\n\n## {section.title}')
        for block in section.blocks:
            is_text = isinstance(block, str)
            parts.append(block if is_text else f"![{block.caption}](figures/{block.name}.svg)\n\n*{block.caption}*")
    return "\n\n".join(parts) + "\n"


def html(document: Document) -> str:
    """Returns the page's Markdown as one HTML file that holds its figures, light or dark by the reader's setting."""
    # Tags within a paragraph or a cell are text; only the lines of `folded` and of anchors become tags.
    body = MarkdownIt("commonmark").enable("table").disable("html_inline").render(markdown(document))
    body = re.sub(r"<p>&lt;a id=&quot;([^&]+)&quot;&gt;&lt;/a&gt;</p>\n<h2>", r'<h2 id="\1">', body)
    body = re.sub(r"<table>.*?</table>", _table, body, flags=re.S)
    drawings = {figure.name: figure.svg for figure in document.figures}
    image = r'<p><img src="figures/([^"]+)\.svg"[^>]*></p>\n<p><em>(.*?)</em></p>'
    body = re.sub(image, lambda found: f"<figure>{drawings[found[1]]}<figcaption>{found[2]}</figcaption></figure>", body)
    links = "".join(f'<a href="#{section.anchor}">{escape(section.title)}</a>' for section in document.sections)
    colours = f":root {{ {CSS_COLOURS[0]} }} @media (prefers-color-scheme: dark) {{ :root {{ {CSS_COLOURS[1]} }} }}"
    style = f"{colours}\n{(Path(__file__).parent / 'page.css').read_text()}"
    # An empty icon: otherwise a browser asks the server for one.
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    head += f"<title>{escape(document.title)}</title><style>{style}</style>"
    body = body.replace("<h2", f"<nav>{links}</nav>\n<h2", 1)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}</body></html>\n'


def _table(found: re.Match[str]) -> str:
    """Returns a table as HTML; each cell has the name of its column, which is shown when a narrow screen stacks the cells."""
    columns = itertools.cycle([re.sub(r"<[^>]+>", "", column) for column in re.findall(r"<th>(.*?)</th>", found[0])])
    named = re.sub("<td>", lambda _: f'<td data-column="{next(columns)}">', found[0])
    return f'<div class="wide">{named}</div>'
