"""Tests that model and data grow equally with compute in training without noise (McKenna et al. 2025, Figure 11)."""

from collections.abc import Sequence

import numpy as np

from dpx.declaration import declaration, require
from dpx.picture import Lines, Picture
from dpx.table import Table
from dpx_papers.mckenna2025.lab import BY_COMPUTE, OfLab
from dpx_papers.report.shape import Part, verdict_table
from dpx_papers.scaling.optima import Optimum, optima


@declaration
class MckennaFig11Nonprivate(OfLab):
    """Analyses the measurements without noise, at their only batch size.

    Attributes:
        tolerance: How far from one half a slope counts as near it.
    """

    tolerance: float

    def __call__(self) -> list[Table]:
        fitted = self.lab.fitted()
        fix = f"Run +experiment={self.lab.made_by} noise.noise_batch_ratio=9.094947017729282e-13"
        require(fitted.surface.noiseless is not None, "the grid", "nothing was measured without noise", fix)
        points = optima(fitted.surface, self.lab.ratio, [self.lab.size], [np.inf], self.lab.computes_of())
        columns = ("compute", "loss", "model", "tokens", "tokens_per_parameter", "marks")
        rows = tuple(
            (
                one.compute,
                one.loss,
                one.parameters,
                one.tokens_per_parameter * one.parameters,
                one.tokens_per_parameter,
                "; ".join(one.marks),
            )
            for one in points
        )
        note = "at the measured batch, so that T = C / (6 M B S); steps beyond the measured ones are extrapolated"
        return [
            Table("nonprivate", columns, rows, "the best model without noise", (note, *fitted.notes)),
            verdict_table(judged(points, self.tolerance)),
        ]

    def pictures(self) -> list[Picture]:
        """Plots model and tokens by compute."""
        lines = Lines(table="nonprivate", y=("model", "tokens"), y_label="parameters, tokens", y_scale="log", **BY_COMPUTE)
        return [Picture("mckenna_fig11_nonprivate", "Without noise: the best model and its tokens by compute.", (lines,))]


def judged(points: Sequence[Optimum], tolerance: float) -> list[Part]:
    """Returns the verdicts on the slopes of log model and log tokens against log compute; they add up to 1, since C = 6 M tokens."""
    claim = f"model and tokens grow as the root of compute, to {tolerance:g}"
    curve = [one for one in points if not one.is_censored]
    if len(curve) < 3:
        return [Part.of(claim, None, f"{len(curve)} computes whose best model is not at an end of the grid (3 needed)")]
    slope = float(np.polyfit(np.log([one.compute for one in curve]), np.log([one.parameters for one in curve]), 1)[0])
    return [Part.of(claim, abs(slope - 0.5) <= tolerance, f"model {slope:.2f}, tokens {1 - slope:.2f} over {len(curve)} computes")]
