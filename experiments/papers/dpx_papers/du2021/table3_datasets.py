"""Compares printed numbers of rows and lengths with those of GLUE and of the files on this machine (Du and Mi 2021, Table 3, F13)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpx.data.labelled import Table as Labelled
from dpx.data.tokenizer import of_path
from dpx.declaration import declaration, require
from dpx_papers.analysis import Made, analysis
from dpx_papers.du2021 import labelled_rows
from dpx_papers.report.shape import Part


@declaration
class Subject:
    """Holds one task.

    Attributes:
        task: Name of the task.
        data: Its option of the group data.
        printed_rows: Training rows that the paper prints.
        rows: Training rows of GLUE.
        printed_length: Average length that the paper prints.
    """

    task: str
    data: str
    printed_rows: int
    rows: int
    printed_length: float


@analysis()
def dpfp_table3_datasets(subjects: Sequence[Subject], vocabulary: str | None = None) -> Made:
    """Compares the printed sizes and lengths with those of the data. Lengths are numbers of words between blanks.

    Attributes:
        subjects: The printed tasks.
        vocabulary: File of word pieces, in which lengths are also counted if it exists.
    """
    rows = [_row(subject, vocabulary) for subject in subjects]
    off = [f"{row['task']} {row['printed_rows']:,} for {row['glue_rows']:,}" for row in rows if row["printed_rows"] != row["glue_rows"]]
    whole = [row["task"] for row in rows if row["is_whole_training_set"]]
    claim = "a training set on this machine has as many rows as GLUE's"
    verdicts = [
        Part.of("the printed rows are GLUE's", not off, "; ".join(off) or "all agree"),
        Part.of(claim, bool(whole) or None, ", ".join(whole) or "no whole training set is here"),
    ]
    return {"datasets": rows, "verdicts": verdicts}


def _row(subject: Subject, vocabulary: str | None) -> dict[str, Any]:
    from dpx.config import recipes

    source = recipes.option("data", subject.data).source
    require(isinstance(source, Labelled), f"data={subject.data}", "is not a table of labelled rows", "Name a GLUE data group")
    texts = labelled_rows.texts_and_labels(source)[0] if labelled_rows.is_present(source) else []
    printed = {"task": subject.task, "printed_rows": subject.printed_rows, "glue_rows": subject.rows}
    return printed | {
        "printed_over_glue": subject.printed_rows / subject.rows,
        "rows_here": len(texts) or None,
        "is_whole_training_set": len(texts) == subject.rows if texts else None,
        "printed_length": subject.printed_length,
        "words_here": sum(len(part.split()) for text in texts for part in text) / len(texts) if texts else None,
        "pieces_here": _pieces(texts, Path(vocabulary)) if texts and vocabulary and Path(vocabulary).exists() else None,
    }


def _pieces(texts: Sequence[Sequence[str]], vocabulary: Path) -> float:
    tokenizer = of_path(vocabulary, 1 << 20).tokenizer
    encoded = tokenizer.encode_batch_fast([part for text in texts for part in text], add_special_tokens=False)
    return sum(len(one.ids) for one in encoded) / len(texts)
