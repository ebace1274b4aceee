"""Shows the smallest model's losses as recorded, averaged, made monotone, and extended (McKenna et al. 2025, Figure 14)."""

from typing import Any

import numpy as np

from dpx.cost.surface import extend, isotonic, rolling_mean, smooth
from dpx_papers.analysis import Made, Noted, frame
from dpx_papers.mckenna2025.lab import Fitted, Lab, of_positive
from dpx_papers.report.shape import Part

CLOSE = 0.02
DRAWN = 5  # ratios in the picture


@of_positive
def mckenna_fig14_smoothing(lab: Lab, reach: float | int) -> Made:
    """Draws loss curves and their smoothing; the surface itself ends at the lab's reach.

    Attributes:
        lab: The measurements and the budgets.
        reach: How many times the measured steps are drawn, by the power law of each curve's end.
    """
    fitted = lab.fitted()
    rows = stages(fitted, reach)
    ratios = fitted.grid.ratios_R
    rows["is_drawn"] = rows["noise_batch_ratio"].isin(ratios[:: max(1, -(-len(ratios) // DRAWN))])
    title = f"{fitted.grid.names[0]}: {fitted.grid.parameters_M[0]:,.0f} parameters"
    return {"smoothing": Noted(rows, fitted.notes, title), "verdicts": judged(rows)}


def stages(fitted: Fitted, reach: float | int) -> Any:
    """Returns the losses of the smallest model at each ratio and step, recorded, averaged and fitted; steps beyond the measured ones have
    no recorded loss."""
    import pandas as pd

    grid = fitted.grid
    steps, losses_RT = grid.steps_T.astype(float), grid.losses_MRT[0]
    width = max(1, min(10, len(steps) // 10))
    means, smoothed = rolling_mean(losses_RT, width), smooth(grid.losses_MRT, width)[0]
    beyond = np.geomspace(steps[-1], steps[-1] * reach, 7)[1:] if reach > 1 else np.zeros(0)
    further = isotonic(extend(steps, smoothed, beyond), 0, increasing=True) if len(beyond) else np.zeros((len(smoothed), 0))
    parts = []
    for r, ratio in enumerate(grid.ratios_R.tolist()):
        measured = {"recorded": losses_RT[r], "rolling_mean": means[r], "fitted": smoothed[r]}
        parts.append(frame({"noise_batch_ratio": ratio, "step": steps} | measured))
        unknown = {"recorded": np.nan, "rolling_mean": np.nan, "fitted": further[r]}
        parts.append(frame({"noise_batch_ratio": ratio, "step": beyond} | unknown))
    return pd.concat(parts, ignore_index=True)


def judged(rows: Any) -> list[Part]:
    """Returns the verdicts: the losses are monotone in both directions, and near the averages, so that a flattened rise of the loss is
    detected."""
    curves = rows.pivot(index="noise_batch_ratio", columns="step", values="fitted").to_numpy()
    rise, fall = float(np.diff(curves, axis=1).max(initial=0.0)), float(-np.diff(curves, axis=0).min(initial=0.0))
    moved, against = (rows["fitted"] / rows["rolling_mean"] - 1).abs().max(), max(rise, fall)
    claim = "fitted losses fall with the steps and rise with the ratio"
    return [
        Part.of(claim, against <= 1e-9, f"largest step against it {against:.2g}"),
        Part.of(f"smoothing moves no rolling mean by more than {CLOSE:.0%}", moved <= CLOSE, f"at most {moved:.2%}"),
    ]
