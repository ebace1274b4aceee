"""Compares the compute-optimal configuration with three fixed ones, by epsilon (McKenna et al. 2025, Figure 5 and section 4.4)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.scaling.noise import Calibration
from dpx.scaling.query import NEAR
from dpx.table import Table
from dpx_papers.mckenna2025.lab import Baseline, Fitted, OfLab
from dpx_papers.report.shape import Part, verdict_table
from dpx_papers.scaling.optima import optimum

OPTIMAL, CHEAPER = "compute-optimal", "compute-optimal at a fifth"
Row = tuple[float, str, float | None, float | None]


@declaration
class MckennaFig5Baselines(OfLab):
    """Compares the lab's baselines with the optimum, for its size and compute.

    Attributes:
        epsilons: Epsilons.
        published: The paper's three settings, whose ratios need no measurement.
        published_size: Protected records at which those ratios are solved exactly.
    """

    epsilons: Sequence[float | int]
    published: Sequence[Baseline]
    published_size: int

    def __call__(self) -> list[Table]:
        tables = [ratios(self.published, self.published_size, self.epsilons, self.lab.delta)]
        if not self.lab.is_measured:
            return tables
        fitted = self.lab.fitted()
        rows = self._losses(fitted)
        title = f"predicted losses at {self.lab.size:g} records and {self.lab.compute:.3g} FLOPs"
        columns = ("epsilon", "setting", "loss", "compute")
        return [*tables, Table("losses", columns, tuple(rows), title, fitted.notes), verdict_table(judged(rows, float(self.lab.epsilon)))]

    def _losses(self, fitted: Fitted) -> list[Row]:
        rows: list[Row] = []
        for epsilon in self.epsilons:
            ratio = self.lab.ratio(epsilon)
            for one in self.lab.baselines:
                noise, _ = ratio(*(np.array([float(value)]) for value in (self.lab.size, one.batch_size, one.steps)))
                loss = float(fitted.surface.at(float(one.parameters), float(one.steps), noise).loss[0])
                compute = 6 * one.parameters * one.batch_size * one.steps * fitted.surface.tokens
                rows.append((float(epsilon), one.model, loss if np.isfinite(loss) else None, float(compute)))
            for name, compute in ((OPTIMAL, float(self.lab.compute)), (CHEAPER, self.lab.compute / 5)):
                best = optimum(fitted.surface, ratio, size=self.lab.size, epsilon=epsilon, compute=compute)
                rows.append((float(epsilon), name, best and best.loss, compute))
        return rows

    def pictures(self) -> list[Picture]:
        """Plots the ratios at full scale, and losses if they were measured."""
        axes: dict[str, Any] = {"x": "epsilon", "x_scale": "log", "by": "setting"}
        ratio = Lines(table="ratios", y=("ratio",), title="published settings", y_label="noise-batch ratio", y_scale="log", **axes)
        loss = Lines(table="losses", y=("loss",), title="predicted", y_label="loss, nats", **axes)
        caption = "Three fixed settings of equal compute by epsilon: their noise-batch ratios, and losses beside the best."
        return [Picture("mckenna_fig5_baselines", caption, (ratio, loss) if self.lab.is_measured else (ratio,))]


def ratios(settings: Sequence[Baseline], size: int, epsilons: Sequence[float | int], delta: float) -> Table:
    """Returns the noise of both branches (Poisson sampling and fixed batches), solved at each setting."""
    rows = []
    for one in settings:
        for epsilon in epsilons:
            solved = Calibration(epsilon, delta).exact(size, one.batch_size, one.steps)
            noise = solved.poisson, solved.deterministic, solved.chosen
            rows.append((one.model, epsilon, one.steps, one.batch_size, *noise, solved.ratio, float(np.log2(solved.ratio))))
    columns = ("setting", "epsilon", "steps", "batch_size", "sigma_poisson", "sigma_fixed", "chosen", "ratio", "log2_ratio")
    return Table("ratios", columns, tuple(rows), f"noise of fixed settings, {size:,} records, delta {delta:g}")


def judged(rows: Sequence[Row], epsilon: float) -> list[Part]:
    """Returns the verdicts: no fixed setting has a lower loss than the optimum, the best fixed setting depends on epsilon, and
    the optimum at a fifth of the compute has the loss of the best fixed setting."""
    at = {(one, name): loss for one, name, loss, _ in rows}
    epsilons = sorted({one for one, *_ in rows})
    fixed = [name for name in dict.fromkeys(name for _, name, *_ in rows) if name not in (OPTIMAL, CHEAPER)]
    known = {one: {name: loss for name in fixed if (loss := at[one, name]) is not None} for one in epsilons}
    compared = [(one, name) for one in epsilons for name in known[one] if at[one, OPTIMAL] is not None]
    above = [f"{name} at {one:g}" for one, name in compared if (at[one, OPTIMAL] or 0.0) > known[one][name] * (1 + 1e-3)]
    claim = "the compute-optimal configuration is at or below every fixed setting"
    first = Part.of(claim, not above, f"{len(compared)} compared; above: {', '.join(above) or 'none'}")
    best = {one: min(losses, key=lambda name: losses[name]) for one, losses in known.items() if len(losses) == len(fixed)}
    second, words = "which fixed setting is best depends on epsilon", ", ".join(f"{one:g}: {name}" for one, name in best.items())
    return [
        first if compared else Part.of(claim, None, "no fixed setting lies inside the grid"),
        Part.of(second, len(set(best.values())) > 1, words)
        if len(best) > 1
        else Part.of(second, None, f"all are known at {len(best)} epsilons"),
        _cheaper(at, known, epsilon),
    ]


def _cheaper(at: dict[tuple[float, str], float | None], known: dict[float, dict[str, float]], epsilon: float) -> Part:
    claim = "a fifth of the compute, spent best, does as well as the best fixed setting (to 1 %)"
    loss = at.get((epsilon, CHEAPER))
    if loss is None or not known.get(epsilon):
        return Part.of(claim, None, f"nothing to compare at epsilon {epsilon:g}")
    name = min(known[epsilon], key=lambda one: known[epsilon][one])
    return Part.of(
        claim, loss <= (1 + NEAR) * known[epsilon][name], f"{loss:.3f} against {known[epsilon][name]:.3f} ({name}) at epsilon {epsilon:g}"
    )
