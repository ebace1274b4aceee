"""Tests that model and data grow equally with compute in training without noise (McKenna et al. 2025, Figure 11)."""

from typing import Any

import numpy as np

from dpx.declaration import require
from dpx_papers.analysis import Made, Noted
from dpx_papers.mckenna2025 import verdicts
from dpx_papers.mckenna2025.lab import Lab, of_positive
from dpx_papers.report.shape import Part
from dpx_papers.scaling.optima import optima


@of_positive
def mckenna_fig11_nonprivate(lab: Lab, tolerance: float) -> Made:
    """Analyses the measurements without noise, at their only batch size.

    Attributes:
        lab: The measurements and the budgets.
        tolerance: How far from one half a slope counts as near it.
    """
    fitted = lab.fitted()
    fix = f"Run +experiment={lab.made_by} noise.noise_batch_ratio=9.094947017729282e-13"
    require(fitted.surface.noiseless is not None, "the grid", "nothing was measured without noise", fix)
    points = optima(fitted.surface, lab.ratio, [lab.size], [np.inf], lab.computes_of()).rename(columns={"parameters": "model"})
    points["tokens"] = points["tokens_per_parameter"] * points["model"]
    rows = points[["compute", "loss", "model", "steps", "tokens", "tokens_per_parameter", "marks"]]
    return {"nonprivate": Noted(rows, fitted.notes), "verdicts": [judged(points, tolerance)]}


def judged(points: Any, tolerance: float) -> Part:
    """Returns the verdict on the slopes of log model and log tokens against log compute; they add up to 1, since C = 6 M tokens.

    The slope must be one half, within the tolerance, and its 95 % interval must hold neither 0 nor 1, where one alone grows. Where
    the best model is at an end of the grid it grows because it must, and does not count.
    """
    claim = f"model and tokens grow as the root of compute, to {tolerance:g}"
    curve = points[~points["is_censored"]]
    if len(curve) < 3:
        return Part.of(claim, None, f"{len(curve)} computes whose best model is not at an end of the grid (3 needed)")
    slope = verdicts.slope(curve, "compute", "model")
    words = f"model {slope.words()}, tokens {1 - slope.slope:.2f}; {len(points) - len(curve)} computes at an end of the grid do not count"
    return Part.of(claim, abs(slope.slope - 0.5) <= tolerance and 0 < slope.low <= slope.high < 1, words)
