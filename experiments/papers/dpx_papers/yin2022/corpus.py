"""Yin and Habernal 2022, Table 1: documents and bytes of the corpus as printed, and those of the legal text on this machine (L1)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpx.data.declarations import TextFiles
from dpx.declaration import declaration
from dpx.table import Table
from dpx_papers.report.shape import Part, verdict_table


@declaration
class LegalTable1Corpus:
    """Compares the printed corpus with files of this machine.

    Attributes:
        printed: (source, documents, GB) of each line.
        printed_totals: The two totals in the text, in GB.
        examples: Training examples of the authors' code.
        heldout_fraction: Share of the documents that it holds out.
        files: Files (.jsonl.gz); a missing file is left out.
    """

    printed: Sequence[Sequence[str | int | float]]
    printed_totals: Sequence[float]
    examples: int
    heldout_fraction: float
    files: Sequence[str]

    def __call__(self) -> list[Table]:
        printed = [(str(name), int(documents), float(size)) for name, documents, size in self.printed]
        rows = [(name, documents, size, size * 1e9 / documents) for name, documents, size in printed]
        documents, size = sum(row[1] for row in rows), sum(row[2] for row in rows)
        rows.append(("sum", documents, size, size * 1e9 / documents))
        table = Table(
            "printed", ("source", "documents", "gigabytes", "bytes_per_document"), tuple(rows), "Table 1 as printed", PRINTED_NOTES
        )
        here = [self._counted(Path(file)) for file in self.files if Path(file).exists()]
        counted = Table("here", HERE, tuple(here), "legal text on this machine", HERE_NOTES)
        return [table, counted, verdict_table(self._judged(table.as_json()["rows"][-1], counted.as_json()["rows"]))]

    def _counted(self, file: Path) -> tuple[Any, ...]:
        from dpx.data.text_files import TextFilesSource

        documents = [one.paragraphs for one in TextFilesSource(TextFiles(paths=str(file))).documents()]
        sizes = [len(paragraph.encode()) for paragraphs in documents for paragraph in paragraphs]
        distinct = len({paragraph for paragraphs in documents for paragraph in paragraphs})
        return file.name, len(documents), len(sizes), distinct, sum(sizes), sum(sizes) / max(len(sizes), 1)

    def _judged(self, total: Mapping[str, Any], here: Sequence[Mapping[str, Any]]) -> list[Part]:
        """The verdicts: whether the totals agree, and what a document must be."""
        sums = ", ".join(f"{value:g}" for value in self.printed_totals)
        same = all(abs(value - total["gigabytes"]) < 0.05 for value in self.printed_totals)
        left = total["documents"] * (1 - self.heldout_fraction)
        agrees = abs(self.examples / left - 1) < 0.02
        counted = f"{len(here)} files, {sum(row['bytes'] for row in here):,} bytes"
        return [
            Part.of("the totals in the text are the sum of the rows", same, f"{total['gigabytes']:g} GB; the text has {sums}"),
            Part.of("the training examples are the documents that are not held out, to 2 %", agrees, f"{self.examples:,} of {left:,.0f}"),
            Part.of("documents and bytes of the text on this machine are counted", True, counted)
            if here
            else Part.of("documents and bytes of the text on this machine are counted", None, "no file of it is here"),
        ]


HERE = ("file", "documents", "paragraphs", "distinct_paragraphs", "bytes", "bytes_per_paragraph")
PRINTED_NOTES = ("about 490 bytes a document: a document is a paragraph, so the unit of privacy is a paragraph",)
HERE_NOTES = ("a document is one contract or opinion; its paragraphs are the units that data.source.document_per=paragraph makes",)
