"""Fits the parametric losses L1 and L2, with intervals of their coefficients, and shows where they are wrong (McKenna et al. 2025,
Figures 16 and 18)."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from dpx.cost.measured_runs import Measurements
from dpx.declaration import require
from dpx_papers.analysis import Made, Noted
from dpx_papers.mckenna2025.lab import Lab, of_positive
from dpx_papers.report.shape import Part
from dpx_papers.scaling import parametric

POOR, PARTS = 1.5, 5


@dataclasses.dataclass(frozen=True)
class Points:
    """Holds the data of a parametric fit, in arrays of one length; `run` is the number of each record's run."""

    parameters: np.ndarray
    examples: np.ndarray
    ratio: np.ndarray
    loss: np.ndarray
    run: np.ndarray

    @property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self.parameters, self.examples, self.ratio, self.loss


def points_of(measured: Measurements, lab: Lab) -> Points:
    """Returns the records that the lab's filter keeps, at the learning rate with the lowest final loss; N is batch times steps."""
    # The paper's filter is T > 100,000, s > 5e-7 and loss <= 8; a grid of fewer steps needs its own.
    is_within = (measured.step > lab.steps_above) & (measured.noise_batch_ratio > lab.ratio_above) & (measured.loss <= lab.loss_at_most)
    kept = measured.where(is_within & measured.is_noisy)
    require(len(kept) > 0, "the measurements", "no record passes the filter of parametric fits", "Lower analysis.lab.steps_above")
    cells, run = np.unique(np.stack([kept.parameters, kept.noise_batch_ratio, kept.replicate]), axis=1, return_inverse=True)
    keep = np.zeros(len(kept), bool)
    for number in range(cells.shape[1]):
        rates = np.unique(kept.learning_rate[run == number])
        curves = {rate: np.flatnonzero((run == number) & (kept.learning_rate == rate)) for rate in rates.tolist()}
        ends = {rate: kept.loss[curve[np.argmax(kept.step[curve])]] for rate, curve in curves.items()}
        keep |= (run == number) & (kept.learning_rate == min(ends, key=lambda rate: ends[rate]))
    own = kept.where(keep)
    return Points(own.parameters, own.batch_size * own.step, own.noise_batch_ratio, own.loss, run[keep])


@of_positive
def mckenna_parametric(lab: Lab, form: parametric.Form, published: Mapping[str, float], starts: int, samples: int) -> Made:
    """Minimises the Huber loss on log losses by L-BFGS, with 95 % intervals from draws of whole runs.

    Attributes:
        lab: The measurements and the budgets.
        form: Parametric form.
        published: Coefficients that the paper prints.
        starts: Starts of L-BFGS.
        samples: Draws of whole runs.
    """
    points = points_of(lab.measured()[0], lab)
    fits = {one: parametric.fit(one, *points.columns, starts=starts) for one in ("L1", "L2")}
    intervals = parametric.bootstrap(form, *points.columns, points.run, samples=samples, starts=max(1, starts // 8))
    own, rows = fits[form], []
    for name, one in intervals.items():
        row = {"coefficient": name, "value": own.coefficients[name], "low": one.low, "high": one.high}
        rows.append(row | {"is_identified": one.is_identified, "published": published.get(name)})
    count = f"{len(points.loss)} records of {len(np.unique(points.run))} runs; {own.starts_that_agree} of {starts} starts agree"
    notes = (count, "not identified: the 95 % interval is wider than half of the value; such a coefficient is not a finding")
    arrays = (*points.columns, own.loss(*points.columns[:3]))
    names = ("parameters", "examples", "ratio", "measured", "predicted")
    return {
        "coefficients": Noted(rows, notes),
        "objectives": [{"form": name, "mean_huber_loss": fit.huber_loss} for name, fit in fits.items()],
        "residuals": [dict(zip(names, row, strict=True)) for row in zip(*(column.tolist() for column in arrays), strict=True)],
        "verdicts": [judged_l1(points, own) if form == "L1" else judged_l2(fits["L1"], fits["L2"])],
    }


def judged_l1(points: Points, fit: parametric.Fit) -> Part:
    """Returns the verdict on the paper's reason for another form: L1 is wrong where losses are high."""
    claim = f"L1 is {POOR:g} times as wrong in the highest fifth of losses as in the rest"
    wrong = np.abs(np.log(fit.loss(*points.columns[:3]) / points.loss))
    high = points.loss >= np.quantile(points.loss, 1 - 1 / PARTS)
    above, below = float(wrong[high].mean()), float(wrong[~high].mean()) if (~high).any() else 0.0
    return Part.of(claim, above > POOR * below, f"mean relative error {above:.2%} there, {below:.2%} in the rest")


def judged_l2(first: parametric.Fit, second: parametric.Fit) -> Part:
    """Returns the verdict on L2, which has one coefficient more, so that only a clear gain counts."""
    words = f"{second.huber_loss:.4g} against {first.huber_loss:.4g}"
    return Part.of("L2's Huber loss is at most nine tenths of L1's", second.huber_loss <= 0.9 * first.huber_loss, words)
