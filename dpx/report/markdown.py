"""A document as Markdown, its figures as files beside it."""

from collections.abc import Sequence

from dpx.report.document import Block, Document, Figure, Grid, Items, Paragraph

_MARKS = {"pass": "✅ pass", "fail": "❌ fail", "not run": "◻️ not run"}


def markdown(document: Document, figures: str = "figures") -> str:
    """The document as Markdown text; its figures are linked as `<figures>/<name>.svg`."""
    parts = [f"# {document.title}", *document.lead]
    for section in document.sections:
        anchor = f'<a id="{section.anchor}"></a>\n\n' if section.anchor else ""
        parts.append(f"{anchor}## {section.title}")
        parts += [_block(block, figures) for block in section.blocks]
    return "\n\n".join(part for part in parts if part) + "\n"


def _block(block: Block, figures: str) -> str:
    match block:
        case Paragraph(text):
            return text
        case Items(items, summary):
            listed = "\n".join(f"- {item}" for item in items)
            return _folded(summary, listed) if summary else listed
        case Figure(name, _, caption):
            return f"![{caption}]({figures}/{name}.svg)\n\n*{caption}*"
        case Grid(columns, rows, summary):
            table = "\n".join([_line(columns), "|" + " --- |" * len(columns), *map(_line, rows)])
            return _folded(summary, table) if summary else table


def _folded(summary: str, text: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_MARKS.get(cell, cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
