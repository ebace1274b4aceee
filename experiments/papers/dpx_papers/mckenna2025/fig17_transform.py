"""Tests that the loss is nearly linear in the transformed ratio (McKenna et al. 2025, Figure 17)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.table import Table
from dpx_papers.mckenna2025.lab import BY_RATIO, OfLab
from dpx_papers.report.shape import Part, verdict_table
from dpx_papers.scaling.parametric import transformed

Row = tuple[str, float, float, float]
STRAIGHT = 0.95


@declaration
class MckennaFig17Transform(OfLab):
    """Compares losses after the last measured step, by model, with the ratio and with sigmoid((ln ratio + 8) / 1.6)."""

    def __call__(self) -> list[Table]:
        fitted = self.lab.fitted()
        surface = fitted.surface
        last = int(np.flatnonzero(surface.steps_T <= surface.measured_steps)[-1])
        rows: list[Row] = [
            (name, ratio, float(transformed(ratio)), float(surface.losses_MRT[m, r, last]))
            for m, name in enumerate(surface.names)
            for r, ratio in enumerate(surface.ratios_R.tolist())
        ]
        columns = ("model", "noise_batch_ratio", "transformed", "loss")
        return [
            Table("transform", columns, tuple(rows), f"after {surface.measured_steps:,.0f} steps", fitted.notes),
            verdict_table(judged(rows)),
        ]

    def pictures(self) -> list[Picture]:
        """Plots the losses before and after the transformation."""
        axes: dict[str, Any] = {"table": "transform", "y": ("loss",), "by": "model", "y_label": "loss, nats"}
        panels = (Lines(**BY_RATIO, **axes), Lines(x="transformed", x_label="transformed ratio", **axes))
        return [Picture("mckenna_fig17_transform", "Final losses by noise-batch ratio, and by its transform.", panels)]


def judged(rows: Sequence[Row]) -> list[Part]:
    """Returns the verdicts, by R^2 of a straight line through each model's losses."""
    claim = f"the loss is nearly linear in the transformed ratio (R² of {STRAIGHT:g} or more, and more than in log ratio)"
    names = [name for name in dict.fromkeys(row[0] for row in rows) if sum(row[0] == name for row in rows) >= 4]
    if not names:
        return [Part.of(claim, None, "no model with four ratios")]
    after = [_straightness([row[2] for row in rows if row[0] == name], [row[3] for row in rows if row[0] == name]) for name in names]
    before = [
        _straightness(np.log([row[1] for row in rows if row[0] == name]), [row[3] for row in rows if row[0] == name]) for name in names
    ]
    words = f"median R² {np.median(after):.3f} after, {np.median(before):.3f} before, of {len(names)} models"
    return [Part.of(claim, bool(np.median(after) >= max(STRAIGHT, float(np.median(before)))), words)]


def _straightness(x: Sequence[float] | np.ndarray, y: Sequence[float]) -> float:
    """Returns R^2 of the least-squares line; 0 for a constant."""
    values = np.asarray(y)
    spread = float(((values - values.mean()) ** 2).sum())
    left = float(((values - np.polyval(np.polyfit(x, values, 1), x)) ** 2).sum())
    return 1 - left / spread if spread > 0 else 0.0
