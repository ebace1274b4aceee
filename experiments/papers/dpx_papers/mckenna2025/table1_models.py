"""Compares the printed numbers of parameters of the same models with exact counts (McKenna et al. 2025, Tables 1, 2 and 4)."""

from collections.abc import Mapping, Sequence
from typing import Any

from dpx.declaration import declaration
from dpx.table import Table
from dpx_papers.mckenna2025.lab import Positive
from dpx_papers.report.shape import Part, verdict_table

# Models that our counts may be of: the encoder with its word head, with the next-sentence head too, or with a separate output matrix.
READINGS = ("exact", "with_next_sentence", "untied")


@declaration
class MckennaTable1Models(Positive):
    """Compares printed parameter counts with those of our encoder with a masked-LM head, tied and untied.

    Attributes:
        table_1: Parameters of Table 1, by model option.
        table_4: Parameters of Table 4, by model option.
        vocabulary_sizes: Rows of the word table that are tried.
    """

    table_1: Mapping[str, float]
    table_4: Mapping[str, float]
    vocabulary_sizes: Sequence[int]

    def __call__(self) -> list[Table]:
        from dpx.config import recipes

        rows = []
        for name, printed in self.table_1.items():
            model = recipes.option("model", name)
            for vocabulary in self.vocabulary_sizes:
                tied = model.parameters(vocabulary)
                both = model.parameters(vocabulary, next_sentence=True)
                row = {"model": name, "vocabulary": vocabulary, "layers": model.layers, "heads": model.heads, "width": model.width}
                row |= {"table_1": printed, "table_4": self.table_4[name]}
                row |= {"exact": tied, "with_next_sentence": both, "untied": tied + vocabulary * model.width}
                rows.append(row | {"ratio": tied / self.table_4[name]})
        notes = (
            "Mega is printed as 778M in Table 1, 729M in Table 4 and 784M in the text; untied, it would be near the larger two",
            "Small is printed with 4 heads, the released model has 8; the count is the same. The vocabulary is not stated",
        )
        models = Table.from_rows("models", rows, "printed parameters beside exact counts", notes)
        return [models, verdict_table(judged(models.as_json()["rows"]))]


def judged(rows: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Returns the verdicts: whether one reading, of heads and of the vocabulary, gives all counts of a table."""
    return [_of_printed(rows, name, words) for name, words in (("table_4", "Table 4"), ("table_1", "Table 1"))]


def _of_printed(rows: Sequence[Mapping[str, Any]], name: str, words: str) -> Part:
    worst = {}
    for vocabulary in sorted({row["vocabulary"] for row in rows}):
        for reading in READINGS:
            off = {row["model"]: abs(row[reading] / row[name] - 1) for row in rows if row["vocabulary"] == vocabulary}
            worst[vocabulary, reading] = max((share, model) for model, share in off.items())
    (vocabulary, reading), (share, model) = min(worst.items(), key=lambda item: item[1])
    nearest = f"nearest: {reading} at {vocabulary:,} words, {model} off by {share:.1%}"
    return Part.of(f"one reading gives each count of {words} within 3 %", share <= 0.03, nearest)
