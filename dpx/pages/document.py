"""A page as Markdown blocks and figures: README.md as it is, and one HTML page that makes no network request and runs no script."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

# Colours of pages and figures, as CSS variables with a light and a dark value.
_LIGHT = {
    "paper": "#ffffff", "ink": "#1c1c1e", "soft": "#5c5f66", "rule": "#d9dbe0", "shade": "#f1f2f4", "good": "#0b6e4f", "bad": "#b3261e",
    "s1": "#0060a0", "s2": "#c44e00", "s3": "#00795a", "s4": "#9b3f7a", "s5": "#6f6400",
}  # fmt: skip
_DARK = {
    "paper": "#16181c", "ink": "#e6e7ea", "soft": "#a2a6ae", "rule": "#363a41", "shade": "#24272d", "good": "#4fd1a5", "bad": "#ff8a80",
    "s1": "#63b3ff", "s2": "#ffa257", "s3": "#45d0a5", "s4": "#ee9fd0", "s5": "#e0d24a",
}  # fmt: skip


# The five series differ in lightness as well as hue, so that they stay apart for readers with any colour blindness; figures also give each
# its own marker and dash.
CSS_COLOURS = tuple(" ".join(f"--{name}: {value};" for name, value in colours.items()) for colours in (_LIGHT, _DARK))
COLOURS = f":root {{ {CSS_COLOURS[0]} }} @media (prefers-color-scheme: dark) {{ :root {{ {CSS_COLOURS[1]} }} }}"
SERIES = tuple(_LIGHT[f"s{number}"] for number in range(1, 6))
INK, SOFT, RULE = _LIGHT["ink"], _LIGHT["soft"], _LIGHT["rule"]
MARKERS = ("o", "s", "^", "D", "v")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
# Not by colour alone.
_SIGNS = {"pass": "✅ pass", "fail": "❌ fail", "not run": "◻️ not run"}
# Not every machine has a font with the pictures.
_TEXT_SIGNS = {"✅": '<b class="good">✓</b>', "❌": '<b class="bad">✗</b>', "◻️": "○"}


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


def html(document: Document, links: Mapping[str, str] | None = None) -> str:
    """Returns the page's Markdown as one HTML file that holds its figures, light or dark by the reader's setting; a name in the letters of
    code leads to its address in `links`."""
    # Tags within a paragraph or a cell are text; only the lines of `folded` and of anchors become tags.
    body = MarkdownIt("commonmark").enable("table").disable("html_inline").render(markdown(document))
    body = re.sub(r"<p>&lt;a id=&quot;([^&]+)&quot;&gt;&lt;/a&gt;</p>\n<h2>", r'<h2 id="\1">', body)
    for name, address in (links or {}).items():
        body = body.replace(f"<code>{name}</code>", f'<a href="{escape(address)}"><code>{name}</code></a>')
    for sign, shown in _TEXT_SIGNS.items():
        body = body.replace(sign, shown)
    body = re.sub(r"<table>.*?</table>", _table, body, flags=re.S)
    drawings = {figure.name: figure.svg for figure in document.figures}
    image = r'<p><img src="figures/([^"]+)\.svg"[^>]*></p>\n<p><em>(.*?)</em></p>'
    body = re.sub(image, lambda found: f"<figure>{drawings[found[1]]}<figcaption>{found[2]}</figcaption></figure>", body)
    contents = "".join(f'<a href="#{section.anchor}">{escape(section.title)}</a>' for section in document.sections)
    style = f"{COLOURS}\n{(Path(__file__).parent / 'page.css').read_text()}"
    # An empty icon: otherwise a browser asks the server for one.
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    head += f"<title>{escape(document.title)}</title><style>{style}</style>"
    body = body.replace("<h2", f"<nav>{contents}</nav>\n<h2", 1)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}</body></html>\n'


def _table(found: re.Match[str]) -> str:
    """Returns a table as HTML; each cell has the name of its column, which is shown when a narrow screen stacks the cells."""
    columns = itertools.cycle([re.sub(r"<[^>]+>", "", column) for column in re.findall(r"<th>(.*?)</th>", found[0])])
    named = re.sub("<td>", lambda _: f'<td data-column="{next(columns)}">', found[0])
    # A table that is wider than its place is scrolled by keyboard too.
    return f'<div class="wide" tabindex="0">{named}</div>'


def themed(svg: str, name: str, label: str) -> str:
    """Returns matplotlib's SVG for a page: colours as variables, unique ids, no prolog or metadata (nothing that names another host)."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    for variable in ("ink", "soft", "rule", "s1", "s2", "s3", "s4", "s5"):
        svg = svg.replace(_LIGHT[variable], f"var(--{variable})")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    # As wide as drawn where there is room; the height follows from the view box.
    pixels = r' width="([\d.]+)pt" height="[^"]*"'
    svg = re.sub(pixels, lambda found: f' style="max-width: {float(found[1]) * 4 / 3:.0f}px"', svg, count=1)
    safe = escape(label, quote=False).replace('"', "&quot;")
    return svg.replace("<svg", f'<svg role="img" aria-label="{safe}"', 1)


def standalone(svg: str) -> str:
    """Returns a themed figure as a standalone file, with the variables inside."""
    light, dark = CSS_COLOURS
    style = f"<style>svg {{ {light} background: var(--paper); }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    return '<?xml version="1.0" encoding="utf-8"?>\n' + re.sub(r"(<svg[^>]*>)", lambda match: match[0] + style, svg, count=1)
