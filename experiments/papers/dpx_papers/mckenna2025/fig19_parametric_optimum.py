"""Finds the model of least loss by form L2, at each compute and noise-batch ratio (McKenna et al. 2025, Figure 19)."""

import itertools
from collections.abc import Sequence
from typing import Any

from dpx_papers.analysis import Made, Noted, frame
from dpx_papers.mckenna2025 import verdicts
from dpx_papers.mckenna2025.allocation import by_the_rule
from dpx_papers.mckenna2025.lab import Lab, of_positive
from dpx_papers.mckenna2025.parametric import points_of
from dpx_papers.report.shape import Part
from dpx_papers.scaling import parametric


@of_positive
def mckenna_fig19_parametric_optimum(lab: Lab, ratios: Sequence[float], times: float | int, starts: int) -> Made:
    """Fits form L2 as for Figure 18 and searches models from the smallest trained one upward.

    Above the largest trained model the form extrapolates.

    Attributes:
        lab: The measurements and the budgets.
        ratios: Noise-batch ratios.
        times: Largest model of the search, in times of the largest trained one.
        starts: Starts of L-BFGS.
    """
    measured, _ = lab.measured()
    points = points_of(measured, lab)
    fit = parametric.fit("L2", *points.columns, starts=starts)
    models = float(points.parameters.min()), float(points.parameters.max()) * times
    rows = optimal(fit, ratios, lab.computes_of().tolist(), float(measured.sequence_length[0]), models)
    note = f"beyond {points.parameters.max():,.0f} parameters and N = {points.examples.max():,.0f} the form extrapolates"
    return {"optimum": Noted(rows, [note]), "verdicts": [judged(rows, models)]}


def optimal(fit: parametric.Fit, ratios: Sequence[float], computes: Sequence[float], tokens: float, models: tuple[float, float]) -> Any:
    """Returns the best model, and that by the rule of 20 tokens a parameter, at each ratio and compute."""
    rows = frame(itertools.product(map(float, ratios), computes), columns=["ratio", "compute"])
    pairs = zip(rows["compute"].tolist(), rows["ratio"].tolist(), strict=True)
    rows["model"] = [parametric.optimal_parameters(fit, compute, ratio, tokens, *models) for compute, ratio in pairs]
    return rows.assign(rule=rows["compute"].map(by_the_rule))


def judged(rows: Any, models: tuple[float, float]) -> Part:
    """Returns the verdict: the best model grows more slowly with compute under more noise, by intervals of slopes. An end of the searched
    range is not an optimum."""
    claim = "the best model grows more slowly with compute at a larger ratio"
    inner = rows[(rows["model"] > models[0] * 1.01) & (rows["model"] < models[1] / 1.01)]
    slopes = {ratio: verdicts.slope(own, "compute", "model") for ratio, own in inner.groupby("ratio") if len(own) >= 3}
    if len(slopes) < 2:
        return Part.of(claim, None, f"{len(slopes)} ratios with an optimum inside the range (2 needed)")
    words = "; ".join(f"ratio {ratio:.2g}: {slope.words()}" for ratio, slope in slopes.items())
    return Part.of(claim, slopes[max(slopes)].high < slopes[min(slopes)].low, words)
