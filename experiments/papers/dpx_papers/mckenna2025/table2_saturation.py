"""Finds where more compute stops helping, and the noise of the twenty printed optima (McKenna et al. 2025, Table 2)."""

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.scaling.noise import Calibration
from dpx.scaling.query import NEAR, ends_flat, saturating_compute
from dpx.table import Table
from dpx_papers.mckenna2025 import verdicts
from dpx_papers.mckenna2025.lab import Fitted, OfLab
from dpx_papers.report.shape import Part, verdict_table
from dpx_papers.scaling import published
from dpx_papers.scaling.optima import Optimum, optima


@declaration
class MckennaTable2Saturation(OfLab):
    """Finds the saturating compute: the least compute within 1 % of the loss at the largest.

    The paper does not state its rule. The printed rows need no measurement: the identities of each one are checked and both branches of its
    noise are solved.

    Attributes:
        sizes: Protected records; null takes the lab's.
        epsilons: Epsilons.
    """

    sizes: Sequence[float | int] | None
    epsilons: Sequence[float | int]

    def __call__(self) -> list[Table]:
        tables = [printed()]
        if not self.lab.is_measured:
            return tables
        fitted = self.lab.fitted()
        points = self._saturated(fitted)
        columns = ("size", "epsilon", "compute", "loss", "model", "steps", "batch_size", "tokens_per_parameter", "marks")
        rows = tuple(
            (one.size, one.epsilon, one.compute, one.loss, one.parameters, one.steps, one.batch_size, one.tokens_per_parameter)
            + ("; ".join((*one.marks, *(() if is_flat else ("still falling at the largest compute",)))),)
            for one, is_flat in points
        )
        return [
            *tables,
            Table("saturation", columns, rows, f"least compute within {NEAR:.0%}", fitted.notes),
            verdict_table(judged(points)),
        ]

    def _saturated(self, fitted: Fitted) -> list[tuple[Optimum, bool]]:
        """Returns the optimum at each curve's saturating compute, and whether the curve ends flat; else it is at the grid's end."""
        out = []
        for size, epsilon in itertools.product(self.sizes or self.lab.sizes, self.epsilons):
            curve = optima(fitted.surface, self.lab.ratio, [size], [epsilon], self.lab.computes_of())
            if curve:
                computes, losses = np.array([one.compute for one in curve]), np.array([one.loss for one in curve])
                place = int(np.flatnonzero(computes == saturating_compute(computes, losses))[0])
                out.append((curve[place], ends_flat(computes, losses)))
        return out

    def pictures(self) -> list[Picture]:
        """Plots the saturating compute by epsilon: the printed one, and ours if there is a fit."""
        axes: dict[str, Any] = {"x": "epsilon", "y": ("compute",), "by": "size", "y_label": "FLOPs", "x_scale": "log", "y_scale": "log"}
        lines, own = Lines(table="printed", title="printed", **axes), Lines(table="saturation", title="predicted", **axes)
        caption = "The least compute within 1 % of the loss at the largest, by epsilon and data."
        return [Picture("mckenna_table2_saturation", caption, (lines, own) if self.lab.is_measured else (lines,))]


def printed() -> Table:
    """Returns Table 2's rows with what they imply. The identities check that they were copied correctly; they are not a finding."""
    rows = []
    for one in published.TABLE_2:
        solved = Calibration(one.epsilon, published.DELTA).exact(one.size, one.batch_size, round(one.steps))
        identities = one.implied_compute / one.compute, one.implied_tokens_per_parameter / one.tokens_per_parameter
        noise = solved.poisson, solved.deterministic, solved.chosen, solved.ratio
        stated = one.size, one.epsilon, one.compute, one.loss, one.parameters, one.steps, one.batch_size, one.tokens_per_parameter
        rows.append((*stated, *identities, one.epochs, *noise))
    columns = ("size", "epsilon", "compute", "loss", "parameters", "steps", "batch_size", "tokens_per_parameter", "6MBST_over_C")
    columns += ("SBT_over_M_over_printed", "epochs", "sigma_poisson", "sigma_fixed", "chosen", "ratio")
    notes = (
        "6 M B S T / C and S B T / M: a check of transcription, not a finding; printed digits allow 8 %",
        "losses are predictions of the paper's fit, from less than one epoch and a batch of 1,024",
        "3.3e8 parameters are the largest model of the fit, so those rows are at the edge of the grid",
    )
    return Table("printed", columns, tuple(rows), "Table 2 as printed, and the noise of each row", notes)


def judged(points: Sequence[tuple[Optimum, bool]]) -> list[Part]:
    """Returns the verdicts. A curve that still falls at the largest compute has not saturated and is not compared."""
    parts = []
    flat = [one for one, is_flat in points if is_flat]
    for claim, same, grows in (("it grows with epsilon", "size", "epsilon"), ("it grows with the data", "epsilon", "size")):
        pairs = verdicts.neighbours(flat, operator.attrgetter(same), operator.attrgetter(grows))
        parts.append(verdicts.ascending(f"the compute that saturates: {claim}", [(low.compute, high.compute) for low, high in pairs]))
    return parts
