"""Compares the compute-optimal configuration with three fixed ones, by epsilon (McKenna et al. 2025, Figure 5 and section 4.4)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dpx.cost.designs import NEAR, Calibration
from dpx_papers.analysis import Made, Noted, frame
from dpx_papers.mckenna2025.lab import Baseline, Fitted, Lab, of_positive
from dpx_papers.report.shape import Part
from dpx_papers.scaling.optima import optimum

OPTIMAL, CHEAPER = "compute-optimal", "compute-optimal at a fifth"


@of_positive
def mckenna_fig5_baselines(lab: Lab, epsilons: Sequence[float | int], published: Sequence[Baseline], published_size: int) -> Made:
    """Compares the lab's baselines with the optimum, for its size and compute.

    Attributes:
        lab: The measurements and the budgets.
        epsilons: Epsilons.
        published: The paper's three settings, whose ratios need no measurement.
        published_size: Protected records at which those ratios are solved exactly.
    """
    ratios = []
    for one in published:
        for epsilon in epsilons:
            solved = Calibration(epsilon, lab.delta).exact(published_size, one.batch_size, one.steps)
            row = {"setting": one.model, "epsilon": epsilon, "steps": one.steps, "batch_size": one.batch_size}
            row |= {"sigma_poisson": solved.poisson, "sigma_fixed": solved.deterministic, "chosen": solved.chosen}
            ratios.append(row | {"ratio": solved.ratio, "log2_ratio": float(np.log2(solved.ratio))})
    if not lab.is_measured:
        return {"ratios": ratios}
    fitted = lab.fitted()
    rows = losses(lab, fitted, epsilons)
    return {"ratios": ratios, "losses": Noted(rows, fitted.notes), "verdicts": judged(rows, float(lab.epsilon))}


def losses(lab: Lab, fitted: Fitted, epsilons: Sequence[float | int]) -> Any:
    """Returns the loss and the compute of the lab's baselines, of the optimum, and of the optimum at a fifth, by epsilon."""
    rows = []
    for epsilon in epsilons:
        ratio = lab.ratio(epsilon)
        for one in lab.baselines:
            noise, _ = ratio(*(np.array([float(value)]) for value in (lab.size, one.batch_size, one.steps)))
            loss = float(fitted.surface.at(float(one.parameters), float(one.steps), noise).loss[0])
            compute = float(6 * one.parameters * one.batch_size * one.steps * fitted.surface.tokens)
            rows.append((float(epsilon), one.model, loss if np.isfinite(loss) else None, compute))
        for name, compute in ((OPTIMAL, float(lab.compute)), (CHEAPER, lab.compute / 5)):
            best = optimum(fitted.surface, ratio, size=lab.size, epsilon=epsilon, compute=compute)
            rows.append((float(epsilon), name, best and best.loss, compute))
    return frame(rows, columns=["epsilon", "setting", "loss", "compute"])


def judged(rows: Any, epsilon: float) -> list[Part]:
    """Returns the verdicts: no fixed setting has a lower loss than the optimum, the best fixed setting depends on epsilon, and
    the optimum at a fifth of the compute has the loss of the best fixed setting."""
    at = rows.astype({"loss": float}).pivot(index="epsilon", columns="setting", values="loss")
    fixed = at[[name for name in rows["setting"].unique() if name not in (OPTIMAL, CHEAPER)]]
    known = fixed[at[OPTIMAL].notna()].stack(future_stack=True).dropna()
    above = [f"{name} at {one:g}" for (one, name), loss in known.items() if at.loc[one, OPTIMAL] > loss * (1 + 1e-3)]
    best = fixed.dropna().idxmin(axis=1) if fixed.notna().all(axis=1).any() else fixed.iloc[:0, 0]
    claims = (
        "the compute-optimal configuration is at or below every fixed setting",
        "which fixed setting is best depends on epsilon",
        "a fifth of the compute, spent best, does as well as the best fixed setting (to 1 %)",
    )
    words = ", ".join(f"{one:g}: {name}" for one, name in best.items()) if len(best) > 1 else f"all are known at {len(best)} epsilons"
    shown = f"{len(known)} compared; above: {', '.join(above) or 'none'}" if len(known) else "no fixed setting lies inside the grid"
    own = fixed.loc[epsilon].dropna() if epsilon in fixed.index else fixed.iloc[:0, 0]
    loss = at.loc[epsilon, CHEAPER] if len(own) else np.nan
    cheaper = Part.of(claims[2], None, f"nothing to compare at epsilon {epsilon:g}")
    if not np.isnan(loss):
        against = f"{loss:.3f} against {own.min():.3f} ({own.idxmin()}) at epsilon {epsilon:g}"
        cheaper = Part.of(claims[2], loss <= (1 + NEAR) * own.min(), against)
    return [
        Part.of(claims[0], not above if len(known) else None, shown),
        Part.of(claims[1], best.nunique() > 1 if len(best) > 1 else None, words),
        cheaper,
    ]
