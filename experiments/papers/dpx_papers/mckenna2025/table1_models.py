"""Compares the printed numbers of parameters of the same models with exact counts (McKenna et al. 2025, Tables 1, 2 and 4)."""

from collections.abc import Mapping, Sequence
from typing import Any

from dpx_papers.analysis import Made, frame
from dpx_papers.mckenna2025.lab import of_positive
from dpx_papers.report.shape import Part

# Models that our counts may be of: the encoder with its word head, with the next-sentence head too, or with a separate output matrix.
READINGS = ["exact", "with_next_sentence", "untied"]


@of_positive
def mckenna_table1_models(table_1: Mapping[str, float], table_4: Mapping[str, float], vocabulary_sizes: Sequence[int]) -> Made:
    """Compares printed parameter counts with those of our encoder with a masked-LM head, tied and untied.

    Attributes:
        table_1: Parameters of Table 1, by model option.
        table_4: Parameters of Table 4, by model option.
        vocabulary_sizes: Rows of the word table that are tried.
    """
    from dpx.config import recipes

    rows = []
    for name, printed in table_1.items():
        model = recipes.option("model", name)
        for vocabulary in vocabulary_sizes:
            tied = model.parameters(vocabulary)
            row = {"model": name, "vocabulary": vocabulary, "layers": model.layers, "heads": model.heads, "width": model.width}
            row |= {"table_1": printed, "table_4": table_4[name], "exact": tied}
            row |= {"with_next_sentence": model.parameters(vocabulary, next_sentence=True), "untied": tied + vocabulary * model.width}
            rows.append(row | {"ratio": tied / table_4[name]})
    models = frame(rows)
    return {"models": models, "verdicts": [judged(models, "table_4", "Table 4"), judged(models, "table_1", "Table 1")]}


def judged(models: Any, table: str, words: str) -> Part:
    """Returns the verdict: whether one reading, of heads and of the vocabulary, gives all counts of a table."""
    off = models.set_index(["vocabulary", "model"])[READINGS].div(models[table].to_numpy(), axis=0).sub(1).abs()
    worst = off.groupby("vocabulary").max().stack(future_stack=True)
    (vocabulary, reading), share = worst.idxmin(), worst.min()
    model = off.loc[vocabulary, reading].idxmax()
    nearest = f"nearest: {reading} at {vocabulary:,} words, {model} off by {share:.1%}"
    return Part.of(f"one reading gives each count of {words} within 3 %", share <= 0.03, nearest)
