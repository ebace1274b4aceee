"""Shows the predicted loss by steps, by model and by batch, with the best values of the other two (McKenna et al. 2025, Figure 6)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.scaling.query import Candidates, candidates
from dpx.table import Table
from dpx_papers.mckenna2025 import verdicts
from dpx_papers.mckenna2025.lab import Fitted, OfLab
from dpx_papers.report.shape import Part, verdict_table

# (what varies, its value, on which axis, place on it, least loss there)
Row = tuple[str, float, str, float, float]
AXES = ("steps", "model", "batch_size")


@declaration
class MckennaFig6FullGrid(OfLab):
    """Computes rows of panels that vary epsilon, data or compute; the other two keep the lab's values.

    Attributes:
        epsilons: Epsilons of the first row.
        times: Factors of data and compute of the other rows.
    """

    epsilons: Sequence[float | int]
    times: Sequence[float | int]

    def __call__(self) -> list[Table]:
        fitted = self.lab.fitted()
        rows = self._curves(fitted)
        return [*(self._table(axis, rows, fitted.notes) for axis in AXES), verdict_table(judged(rows))]

    def _table(self, axis: str, rows: Sequence[Row], notes: Sequence[str]) -> Table:
        own = tuple((name, value, place, loss) for name, value, on, place, loss in rows if on == axis)
        return Table(f"by_{axis}", ("varies", "value", axis, "loss"), own, f"least predicted loss at each {axis}", tuple(notes))

    def _curves(self, fitted: Fitted) -> list[Row]:
        rows: list[Row] = []
        own = {"epsilon": self.lab.epsilon, "size": self.lab.size, "compute": self.lab.compute}
        varied = {"epsilon": self.epsilons} | {name: [one * own[name] for one in self.times] for name in ("size", "compute")}
        for name, values in varied.items():
            for value in values:
                at = own | {name: value}
                asked = candidates(fitted.surface, self.lab.ratio(at["epsilon"]), compute=at["compute"], size=at["size"])
                rows += [(name, float(value), *point) for axis in AXES for point in along(asked, axis)]
        return rows

    def pictures(self) -> list[Picture]:
        """Draws three pictures of three panels."""
        labels = {"steps": "steps", "model": "parameters", "batch_size": "batch size"}
        log: dict[str, Any] = {"x_scale": "log", "y_label": "loss, nats"}
        return [
            Picture(
                f"mckenna_fig6_{name}",
                f"Least predicted loss by steps, model and batch size; {name} varies, what is not on the axis is chosen best.",
                tuple(
                    Lines(table=f"by_{axis}", x=axis, y=("loss",), by="value", where=("varies", name), x_label=labels[axis], **log)
                    for axis in AXES
                ),
            )
            for name in ("epsilon", "size", "compute")
        ]


def along(asked: Candidates, axis: str) -> list[tuple[str, float, float]]:
    """Returns (axis, place, least loss) at every place of an axis that has a loss; steps are grouped by powers of 2^(1/4)."""
    values = {"steps": 2.0 ** (np.round(4 * np.log2(asked.steps)) / 4), "model": asked.parameters, "batch_size": asked.batch_size}[axis]
    known = np.isfinite(asked.loss)
    return [(axis, float(place), float(asked.loss[known & (values == place)].min())) for place in np.unique(values[known])]


def judged(rows: Sequence[Row]) -> list[Part]:
    """Returns the verdicts: curves fall and then rise, and a wrong batch raises the loss most."""
    curves: dict[tuple[str, float, str], list[tuple[float, float]]] = {}
    for name, value, axis, place, loss in rows:
        curves.setdefault((name, value, axis), []).append((place, loss))
    long = {key: np.array([loss for _, loss in sorted(curve)]) for key, curve in curves.items() if len(curve) >= 5}
    parts = []
    for axis in AXES:
        claim, own = f"the loss by {axis.replace('_', ' ')} falls and then rises", [curve for key, curve in long.items() if key[2] == axis]
        inside = sum(bool(curve[0] > curve.min() < curve[-1]) for curve in own)
        words = f"{inside} of {len(own)} curves have their least loss inside"
        parts.append(
            Part.of(claim, inside >= verdicts.IN_ORDER * len(own), words) if own else Part.of(claim, None, "no curve of five points")
        )
    steepest = "a wrong batch costs more than a wrong model or number of steps"
    spans = {axis: [float(np.ptp(curve)) for key, curve in long.items() if key[2] == axis] for axis in AXES}
    if not all(spans.values()):
        return [*parts, Part.of(steepest, None, "an axis has no curve of five points")]
    mean = {axis: float(np.mean(values)) for axis, values in spans.items()}
    words = ", ".join(f"{axis} {value:.2f}" for axis, value in mean.items())
    return [*parts, Part.of(steepest, mean["batch_size"] == max(mean.values()), f"mean span of the loss, nats: {words}")]
