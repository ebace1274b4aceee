"""Shows loss and tokens per parameter by compute, and where more compute stops helping (McKenna et al. 2025, Figures 3a to 3c)."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.scaling.query import NEAR, ends_flat, knee, saturating_compute
from dpx.table import Table
from dpx_papers.mckenna2025 import verdicts
from dpx_papers.mckenna2025.lab import BY_COMPUTE, OfLab
from dpx_papers.report.shape import Part, verdict_table
from dpx_papers.scaling.optima import Optimum, optima

# Slopes that differ by less than this are equal.
LESS = 0.05


@declaration
class MckennaFig3abCompute(OfLab):
    """Analyses the lab's sizes at two epsilons.

    The knee is found by two rules, since the paper does not state its rule (its text and Table 2 differ): the point furthest below the
    chord of the curve, and the least compute within 1 % of the loss at the largest.

    Attributes:
        epsilons: The two epsilons.
    """

    epsilons: Sequence[float | int]

    def __call__(self) -> list[Table]:
        fitted = self.lab.fitted()
        points = optima(fitted.surface, self.lab.ratio, self.lab.sizes, self.epsilons, self.lab.computes_of())
        columns = ("size", "epsilon", "compute", "loss", "smallest_model", "marks")
        rows = tuple((one.size, one.epsilon, one.compute, one.loss, one.smallest_model, "; ".join(one.marks)) for one in points)
        knees, near = knees_of(points), f"{NEAR:.0%} of the loss at the largest compute"
        return [
            Table("loss_by_compute", columns, rows, "least predicted loss by compute", fitted.notes),
            Table("knees", ("size", "epsilon", "knee", "saturates_at", "is_flat"), tuple(knees), near),
            verdict_table(judged(knees)),
        ]

    def pictures(self) -> list[Picture]:
        """Plots a panel for each epsilon, with a line for each size."""
        axes: dict[str, Any] = {"table": "loss_by_compute", "y_label": "loss, nats"} | BY_COMPUTE
        panels = tuple(
            Lines(y=("loss",), by="size", where=("epsilon", epsilon), title=f"epsilon = {epsilon:g}", **axes) for epsilon in self.epsilons
        )
        return [Picture("mckenna_fig3ab_compute", "Least predicted loss by compute, for several sizes of data.", panels)]


Knee = tuple[float, float, float, float, bool]


def knees_of(points: Sequence[Optimum]) -> list[Knee]:
    """Returns (size, epsilon, knee, saturating compute, whether the last doubling gained less than 1 %) of each curve of three points or
    more."""
    curves: dict[tuple[float, float], list[Optimum]] = {}
    for one in points:
        curves.setdefault((float(one.size), float(one.epsilon)), []).append(one)
    rows = []
    for (size, epsilon), curve in curves.items():
        if len(curve) >= 3:
            computes, losses = np.array([one.compute for one in curve]), np.array([one.loss for one in curve])
            rows.append((size, epsilon, knee(computes, losses), saturating_compute(computes, losses), ends_flat(computes, losses)))
    return rows


def judged(knees: Sequence[Knee]) -> list[Part]:
    """Returns the verdicts: the knee moves right with epsilon and with data. A curve that still falls at its end has no knee yet and is
    not compared."""
    flat = [one for one in knees if one[4]]
    flattens = "loss stops falling at some compute"
    parts = [
        Part.of(flattens, bool(flat), f"{len(flat)} of {len(knees)} curves end flat")
        if knees
        else Part.of(flattens, None, "no curve of three points")
    ]
    for claim, same, grows in (("the knee rises with epsilon", 0, 1), ("the knee rises with the data", 1, 0)):
        pairs = verdicts.neighbours(flat, operator.itemgetter(same), operator.itemgetter(grows))
        parts.append(verdicts.ascending(claim, [(low[3], high[3]) for low, high in pairs]))
    return parts


@declaration
class MckennaFig3cTokenRatio(OfLab):
    """Computes tokens per parameter; padding counts as tokens, as in the paper.

    Attributes:
        size: Protected records; null takes the lab's.
        epsilons: Epsilons.
    """

    size: float | int | None
    epsilons: Sequence[float | int]

    def __call__(self) -> list[Table]:
        fitted = self.lab.fitted()
        points = optima(fitted.surface, self.lab.ratio, [self.size or self.lab.size], self.epsilons, self.lab.computes_of())
        columns = ("epsilon", "compute", "tokens_per_parameter", "smallest_token_ratio", "loss", "marks")
        rows = tuple(
            (one.epsilon, one.compute, one.tokens_per_parameter, one.smallest_token_ratio, one.loss, "; ".join(one.marks)) for one in points
        )
        slopes = slopes_of(points)
        return [
            Table("token_ratio", columns, rows, "tokens per parameter by compute", fitted.notes),
            Table("slopes", ("epsilon", "slope"), tuple(slopes), "of log tokens per parameter against log compute"),
            verdict_table(judged_ratio(slopes)),
        ]

    def pictures(self) -> list[Picture]:
        """Plots a line for each epsilon."""
        lines = Lines(
            table="token_ratio", y=("smallest_token_ratio",), by="epsilon", y_label="tokens per parameter", y_scale="log", **BY_COMPUTE
        )
        caption = "Tokens per parameter of the best configuration: the smallest within 1 % of the least predicted loss."
        return [Picture("mckenna_fig3c_token_ratio", caption, (lines,))]


def slopes_of(points: Sequence[Optimum]) -> list[tuple[float, float]]:
    """Returns (epsilon, slope) by ascending epsilon, over the computes whose best model is neither the smallest nor the largest trained
    one."""
    rows = []
    for epsilon in sorted({float(one.epsilon) for one in points}):
        curve = [one for one in points if one.epsilon == epsilon and not one.is_censored]
        if len(curve) >= 3:
            x, y = np.log([one.compute for one in curve]), np.log([one.tokens_per_parameter for one in curve])
            rows.append((epsilon, float(np.polyfit(x, y, 1)[0])))
    return rows


def judged_ratio(slopes: Sequence[tuple[float, float]]) -> list[Part]:
    """Returns the verdicts: the ratio rises with compute at the smallest epsilon, and rises less at each larger epsilon."""
    rises, falls = "tokens per parameter rise with compute at the smallest epsilon", "they rise less at a larger epsilon"
    if len(slopes) < 2:
        return [Part.of(claim, None, f"{len(slopes)} epsilons with a slope (2 needed)") for claim in (rises, falls)]
    (low, first), (high, last) = slopes[0], slopes[-1]
    words = f"slope {first:.2f} at epsilon {low:g}, {last:.2f} at {high:g}"
    return [Part.of(rises, first > 0, words), Part.of(falls, last < first - LESS, words)]
