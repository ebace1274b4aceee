"""Finds the best model for a compute budget, by privacy budget and data (McKenna et al. 2025, Figures 1 and 13)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dpx_papers.analysis import Made, Noted
from dpx_papers.mckenna2025 import verdicts
from dpx_papers.mckenna2025.lab import Lab, of_positive
from dpx_papers.report.shape import NOT_RUN, PASS, Part
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
    """Returns the verdicts on two claims: for one number of records on the model's size by epsilon, for several on its size by records.

    A rule's model outside the trained ones is not compared.
    """
    private = points[np.isfinite(points["epsilon"].astype(float))]
    smaller = {
        size: [
            (model, by_the_rule(compute))
            for model, compute in zip(own["smallest_model"], own["compute"], strict=True)
            if models[0] < by_the_rule(compute) < models[1]
        ]
        for size, own in private.groupby("size")
    }
    claim = "the best private model is smaller than 20 tokens a parameter would have it"
    if len(smaller) == 1:
        (pairs,) = smaller.values()
        by_epsilon = verdicts.neighbours(private, ("size", "compute"), "epsilon", "smallest_model")
        return [verdicts.ascending(claim, pairs), verdicts.ascending("it is smaller at a smaller epsilon", by_epsilon)]
    each = {size: verdicts.ascending(claim, pairs) for size, pairs in smaller.items()}
    states = [part.state == PASS for part in each.values() if part.state != NOT_RUN]
    words = "; ".join(f"{size:,.0f} records: {part.statistic}" for size, part in each.items())
    by_size = verdicts.neighbours(private, ("epsilon", "compute"), "size", "smallest_model")
    return [
        Part.of(f"at every number of records {claim}", all(states) if states else None, words),
        verdicts.ascending("it is larger with more records", by_size),
    ]
