"""Finds where more compute stops helping, and the noise of the twenty printed optima (McKenna et al. 2025, Table 2)."""

from collections.abc import Sequence
from typing import Any

from dpx.cost.designs import Calibration
from dpx_papers.analysis import Made, Noted
from dpx_papers.mckenna2025 import verdicts
from dpx_papers.mckenna2025.lab import Lab, of_positive
from dpx_papers.report.shape import Part
from dpx_papers.scaling import published
from dpx_papers.scaling.optima import ends_flat, optima, saturating_compute

COLUMNS = ["size", "epsilon", "compute", "loss", "model", "steps", "batch_size", "tokens_per_parameter", "marks"]


@of_positive
def mckenna_table2_saturation(lab: Lab, sizes: Sequence[float | int] | None, epsilons: Sequence[float | int]) -> Made:
    """Finds the saturating compute: the least compute within 1 % of the loss at the largest.

    The paper does not state its rule. The printed rows need no measurement: the identities of each one check that it was copied correctly,
    which is not a finding, and both branches of its noise are solved.

    Attributes:
        lab: The measurements and the budgets.
        sizes: Protected records; null takes the lab's.
        epsilons: Epsilons.
    """
    printed = []
    for one in published.TABLE_2:
        solved = Calibration(one.epsilon, published.DELTA).exact(one.size, one.batch_size, round(one.steps))
        names = ("size", "epsilon", "compute", "loss", "parameters", "steps", "batch_size", "tokens_per_parameter")
        row = {name: getattr(one, name) for name in names} | {"6MBST_over_C": one.implied_compute / one.compute}
        row |= {"SBT_over_M_over_printed": one.implied_tokens_per_parameter / one.tokens_per_parameter, "epochs": one.epochs}
        row |= {"sigma_poisson": solved.poisson, "sigma_fixed": solved.deterministic, "chosen": solved.chosen, "ratio": solved.ratio}
        printed.append(row)
    if not lab.is_measured:
        return {"printed": printed}
    fitted = lab.fitted()
    rows = saturated(optima(fitted.surface, lab.ratio, sizes or lab.sizes, epsilons, lab.computes_of()), of_best=lab.by == "authors")
    verdict = judged(rows[rows["is_flat"]])
    falling = "still falling at the largest compute"
    pairs = zip(rows["marks"], rows["is_flat"], strict=True)
    rows["marks"] = ["; ".join(filter(None, (marks, "" if is_flat else falling))) for marks, is_flat in pairs]
    shown = rows.rename(columns={"parameters": "model"})[COLUMNS]
    return {"printed": printed, "saturation": Noted(shown, fitted.notes), "verdicts": verdict}


def saturated(points: Any, of_best: bool = False) -> Any:
    """Returns the optimum at each curve's saturating compute, and whether the curve ends flat; else it is at the grid's end."""
    import pandas as pd

    kept = []
    for _, curve in points.groupby(["size", "epsilon"], sort=False):
        computes, losses = (curve[name].to_numpy(float) for name in ("compute", "loss"))
        own = curve[computes == saturating_compute(computes, losses, of_best=of_best)]
        kept.append(own.assign(is_flat=ends_flat(computes, losses)))
    return pd.concat(kept) if kept else points.assign(is_flat=False)


def judged(flat: Any) -> list[Part]:
    """Returns the verdicts. A curve that still falls at the largest compute has not saturated and is not compared."""
    return [
        verdicts.ascending(f"the compute that saturates: {claim}", verdicts.neighbours(flat, [same], grows, "compute"))
        for claim, same, grows in (("it grows with epsilon", "size", "epsilon"), ("it grows with the data", "epsilon", "size"))
    ]
