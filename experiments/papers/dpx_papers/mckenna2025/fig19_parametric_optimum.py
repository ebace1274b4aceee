"""Finds the model of least loss by form L2, at each compute and noise-batch ratio (McKenna et al. 2025, Figure 19)."""

from collections.abc import Sequence

import numpy as np

from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.table import Table
from dpx_papers.mckenna2025.allocation import by_the_rule
from dpx_papers.mckenna2025.lab import BY_COMPUTE, OfLab
from dpx_papers.mckenna2025.parametric import points_of
from dpx_papers.report.shape import Part, verdict_table
from dpx_papers.scaling import parametric

Row = tuple[float, float, float, float]


@declaration
class MckennaFig19ParametricOptimum(OfLab):
    """Fits form L2 as for Figure 18 and searches models from the smallest trained one upward.

    Above the largest trained model the form extrapolates.

    Attributes:
        ratios: Noise-batch ratios.
        times: Largest model of the search, in times of the largest trained one.
        starts: Starts of L-BFGS.
    """

    ratios: Sequence[float]
    times: float | int
    starts: int

    def __call__(self) -> list[Table]:
        measured, _ = self.lab.measured()
        points = points_of(measured, self.lab)
        fit = parametric.fit("L2", *points.columns, starts=self.starts)
        models = float(points.parameters.min()), float(points.parameters.max()) * self.times
        rows = optimal(fit, self.ratios, self.lab.computes_of().tolist(), float(measured.sequence_length[0]), models)
        notes = (f"beyond {points.parameters.max():,.0f} parameters and N = {points.examples.max():,.0f} the form extrapolates",)
        columns = ("ratio", "compute", "model", "rule")
        return [Table("optimum", columns, tuple(rows), "the model of least loss by form L2", notes), verdict_table(judged(rows, models))]

    def pictures(self) -> list[Picture]:
        """Plots a line for each ratio; marks are 20 tokens a parameter."""
        lines = Lines(table="optimum", y=("model",), by="ratio", y_label="parameters", y_scale="log", **BY_COMPUTE)
        return [
            Picture("mckenna_fig19_parametric_optimum", "The model of least loss by form L2, by compute and noise-batch ratio.", (lines,))
        ]


def optimal(
    fit: parametric.Fit, ratios: Sequence[float], computes: Sequence[float], tokens: float, models: tuple[float, float]
) -> list[Row]:
    """Returns (ratio, compute, best model, model by the rule of 20 tokens a parameter)."""
    return [
        (float(ratio), compute, parametric.optimal_parameters(fit, compute, float(ratio), tokens, *models), by_the_rule(compute))
        for ratio in ratios
        for compute in computes
    ]


def judged(rows: Sequence[Row], models: tuple[float, float]) -> list[Part]:
    """Returns the verdicts: the best model grows more slowly with compute under more noise. An end of the searched range is not an
    optimum."""
    claim = "the best model grows more slowly with compute at a larger ratio"
    slopes = {}
    for ratio in sorted({row[0] for row in rows}):
        inner = [(compute, model) for one, compute, model, _ in rows if one == ratio and models[0] * 1.01 < model < models[1] / 1.01]
        if len(inner) >= 3:
            x, y = np.log(np.array(inner)).T
            slopes[ratio] = float(np.polyfit(x, y, 1)[0])
    if len(slopes) < 2:
        return [Part.of(claim, None, f"{len(slopes)} ratios with an optimum inside the range (2 needed)")]
    low, high = min(slopes), max(slopes)
    return [Part.of(claim, slopes[high] < slopes[low], ", ".join(f"{ratio:.2g}: {slope:.2f}" for ratio, slope in slopes.items()))]
