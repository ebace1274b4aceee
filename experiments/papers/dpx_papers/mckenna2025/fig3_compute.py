"""Shows loss and tokens per parameter by compute, and where more compute stops helping (McKenna et al. 2025, Figures 3a to 3c)."""

from collections.abc import Sequence
from typing import Any

from dpx.cost.designs import NEAR
from dpx_papers.analysis import Made, Noted, frame
from dpx_papers.mckenna2025 import verdicts
from dpx_papers.mckenna2025.lab import Lab, of_positive
from dpx_papers.report.shape import Part
from dpx_papers.scaling.optima import ends_flat, knee, optima, saturating_compute


@of_positive
def mckenna_fig3ab_compute(lab: Lab, epsilons: Sequence[float | int]) -> Made:
    """Analyses the lab's sizes at two epsilons.

    The knee is found by two rules, since the paper does not state its rule (its text and Table 2 differ): the point furthest below the
    chord of the curve, and the least compute within 1 % of the loss at the largest.

    Attributes:
        lab: The measurements and the budgets.
        epsilons: The two epsilons.
    """
    fitted = lab.fitted()
    points = optima(fitted.surface, lab.ratio, lab.sizes, epsilons, lab.computes_of(), lab.near)
    knees, near = knees_of(points), f"{NEAR:.0%} of the loss at the largest compute"
    rows = points[["size", "epsilon", "compute", "loss", "smallest_model", "marks"]]
    return {"loss_by_compute": Noted(rows, fitted.notes), "knees": Noted(knees, title=near), "verdicts": judged(knees)}


def knees_of(points: Any) -> list[dict[str, Any]]:
    """Returns the knee, the saturating compute, and whether the last doubling gained less than 1 %, of each curve of three points or
    more."""
    curves = points.astype({name: float for name in ("size", "epsilon", "compute", "loss")}).groupby(["size", "epsilon"], sort=False)
    rows = []
    for (size, epsilon), curve in curves:
        if len(curve) >= 3:
            computes, losses = curve["compute"].to_numpy(), curve["loss"].to_numpy()
            ends = {"knee": knee(computes, losses), "saturates_at": saturating_compute(computes, losses)}
            rows.append({"size": size, "epsilon": epsilon} | ends | {"is_flat": ends_flat(computes, losses)})
    return rows


def judged(knees: Sequence[dict[str, Any]]) -> list[Part]:
    """Returns the verdicts: the knee moves right with epsilon and with data. A curve that still falls at its end has no knee yet and is
    not compared."""
    flat = frame([one for one in knees if one["is_flat"]])
    shown = f"{len(flat)} of {len(knees)} curves end flat" if knees else "no curve of three points"
    return [
        Part.of("loss stops falling at some compute", bool(len(flat)) if knees else None, shown),
        verdicts.ascending("the knee rises with epsilon", verdicts.neighbours(flat, ["size"], "epsilon", "saturates_at")),
        verdicts.ascending("the knee rises with the data", verdicts.neighbours(flat, ["epsilon"], "size", "saturates_at")),
    ]


@of_positive
def mckenna_fig3c_token_ratio(lab: Lab, size: float | int | None, epsilons: Sequence[float | int]) -> Made:
    """Computes tokens per parameter; padding counts as tokens, as in the paper.

    Attributes:
        lab: The measurements and the budgets.
        size: Protected records; null takes the lab's.
        epsilons: Epsilons.
    """
    fitted = lab.fitted()
    points = optima(fitted.surface, lab.ratio, [size or lab.size], epsilons, lab.computes_of(), lab.near)
    slopes = slopes_of(points)
    rows = points[["epsilon", "compute", "tokens_per_parameter", "smallest_token_ratio", "loss", "marks"]]
    lines = [{"epsilon": epsilon} | vars(slope) for epsilon, slope in slopes.items()]
    return {"token_ratio": Noted(rows, fitted.notes), "slopes": lines, "verdicts": judged_ratio(slopes)}


def slopes_of(points: Any) -> dict[float, verdicts.Slope]:
    """Returns the slope of what the figure draws, the smallest ratio within 1 % of the least loss, by ascending epsilon, over all computes.

    The ratio of the least loss itself jumps between models that are as good.
    """
    curves = points.astype({"epsilon": float}).groupby("epsilon")
    return {epsilon: verdicts.slope(own, "compute", "smallest_token_ratio") for epsilon, own in curves if len(own) >= 3}


def judged_ratio(slopes: dict[float, verdicts.Slope]) -> list[Part]:
    """Returns the verdicts: the ratio rises with compute at the smallest epsilon, and less at the largest, by intervals of slopes."""
    rises, falls = "tokens per parameter rise with compute at the smallest epsilon", "they rise less at the largest epsilon"
    if len(slopes) < 2:
        return [Part.of(claim, None, f"{len(slopes)} epsilons with a slope (2 needed)") for claim in (rises, falls)]
    (low, first), *_, (high, last) = slopes.items()
    words = f"slope {first.words()} at epsilon {low:g}, {last.words()} at {high:g}"
    return [Part.of(rises, first.low > 0, words), Part.of(falls, last.high < first.low, words)]
