"""A page as Markdown blocks and figures: README.md as it is, and one HTML page that makes no network request and runs no script.

What comes from a record is text: `escaped` and `code` write it so that neither Markdown nor HTML reads anything else in it, as is done here
for titles, summaries and captions. In Markdown, HTML and pictures are text, and links lead to this page or to files beside it.
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml

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
# What a browser may do with a page: use the styles in it and its empty icon, nothing else.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
# Characters that mean something in Markdown, HTML or an attribute: anywhere, at the start of a line, or beside certain others.
_MEANING = re.compile(
    r"""[\\`<>|~$"&]|^[#+*=-]|(?<=^\d)[.)](?=\s|$)|(?<=^\d\d)[.)](?=\s|$)|](?=[(\[])|\*(?=\S)|(?<=\S)\*|(?<!\w)_|_(?!\w)"""
)
_NAMED = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}
# The width of a picture of one plot is below this; one of several is above.
_ONE_PLOT = 500
_BESIDE = re.compile(r"(?:[\w.&-]+/)*(?:[\w.&-]*)(?:#[\w.-]+)?")
# Not by colour alone.
_SIGNS = {"pass": "✅ pass", "fail": "❌ fail", "not run": "◻️ not run"}
# Not every machine has a font with the pictures.
_SHOWN = {_SIGNS["pass"]: '<b class="good">✓</b> pass', _SIGNS["fail"]: '<b class="bad">✗</b> fail', _SIGNS["not run"]: "○ not run"}


@dataclasses.dataclass(frozen=True)
class Figure:
    """An SVG drawing that follows the reader's theme; `name` is its file name without ending, `png` the same on white if asked for."""

    name: str
    svg: str
    caption: str
    png: bytes = b""


@dataclasses.dataclass(frozen=True)
class Folded:
    """Markdown that is folded away under its summary, which is text, until a reader opens it."""

    summary: str
    text: str


@dataclasses.dataclass(frozen=True)
class Panels:
    """Figures side by side where the page is wide enough, else below each other; `legend` serves all of them."""

    figures: Sequence[Figure]
    legend: Figure | None = None


Block = str | Folded | Figure | Panels


@dataclasses.dataclass(frozen=True)
class Section:
    """`blocks` are Markdown without HTML, and figures; `title` is text, and `anchor` the target of links within the page."""

    title: str
    blocks: Sequence[Block]
    anchor: str


@dataclasses.dataclass(frozen=True)
class Document:
    title: str
    lead: Sequence[str]
    sections: Sequence[Section]

    @property
    def figures(self) -> list[Figure]:
        blocks = [block for section in self.sections for block in section.blocks]
        return [figure for block in blocks if isinstance(block, Figure | Panels) for figure in _figures(block)]


def _figures(block: Figure | Panels) -> list[Figure]:
    return [block] if isinstance(block, Figure) else [*filter(None, (block.legend,)), *block.figures]


def escaped(value: Any) -> str:
    """Returns any value as one line of text, for Markdown, HTML and the value of an attribute: entities, which are never read as syntax."""
    return _MEANING.sub(lambda found: _NAMED.get(found[0], f"&#{ord(found[0])};"), one_line(value))


def code(value: Any) -> str:
    """Returns any value as one line in the letters of code, as Markdown."""
    line = one_line(value)
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence, space = "`" * (longest + 1), " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{space}{line}{space}{fence}" if line else ""


def one_line(value: Any) -> str:
    """Returns any value as one line of letters that can be shown."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in str(value)).split())


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]], summary: str = "") -> str | Folded:
    """Returns a table, its cells as Markdown; a cell that is a verdict (`pass`, `fail`, `not run`) gets its sign."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ([str(_SIGNS.get(cell, cell)).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return _folded("\n".join(f"| {' | '.join(line)} |" for line in cells), summary)


def items(lines: Sequence[str], summary: str = "") -> str | Folded:
    """Returns a list of lines of Markdown."""
    return _folded("\n".join(f"- {line}" for line in lines), summary)


def _folded(text: str, summary: str) -> str | Folded:
    return Folded(summary, text) if summary else text


def markdown(document: Document) -> str:
    """Returns the whole page as Markdown, its figures in `figures/` beside it."""
    parts = [f"# {escaped(document.title)}", *document.lead]
    for section in document.sections:
        parts.append(f'<a id="{escaped(section.anchor)}"></a>\n\n## {escaped(section.title)}')
        parts += map(_as_markdown, section.blocks)
    return "\n\n".join(parts) + "\n"


def _as_markdown(block: Block) -> str:
    if isinstance(block, Folded):
        return f"<details><summary>{escaped(block.summary)}</summary>\n\n{block.text}\n\n</details>"
    if isinstance(block, Figure | Panels):
        named = [(escaped(figure.caption), figure.name) for figure in _figures(block)]
        return "\n\n".join(f"![{caption}](figures/{name}.svg)\n\n*{caption}*" for caption, name in named)
    return block


def html(document: Document, links: Mapping[str, str] | None = None) -> str:
    """Returns the page as one HTML file that holds its figures, light or dark by the reader's setting; a name in the letters of code leads
    to its address in `links`."""
    contents = "".join(f'<a href="#{escaped(section.anchor)}">{escaped(section.title)}</a>' for section in document.sections)
    body = [f"<h1>{escaped(document.title)}</h1>", *(_of_markdown(text, links or {}) for text in document.lead), f"<nav>{contents}</nav>"]
    for section in document.sections:
        body.append(f'<h2 id="{escaped(section.anchor)}">{escaped(section.title)}</h2>')
        body += [_as_html(block, links or {}) for block in section.blocks]
    style = f"{COLOURS}\n{(Path(__file__).parent / 'page.css').read_text()}"
    # An empty icon: otherwise a browser asks the server for one.
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    head += f"<title>{escaped(document.title)}</title><style>{style}</style>"
    lines = "\n".join(part.strip() for part in body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{lines}\n</body></html>\n'


def _as_html(block: Block, links: Mapping[str, str]) -> str:
    if isinstance(block, Folded):
        return f"<details><summary>{escaped(block.summary)}</summary>\n{_of_markdown(block.text, links)}</details>"
    if isinstance(block, Figure):
        # Several plots side by side are scrolled where a narrow screen would make them unreadable.
        wide = re.search(r'viewBox="0 0 (\d+)', block.svg)
        drawn = f'<div class="wide several" tabindex="0">{block.svg}</div>' if wide and int(wide[1]) > _ONE_PLOT else block.svg
        return f"<figure>{drawn}<figcaption>{escaped(block.caption)}</figcaption></figure>"
    if isinstance(block, Panels):
        legend = _as_html(block.legend, links) if block.legend else ""
        return f'{legend}<div class="panels">{"".join(_as_html(figure, links) for figure in block.figures)}</div>'
    return _of_markdown(block, links)


def _of_markdown(text: str, links: Mapping[str, str]) -> str:
    """Returns Markdown as HTML, in which HTML and pictures are text, and links lead to this page or to files beside it."""
    reader = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["image", "autolink", "reference"])
    reader.validateLink = lambda address: _BESIDE.fullmatch(address) is not None  # pyright: ignore[reportAttributeAccessIssue]
    body = reader.render(text)
    for name, address in links.items():
        body = body.replace(f"<code>{escapeHtml(name)}</code>", f'<a href="{escaped(address)}"><code>{escapeHtml(name)}</code></a>')
    for sign, shown in _SHOWN.items():
        body = body.replace(f"<td>{sign}</td>", f"<td>{shown}</td>")
    return re.sub(r"<table>.*?</table>", _table, body, flags=re.S)


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
    return svg.replace("<svg", f'<svg role="img" aria-label="{escaped(label)}"', 1)


def standalone(svg: str) -> str:
    """Returns a themed figure as a standalone file, with the variables inside."""
    light, dark = CSS_COLOURS
    style = f"<style>svg {{ {light} background: var(--paper); }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    return '<?xml version="1.0" encoding="utf-8"?>\n' + re.sub(r"(<svg[^>]*>)", lambda match: match[0] + style, svg, count=1)
