"""Computes the difference of DP-FP's printed scores to those without privacy, by size of the model (Du and Mi 2021, section 4.2, F20)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.table import Table
from dpx_papers.du2021 import table2
from dpx_papers.du2021.table2 import NON_PRIVATE, TARGETS, TASKS, dp_fp
from dpx_papers.report.shape import Part, verdict_table


@declaration
class DpfpModelSizeGap:
    """Computes gaps between model sizes from the printed numbers.

    Attributes:
        published: File of the printed numbers.
        parameters: The models in their order of size, with their parameters.
        printed_mean_gaps: By printed epsilon the smallest and the largest mean gap in the text.
        printed_sst2_gap: Its gap of the largest model on SST-2.
    """

    published: str
    parameters: Mapping[str, int]
    printed_mean_gaps: Mapping[int, Sequence[float]]
    printed_sst2_gap: float

    def inputs(self) -> list[Path]:
        return [Path(self.published)]

    def __call__(self) -> list[Table]:
        scores = table2.scores(self.published)
        gaps, orders = self._gaps(scores), self._orders(scores)
        claims = self._claims(gaps.as_json()["rows"])
        return [gaps, claims, orders, verdict_table(judged(*(one.as_json()["rows"] for one in (gaps, claims, orders))))]

    def _gaps(self, scores: table2.Scores) -> Table:
        rows = []
        for model, parameters in self.parameters.items():
            for target in TARGETS:
                without, own = scores[model, NON_PRIVATE], scores[model, dp_fp(target)]
                means = (table2.mean(without), table2.mean(own))
                by_task = (without[task] - own[task] for task in TASKS)
                rows.append((model, parameters, target, *means, means[0] - means[1], *by_task))
        columns = ("model", "parameters", "printed_epsilon", "non_private_mean", "dp_fp_mean", "mean_gap", *TASKS)
        notes = (
            "printed_epsilon is that of Li et al.'s DP-SGD; DP-FP with a trained encoder has no guarantee at all",
            "scores without privacy are of the best epoch on the set that is reported, DP-FP's of the last one",
        )
        return Table("gaps", columns, tuple(rows), "printed scores: without privacy less DP-FP, points", notes)

    def _claims(self, gaps: Sequence[Mapping[str, Any]]) -> Table:
        largest = [row for row in gaps if row["model"] == list(self.parameters)[-1]]
        rows: list[tuple[Any, ...]] = [("gap of the largest model on SST-2", TARGETS[0], self.printed_sst2_gap, largest[0]["SST-2"])]
        for target, (low, high) in self.printed_mean_gaps.items():
            own = [row["mean_gap"] for row in gaps if row["printed_epsilon"] == target]
            rows += [("smallest mean gap", target, low, min(own)), ("largest mean gap", target, high, max(own))]
        columns = ("claim", "printed_epsilon", "printed", "from_table_2", "difference")
        return Table("claims", columns, tuple((*row, row[3] - row[2]) for row in rows), "gaps in the text and in the paper's own table")

    def _orders(self, scores: table2.Scores) -> Table:
        """Returns the cells in which the row of less noise has the lower score: a lower limit of the variation of one run by chance."""
        rows = []
        for model in self.parameters:
            noisy, less = (scores[model, dp_fp(target)] for target in TARGETS)
            rows += [(model, task, noisy[task], less[task], noisy[task] - less[task]) for task in TASKS if noisy[task] > less[task]]
        columns = ("model", "task", "at_printed_3", "at_printed_8", "excess")
        return Table("reversed", columns, tuple(rows), "more noise scores higher: one run each, seeds are not stated")

    def pictures(self) -> list[Picture]:
        """Plots the mean gap by size of the model."""
        panel = Lines(
            table="gaps",
            x="model",
            y=("mean_gap",),
            by="printed_epsilon",
            x_scale="category",
            x_label=" ",
            y_label="without privacy less DP-FP, points",
        )
        caption = "Mean gap of the printed scores by model; the printed epsilons are not DP-FP's, which has no guarantee."
        return [Picture("dpfp_model_size_gap", caption, (panel,))]


def judged(gaps: Sequence[Mapping[str, Any]], claims: Sequence[Mapping[str, Any]], orders: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Returns the verdicts: whether the gap falls with size, and whether the text's numbers are those of the table."""
    falls, words = True, []
    for target in TARGETS:
        own = [row["mean_gap"] for row in sorted(gaps, key=lambda row: row["parameters"]) if row["printed_epsilon"] == target]
        falls &= all(one > other for one, other in zip(own, own[1:], strict=False))
        words.append(f"{target}: " + ", ".join(f"{gap:.2f}" for gap in own))
    off = [row for row in claims if abs(row["difference"]) > 0.0051]
    apart = "; ".join(f"{row['claim']} at {row['printed_epsilon']}: {row['printed']:.2f}, table {row['from_table_2']:.2f}" for row in off)
    most = max((row["excess"] for row in orders), default=0.0)
    return [
        Part.of("the mean gap falls with the size of the model", falls, "; ".join(words)),
        Part.of("the gaps in the text are those of Table 2", not off, apart or "all agree"),
        Part.of("less noise never scores lower", not orders, f"{len(orders)} cells reversed, by up to {most:.2f} points"),
    ]
