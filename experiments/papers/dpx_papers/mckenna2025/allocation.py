"""Finds the best model for a compute budget, by privacy budget and data (McKenna et al. 2025, Figures 1 and 13)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dpx_papers.analysis import Made, Noted
from dpx_papers.mckenna2025 import verdicts
from dpx_papers.mckenna2025.lab import Lab, of_positive
from dpx_papers.report.shape import Part
from dpx_papers.scaling.optima import optima

TOKENS_A_PARAMETER = 20  # Hoffmann et al. 2022
# The ends of what is within 1 % of the least loss; Figure 1 draws one number of records, Figure 13 every one.
NEAR = ["size", "epsilon", "compute", "loss", "smallest_model", "largest_model", "smallest_batch_size", "largest_batch_size"]
NEAR += ["fewest_steps", "most_steps", "rule", "is_main_size"]
COLUMNS = ["size", "epsilon", "compute", "loss", "smallest_model", "model", "batch_size", "steps", "ratio", "epochs", "marks", "rule"]


@of_positive
def mckenna_allocation(lab: Lab, sizes: Sequence[float | int] | None) -> Made:
    """Analyses each size at the lab's epsilons and computes.

    Attributes:
        lab: The measurements and the budgets.
        sizes: Protected records; null takes the lab's.
    """
    fitted = lab.fitted()
    curve = optima(fitted.surface, lab.ratio, sizes or lab.sizes, lab.epsilons, lab.computes_of(), lab.near)
    curve["rule"] = [by_the_rule(compute) for compute in curve["compute"]]
    models = float(fitted.surface.parameters_M[0]), float(fitted.surface.parameters_M[-1])
    rows = curve.rename(columns={"parameters": "model"})[COLUMNS]
    main = sizes[0] if sizes and len(sizes) == 1 else lab.size
    near = curve.assign(is_main_size=[bool(size == main) for size in curve["size"]])[NEAR]
    return {"allocation": Noted(rows, fitted.notes), "near": near, "verdicts": judged(curve, models)}


def by_the_rule(compute: float) -> float:
    """Returns the model size by the rule of 20 tokens a parameter: C = 6 M * 20 M."""
    return float(np.sqrt(compute / (6 * TOKENS_A_PARAMETER)))


def judged(points: Any, models: tuple[float, float]) -> list[Part]:
    """Returns the verdicts on two claims. A rule's model outside the trained ones is not compared."""
    private = points[np.isfinite(points["epsilon"].astype(float))]
    pairs = ((model, by_the_rule(compute)) for model, compute in zip(private["smallest_model"], private["compute"], strict=True))
    inside = [pair for pair in pairs if models[0] < pair[1] < models[1]]
    by_epsilon = verdicts.neighbours(private, ("size", "compute"), "epsilon", "smallest_model")
    return [
        verdicts.ascending("the best private model is smaller than 20 tokens a parameter would have it", inside),
        verdicts.ascending("it is smaller at a smaller epsilon", by_epsilon),
    ]
