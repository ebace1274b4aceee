"""A page as Markdown blocks and figures: README.md as it is, and one HTML page that makes no network request and runs no script.

What comes from a record is text: `escaped` and `code` write it so that neither Markdown nor HTML reads anything else in it, as is done here
for titles, summaries and captions. In Markdown, HTML and pictures are text, and links lead to this page or to files beside it.
"""

import base64
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml

# Colours of pages, as CSS variables with a light and a dark value; figures are on white (figures.mplstyle).
_LIGHT = {
    "paper": "#ffffff", "ink": "#1c1c1e", "soft": "#5c5f66", "rule": "#d9dbe0", "shade": "#f1f2f4", "good": "#0b6e4f", "bad": "#b3261e",
    "s1": "#0060a0",
}  # fmt: skip
_DARK = {
    "paper": "#16181c", "ink": "#e6e7ea", "soft": "#a2a6ae", "rule": "#363a41", "shade": "#24272d", "good": "#4fd1a5", "bad": "#ff8a80",
    "s1": "#63b3ff",
}  # fmt: skip


CSS_COLOURS = tuple(" ".join(f"--{name}: {value};" for name, value in colours.items()) for colours in (_LIGHT, _DARK))
COLOURS = f":root {{ {CSS_COLOURS[0]} }} @media (prefers-color-scheme: dark) {{ :root {{ {CSS_COLOURS[1]} }} }}"
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
SIGNS = {"pass": "✅ pass", "fail": "❌ fail", "not run": "◻️ not run"}
# Not every machine has a font with the pictures.
_SHOWN = {SIGNS["pass"]: '<b class="good">✓</b> pass', SIGNS["fail"]: '<b class="bad">✗</b> fail', SIGNS["not run"]: "○ not run"}


@dataclasses.dataclass(frozen=True)
class Figure:
    """A drawing; `name` is its file name without ending, and `drawn` returns its file as `svg`, `png` or `pdf`. `made` says in Markdown how
    it was made, with links to what it shows."""

    name: str
    caption: str
    drawn: Callable[[str], bytes]
    made: str = ""


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
    """`blocks` are Markdown without HTML, and figures; `title` is text, and `anchor` the target of links within the page. A section with a
    `summary`, which is text, is folded away under it."""

    title: str
    blocks: Sequence[Block]
    anchor: str
    summary: str = ""


@dataclasses.dataclass(frozen=True)
class Document:
    """`first` are figures of its sections that are also shown above them."""

    title: str
    lead: Sequence[str]
    sections: Sequence[Section]
    first: Sequence[Figure] = ()

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
    cells = [[str(SIGNS.get(cell, cell)).replace("|", "\\|").replace("\n", " ") for cell in line] for line in (columns, *rows)]
    return _folded(_templates().get_template("grid.md.j2").render(columns=cells[0], rows=cells[1:]), summary)


def items(lines: Sequence[str], summary: str = "") -> str | Folded:
    """Returns a list of lines of Markdown."""
    return _folded("\n".join(f"- {line}" for line in lines), summary)


def _folded(text: str, summary: str) -> str | Folded:
    return Folded(summary, text) if summary else text


def markdown(document: Document) -> str:
    """Returns the whole page as Markdown, its figures in `figures/` beside it."""
    return _templates().get_template("page.md.j2").render(document=document)


def html(document: Document, links: Mapping[str, str] | None = None) -> str:
    """Returns the page as one HTML file that holds its figures, light or dark by the reader's setting; a name in the letters of code leads
    to its address in `links`."""
    style = f"{COLOURS}\n{(Path(__file__).parent / 'page.css').read_text()}"
    template = _templates().overlay()
    template.filters |= {"html": functools.partial(_of_markdown, links=links or {})}
    return template.get_template("page.html.j2").render(document=document, style=style, policy=_POLICY)


@functools.cache
def _templates() -> Any:
    """Returns the templates of pages. They write texts as they are: `escaped` and `_of_markdown` alone make HTML of them."""
    import jinja2

    made = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")), undefined=jinja2.StrictUndefined)
    made.filters |= {"escaped": escaped, "figures": _figures, "base64": lambda one: base64.b64encode(one.drawn("svg")).decode()}
    kinds: dict[str, Any] = {"folded": Folded, "panels": Panels, "drawn": Figure | Panels}
    made.tests |= {name: lambda block, kind=kind: isinstance(block, kind) for name, kind in kinds.items()}

    def is_several(figure: Figure) -> bool:
        # Of several plots side by side, which a narrow screen scrolls.
        wide = re.search(rb'viewBox="0 0 (\d+)', figure.drawn("svg"))
        return wide is not None and int(wide[1]) > _ONE_PLOT

    made.tests["several"] = is_several
    return made


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
