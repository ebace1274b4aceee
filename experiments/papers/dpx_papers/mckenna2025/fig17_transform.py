"""Tests that the loss is nearly linear in the transformed ratio (McKenna et al. 2025, Figure 17)."""

from typing import Any

import numpy as np

from dpx_papers.analysis import Made, Noted, frame
from dpx_papers.mckenna2025.lab import Lab, of_positive
from dpx_papers.report.shape import Part
from dpx_papers.scaling.parametric import transformed

STRAIGHT = 0.95


@of_positive
def mckenna_fig17_transform(lab: Lab) -> Made:
    """Compares losses after the last measured step, by model, with the ratio and with sigmoid((ln ratio + 8) / 1.6).

    Attributes:
        lab: The measurements and the budgets.
    """
    fitted = lab.fitted()
    surface = fitted.surface
    last = int(np.flatnonzero(surface.steps_T <= surface.measured_steps)[-1])
    ratios = surface.ratios_R.tolist()
    rows = frame({"model": np.repeat(surface.names, len(ratios)), "noise_batch_ratio": ratios * len(surface.names)})
    rows["transformed"] = [float(transformed(ratio)) for ratio in rows["noise_batch_ratio"]]
    rows["loss"] = surface.losses_MRT[:, :, last].ravel()
    return {"transform": Noted(rows, fitted.notes, f"after {surface.measured_steps:,.0f} steps"), "verdicts": [judged(rows)]}


def judged(rows: Any) -> Part:
    """Returns the verdict, by R^2 of a straight line through each model's losses."""
    claim = f"the loss is nearly linear in the transformed ratio (R² of {STRAIGHT:g} or more, and more than in log ratio)"
    own = [one for _, one in rows.groupby("model") if len(one) >= 4]
    if not own:
        return Part.of(claim, None, "no model with four ratios")
    after, before = (
        float(np.median(values))
        for values in zip(
            *(
                (_straightness(one["transformed"], one["loss"]), _straightness(np.log(one["noise_batch_ratio"]), one["loss"]))
                for one in own
            ),
            strict=True,
        )
    )
    words = f"median R² {after:.3f} after, {before:.3f} before, of {len(own)} models"
    return Part.of(claim, after >= max(STRAIGHT, before), words)


def _straightness(x: Any, y: Any) -> float:
    """Returns R^2 of the least-squares line; 0 for a constant."""
    values = np.asarray(y)
    spread = float(((values - values.mean()) ** 2).sum())
    left = float(((values - np.polyval(np.polyfit(x, values, 1), x)) ** 2).sum())
    return 1 - left / spread if spread > 0 else 0.0
