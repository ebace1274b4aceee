"""Compares printed numbers of rows and lengths with those of GLUE and of the files on this machine (Du and Mi 2021, Table 3, F13)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpx.data.labelled import Table as Labelled
from dpx.data.tokenizer import of_path
from dpx.declaration import declaration, require
from dpx.table import Table
from dpx_papers.du2021 import labelled_rows
from dpx_papers.report.shape import Part, verdict_table


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


@declaration
class DpfpTable3Datasets:
    """Compares the printed sizes and lengths with those of the data. Lengths are numbers of words between blanks.

    Attributes:
        subjects: The printed tasks.
        vocabulary: File of word pieces, in which lengths are also counted if it exists.
    """

    subjects: Sequence[Subject]
    vocabulary: str | None = None

    def __call__(self) -> list[Table]:
        rows = [self._row(subject) for subject in self.subjects]
        columns = ("task", "printed_rows", "glue_rows", "printed_over_glue", "rows_here", "is_whole_training_set", "printed_length")
        columns += ("words_here", "pieces_here")
        notes = (
            "rows_here: of the files that the data group names for training, which are the dev set where a training split is missing",
            "lengths are means over those rows, of both texts of a pair, without marks; empty: no such files here",
        )
        table = Table("datasets", columns, tuple(rows), "Table 3: training rows and average lengths", notes)
        return [table, verdict_table(judged(table.as_json()["rows"]))]

    def _row(self, subject: Subject) -> tuple[Any, ...]:
        from dpx.config import recipes

        source = recipes.option("data", subject.data).source
        require(isinstance(source, Labelled), f"data={subject.data}", "is not a table of labelled rows", "Name a GLUE data group")
        printed = (subject.task, subject.printed_rows, subject.rows, subject.printed_rows / subject.rows)
        if not labelled_rows.is_present(source):
            return (*printed, None, None, subject.printed_length, None, None)
        texts, _ = labelled_rows.texts_and_labels(source)
        words = sum(len(part.split()) for text in texts for part in text) / len(texts)
        return (*printed, len(texts), len(texts) == subject.rows, subject.printed_length, words, self._pieces(texts))

    def _pieces(self, texts: Sequence[Sequence[str]]) -> float | None:
        if self.vocabulary is None or not Path(self.vocabulary).exists():
            return None
        tokenizer = of_path(Path(self.vocabulary), 1 << 20).tokenizer
        encoded = tokenizer.encode_batch_fast([part for text in texts for part in text], add_special_tokens=False)
        return sum(len(one.ids) for one in encoded) / len(texts)


def judged(rows: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Returns the verdicts: whether the printed rows are GLUE's, and whether the whole training sets on this machine have as many."""
    off = [f"{row['task']} {row['printed_rows']:,} for {row['glue_rows']:,}" for row in rows if row["printed_rows"] != row["glue_rows"]]
    printed = Part.of("the printed rows are GLUE's", not off, "; ".join(off) or "all agree")
    whole = [row["task"] for row in rows if row["is_whole_training_set"]]
    claim = "a training set on this machine has as many rows as GLUE's"
    here = Part.of(claim, True, ", ".join(whole)) if whole else Part.of(claim, None, "no whole training set is here")
    return [printed, here]
