"""Recomputes RoBERTa-large's mean and its differences in the abstract of Du and Mi 2021 from the paper's own Table 2 (F21)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpx.declaration import declaration
from dpx.table import Table
from dpx_papers.du2021 import table2
from dpx_papers.du2021.table2 import NON_PRIVATE, dp_fp, dp_sgd
from dpx_papers.report.shape import Part, verdict_table

# Printed means have two digits after the point.
ROUNDING = 0.0051


@declaration
class DpfpHeadline:
    """Compares the claims of the abstract with the printed numbers.

    Attributes:
        published: File of the printed numbers.
        model: Model of the claims.
        mean: Mean accuracy that the abstract gives.
        over_dp_sgd: Gain over DP-SGD that it gives.
        below_non_private: Loss against training without privacy that it gives.
    """

    published: str
    model: str
    mean: float
    over_dp_sgd: float
    below_non_private: float

    def inputs(self) -> list[Path]:
        return [Path(self.published)]

    def __call__(self) -> list[Table]:
        scores = table2.scores(self.published)
        headline, means = self._headline(scores), _means(scores)
        return [headline, means, verdict_table(judged(headline.as_json()["rows"], means.as_json()["rows"]))]

    def _headline(self, scores: table2.Scores) -> Table:
        own, other, without = (table2.mean(scores[self.model, row]) for row in (dp_fp(3), dp_sgd(3), NON_PRIVATE))
        rows = (
            ("mean score, percent", self.mean, own, "one run; the last epoch"),
            ("over DP-SGD, points", self.over_dp_sgd, own - other, "DP-SGD has the printed epsilon, DP-FP has no guarantee"),
            ("below no privacy, points", self.below_non_private, without - own, "the best epoch on the reported set against the last"),
        )
        notes = (
            "the column is headed by the epsilon of Li et al.'s DP-SGD; the encoder of DP-FP gets gradients without noise",
            "what holds with a frozen encoder: dpfp_table2_accounting; what a step shows: dpfp_postprocessing_counterexample",
        )
        title = f"{self.model}: the abstract's numbers from Table 2"
        return Table("headline", ("quantity", "printed", "from_table_2", "compared"), rows, title, notes)


def _means(scores: table2.Scores) -> Table:
    rows = [(model, method, row["mean"], table2.mean(row), table2.mean(row) - row["mean"]) for (model, method), row in scores.items()]
    return Table("means", ("model", "method", "printed", "from_five", "difference"), tuple(rows), "printed means of Table 2, MNLI twice")


def judged(headline: Sequence[Mapping[str, Any]], means: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Returns the verdicts on the arithmetic alone; another item judges whether the rows have a guarantee."""
    near = [row for row in means if abs(row["difference"]) <= ROUNDING]
    # A difference is between two rounded means.
    agree = all(abs(row["from_table_2"] - row["printed"]) <= 2 * ROUNDING for row in headline)
    words = ", ".join(f"{row['from_table_2']:.2f} ({row['printed']:.2f})" for row in headline)
    return [
        Part.of("the abstract's numbers follow from Table 2", agree, words),
        Part.of("every printed mean is that of its five scores", len(near) == len(means), f"{len(near)} of {len(means)} rows"),
    ]
