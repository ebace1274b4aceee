"""Finds the best model for a compute budget, by privacy budget and data (McKenna et al. 2025, Figures 1 and 13)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.table import Table
from dpx_papers.mckenna2025 import verdicts
from dpx_papers.mckenna2025.lab import BY_COMPUTE, OfLab
from dpx_papers.report.shape import Part, verdict_table
from dpx_papers.scaling.optima import Optimum, optima

TOKENS_A_PARAMETER = 20  # Hoffmann et al. 2022
COLUMNS = ("size", "epsilon", "compute", "loss", "smallest_model", "model", "batch_size", "steps", "ratio", "epochs", "marks")


@declaration
class MckennaAllocation(OfLab):
    """Analyses each size at the lab's epsilons and computes.

    Attributes:
        sizes: Protected records; null takes the lab's.
        figure: Name of the figure that is drawn.
    """

    sizes: Sequence[float | int] | None
    figure: str

    def __call__(self) -> list[Table]:
        fitted = self.lab.fitted()
        curve = optima(fitted.surface, self.lab.ratio, self._sizes, self.lab.epsilons, self.lab.computes_of())
        models = float(fitted.surface.parameters_M[0]), float(fitted.surface.parameters_M[-1])
        return [_rows(curve, fitted.notes), verdict_table(judged(curve, models))]

    @property
    def _sizes(self) -> Sequence[float | int]:
        return self.sizes or self.lab.sizes

    def pictures(self) -> list[Picture]:
        """Plots the smallest near-optimal model by compute and the rule of 20 tokens a parameter: a line for each epsilon, a panel for
        each size."""
        axes: dict[str, Any] = {"table": "allocation", "y_label": "parameters", "y_scale": "log"} | BY_COMPUTE
        panels = tuple(
            Lines(y=("smallest_model",), marks=("rule",), by="epsilon", where=("size", size), title=f"N = {size:,.0f}", **axes)
            for size in self._sizes
        )
        caption = "Smallest model within 1 % of the least predicted loss; marks: 20 tokens a parameter."
        return [Picture(f"mckenna_{self.figure}", caption, panels)]


def by_the_rule(compute: float) -> float:
    """Returns the model size by the rule of 20 tokens a parameter: C = 6 M * 20 M."""
    return float(np.sqrt(compute / (6 * TOKENS_A_PARAMETER)))


def _rows(points: Sequence[Optimum], notes: Sequence[str]) -> Table:
    rows = [
        (one.size, one.epsilon, one.compute, one.loss, one.smallest_model, one.parameters, one.batch_size, one.steps, one.ratio, one.epochs)
        + ("; ".join(one.marks), by_the_rule(one.compute))
        for one in points
    ]
    said = ("the optimum is flat: the smallest model within 1 % of the least loss is drawn, as in the paper", *notes)
    return Table("allocation", (*COLUMNS, "rule"), tuple(rows), "the best configuration for a budget", said)


def judged(points: Sequence[Optimum], models: tuple[float, float]) -> list[Part]:
    """Returns the verdicts on two claims. A rule's model outside the trained ones is not compared."""
    private = [one for one in points if np.isfinite(one.epsilon)]
    inside = [(one.smallest_model, by_the_rule(one.compute)) for one in private if models[0] < by_the_rule(one.compute) < models[1]]
    claims = "the best private model is smaller than 20 tokens a parameter would have it", "it is smaller at a smaller epsilon"
    by_epsilon = verdicts.neighbours(private, lambda one: (one.size, one.compute), lambda one: one.epsilon)
    smaller = verdicts.ascending(claims[1], [(low.smallest_model, high.smallest_model) for low, high in by_epsilon])
    return [verdicts.ascending(claims[0], inside), smaller]
