"""A document as one HTML page that makes no network request and runs no script; light or dark by the reader's setting."""

import html as escaping
import re

from dpx.report.document import Block, Document, Figure, Grid, Items, Paragraph, Section
from dpx.report.theme import CSS_COLOURS

_CLASSES = {"pass": "pass", "fail": "fail", "not run": "none"}
# Not by colour alone.
_SIGNS = {"pass": "✓ pass", "fail": "✗ fail", "not run": "– not run"}

_STYLE = """
:root { color-scheme: light dark; %COLOURS% }
body { font: 16px/1.55 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; background: var(--paper); color: var(--ink);
  margin: 0 auto; max-width: 62rem; padding: 1.5rem 1.25rem 5rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 1rem 0 .75rem; } h2 { font-size: 1.25rem; margin: 3rem 0 .6rem;
  padding-top: .75rem; border-top: 1px solid var(--rule); }
p { margin: .5rem 0; } a { color: var(--s1); }
.lead { color: var(--soft); }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .36rem .7rem .36rem 0; border-bottom: 1px solid var(--rule); }
th { font-weight: 600; color: var(--soft); border-bottom-width: 2px; }
.verdict, th:last-child { white-space: nowrap; } .verdict { font-weight: 600; }
.pass { color: var(--good); } .fail { color: var(--bad); } .none { color: var(--soft); }
figure { margin: 1.1rem 0; } figure svg { display: block; width: 100%; height: auto; }
figcaption, details, li { font-size: .9rem; } figcaption { color: var(--soft); margin-top: .3rem; }
summary { cursor: pointer; color: var(--soft); margin: .5rem 0; } ul { padding-left: 1.2rem; } li { margin: .2rem 0; }
code { font-size: .92em; background: var(--shade); padding: .05em .3em; border-radius: 3px; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1rem; font-size: .9rem; margin: 1rem 0; }
/* On a telephone a row is a card: each cell under the name of its column. */
@media (max-width: 40rem) {
  body { padding: 1rem .9rem 4rem; }
  thead { position: absolute; clip-path: inset(50%); width: 1px; height: 1px; overflow: hidden; }
  table, tbody, tr, td { display: block; } tr { border-bottom: 2px solid var(--rule); padding: .45rem 0; }
  td { border: 0; padding: .14rem 0; overflow-wrap: anywhere; }
  td::before { content: attr(data-column); display: block; font-size: .85em; color: var(--soft); font-weight: 400; }
  td:empty { display: none; }
}
@media print { details > * { display: block; } }
"""


def page(document: Document) -> str:
    """The whole page as text."""
    links = "".join(f'<a href="#{s.anchor}">{_text(s.title)}</a>' for s in document.sections if s.anchor)
    style = _STYLE.replace("%COLOURS%", CSS_COLOURS[0]) + f"@media (prefers-color-scheme: dark) {{ :root {{ {CSS_COLOURS[1]} }} }}\n"
    body = "\n".join(
        [
            f"<h1>{_text(document.title)}</h1>",
            *(f'<p class="lead">{_text(line)}</p>' for line in document.lead),
            f"<nav>{links}</nav>",
            *map(_section, document.sections),
        ]
    )
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{_text(document.title)}</title>"
    # An empty icon: otherwise a browser asks the server for one.
    head += f'<link rel="icon" href="data:,"><style>{style}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _section(section: Section) -> str:
    anchor = f' id="{section.anchor}"' if section.anchor else ""
    return f"<section{anchor}><h2>{_text(section.title)}</h2>\n" + "\n".join(map(_block, section.blocks)) + "</section>"


def _block(block: Block) -> str:
    match block:
        case Paragraph(text):
            return f"<p>{_text(text)}</p>"
        case Items(items, summary):
            return _folded(summary, "<ul>" + "".join(f"<li>{_text(item)}</li>" for item in items) + "</ul>")
        case Figure(_, svg, caption):
            return f"<figure>{svg}<figcaption>{_text(caption)}</figcaption></figure>"
        case Grid(columns, rows, summary):
            head = "".join(f"<th>{_text(column)}</th>" for column in columns)
            lines = "".join("<tr>" + "".join(map(_cell, row, columns)) + "</tr>" for row in rows)
            return _folded(summary, f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>')


def _folded(summary: str, inner: str) -> str:
    return f"<details><summary>{_text(summary)}</summary>{inner}</details>" if summary else inner


def _cell(cell: str, column: str) -> str:
    """One cell, with the name of its column for where the table is stacked."""
    named = f' data-column="{escaping.escape(column.replace("`", ""))}"'
    if cell in _CLASSES:
        return f'<td class="verdict {_CLASSES[cell]}"{named}>{_SIGNS[cell]}</td>'
    return f"<td{named}>{_text(cell)}</td>"


def _text(text: str) -> str:
    """Escaped, with `code`, **strong** and [links](#within the page) of Markdown."""
    safe = escaping.escape(text, quote=False)
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", safe)
    safe = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", safe)
    return re.sub(r"\[([^\]]+)\]\((#[\w-]+)\)", r'<a href="\2">\1</a>', safe)
