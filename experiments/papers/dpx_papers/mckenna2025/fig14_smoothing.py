"""Shows the smallest model's losses as recorded, averaged, made monotone, and extended (McKenna et al. 2025, Figure 14)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.scaling.extrapolation import extend
from dpx.scaling.smoothing import isotonic, rolling_mean, smooth
from dpx.table import Table
from dpx_papers.mckenna2025.lab import Fitted, OfLab
from dpx_papers.report.shape import Part, verdict_table

Row = tuple[float, float, float | None, float | None, float]
CLOSE = 0.02
DRAWN = 5  # ratios in the picture


@declaration
class MckennaFig14Smoothing(OfLab):
    """Draws loss curves and their smoothing; the surface itself ends at the lab's reach.

    Attributes:
        reach: How many times the measured steps are drawn, by the power law of each curve's end.
    """

    reach: float | int

    def __call__(self) -> list[Table]:
        fitted = self.lab.fitted()
        rows = stages(fitted, self.reach)
        ratios = fitted.grid.ratios_R[:: max(1, -(-len(fitted.grid.ratios_R) // DRAWN))].tolist()
        columns = ("noise_batch_ratio", "step", "recorded", "rolling_mean", "fitted", "is_drawn")
        title = f"{fitted.grid.names[0]}: {fitted.grid.parameters_M[0]:,.0f} parameters"
        return [
            Table("smoothing", columns, tuple((*row, row[0] in ratios) for row in rows), title, fitted.notes),
            verdict_table(judged(rows)),
        ]

    def pictures(self) -> list[Picture]:
        """Plots recorded losses as marks and fitted losses as lines."""
        axes: dict[str, Any] = {"table": "smoothing", "x": "step", "x_scale": "log", "y_label": "loss, nats"}
        lines = Lines(y=("fitted",), marks=("recorded",), by="noise_batch_ratio", where=("is_drawn", True), **axes)
        caption = "Recorded losses (marks), and after smoothing and extension (lines), by ratio."
        return [Picture("mckenna_fig14_smoothing", caption, (lines,))]


def stages(fitted: Fitted, reach: float | int) -> list[Row]:
    """Returns (ratio, step, recorded, rolling mean, fitted) of the smallest model; steps beyond the measured ones have no recorded loss."""
    grid = fitted.grid
    steps, losses_RT = grid.steps_T.astype(float), grid.losses_MRT[0]
    width = max(1, min(10, len(steps) // 10))
    means, smoothed = rolling_mean(losses_RT, width), smooth(grid.losses_MRT, width)[0]
    beyond = np.geomspace(steps[-1], steps[-1] * reach, 7)[1:] if reach > 1 else np.zeros(0)
    further = isotonic(extend(steps, smoothed, beyond), 0, increasing=True) if len(beyond) else np.zeros((len(smoothed), 0))
    rows: list[Row] = []
    for r, ratio in enumerate(grid.ratios_R.tolist()):
        measured = zip(steps.tolist(), losses_RT[r].tolist(), means[r].tolist(), smoothed[r].tolist(), strict=True)
        rows += [(ratio, step, loss, mean, at) for step, loss, mean, at in measured]
        rows += [(ratio, step, None, None, at) for step, at in zip(beyond.tolist(), further[r].tolist(), strict=True)]
    return rows


def judged(rows: Sequence[Row]) -> list[Part]:
    """Returns the verdicts: the losses are monotone in both directions, and near the averages, so that a flattened rise of the loss is
    detected."""
    by_ratio: dict[float, list[Row]] = {}
    for row in rows:
        by_ratio.setdefault(row[0], []).append(row)
    curves = np.array([[row[4] for row in curve] for _, curve in sorted(by_ratio.items())])
    rise, fall = float(np.diff(curves, axis=1).max(initial=0.0)), float(-np.diff(curves, axis=0).min(initial=0.0))
    moved = max(abs(row[4] / row[3] - 1) for row in rows if row[3])
    return [
        Part.of(
            "fitted losses fall with the steps and rise with the ratio",
            max(rise, fall) <= 1e-9,
            f"largest step against it {max(rise, fall):.2g}",
        ),
        Part.of(f"smoothing moves no rolling mean by more than {CLOSE:.0%}", moved <= CLOSE, f"at most {moved:.2%}"),
    ]
