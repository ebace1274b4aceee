"""Yin and Habernal 2022, Table 1: documents and bytes of the corpus as printed, and those of the legal text on this machine (L1)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpx.data.declared_data import TextFiles
from dpx_papers.analysis import Made, analysis, frame
from dpx_papers.report.shape import Part


@analysis()
def legal_table1_corpus(
    printed: Sequence[Sequence[str | int | float]],
    printed_totals: Sequence[float],
    examples: int,
    heldout_fraction: float,
    files: Sequence[str],
) -> Made:
    """Compares the printed corpus with files of this machine.

    Attributes:
        printed: (source, documents, GB) of each line.
        printed_totals: The two totals in the text, in GB.
        examples: Training examples of the authors' code.
        heldout_fraction: Share of the documents that it holds out.
        files: Files (.jsonl.gz); a missing file is left out.
    """
    lines = frame(printed, columns=["source", "documents", "gigabytes"]).astype({"gigabytes": float})
    lines.loc[len(lines)] = ["sum", lines["documents"].sum(), sum(lines["gigabytes"])]
    lines["bytes_per_document"] = lines["gigabytes"] * 1e9 / lines["documents"]
    here = [_counted(Path(file)) for file in files if Path(file).exists()]
    documents, size = lines.iloc[-1][["documents", "gigabytes"]]
    left = documents * (1 - heldout_fraction)
    sums = ", ".join(f"{value:g}" for value in printed_totals)
    same = all(abs(value - size) < 0.05 for value in printed_totals)
    claim, agrees = "the training examples are the documents that are not held out, to 2 %", abs(examples / left - 1) < 0.02
    counted = f"{len(here)} files, {sum(row['bytes'] for row in here):,} bytes" if here else "no file of it is here"
    verdicts = [
        Part.of("the totals in the text are the sum of the rows", same, f"{size:g} GB; the text has {sums}"),
        Part.of(claim, agrees, f"{examples:,} of {left:,.0f}"),
        Part.of("documents and bytes of the text on this machine are counted", bool(here) or None, counted),
    ]
    return {"printed": lines, "here": here, "verdicts": verdicts}


def _counted(file: Path) -> dict[str, Any]:
    from dpx.data.sources import TextFilesSource

    documents = [one.paragraphs for one in TextFilesSource(TextFiles(paths=str(file))).documents()]
    paragraphs = [paragraph for own in documents for paragraph in own]
    size = sum(len(paragraph.encode()) for paragraph in paragraphs)
    counts = {"documents": len(documents), "paragraphs": len(paragraphs), "distinct_paragraphs": len(set(paragraphs)), "bytes": size}
    return {"file": file.name} | counts | {"bytes_per_paragraph": size / max(len(paragraphs), 1)}
