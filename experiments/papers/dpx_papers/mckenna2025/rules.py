"""Defines the verdicts on McKenna et al. 2025 that no declared rule expresses, and collects the measurements that its analyses read.

The loss on held-out text after the last step is compared: a larger batch uses its rows more often, which the loss of training rows would
hide.
"""

import itertools
import math
import statistics
from collections.abc import Callable
from pathlib import Path

from dpx.cost.measured_runs import Measurements, measured
from dpx.cost.surface import grid_of, surface_of
from dpx.declaration import ConfigError, declaration
from dpx_papers.report.evidence import Evidence, Rows
from dpx_papers.report.rules import Groups, Judged, Rule, lower_end
from dpx_papers.report.shape import Part

LOSS, BATCH, RATIO = "heldout/loss", "batch_schedule.size", "noise.noise_batch_ratio"
RATE, MODEL = "lr_schedule.learning_rate", "model.name"
MEASUREMENTS = "measurements.csv"
# (model, steps, ratio) -> predicted loss, `None` outside the grid.
Predictor = Callable[[str, float, float], float | None]


@declaration
class CollectMeasurements:
    """Replaces the rows of the laptop grid's runs in measurements.csv; rows of runs that no longer exist stay."""

    def __call__(self, outputs: Path, home: Path) -> list[str]:
        """Writes measurements.csv into `home`; returns a line on each run that could not be read."""
        try:
            fresh, left_out = measured(outputs, "laptop_mckenna_grid-")
        except ConfigError:
            return []
        path = home / MEASUREMENTS
        (Measurements.read(path).updated(fresh) if path.exists() else fresh).write(path)
        return left_out


@declaration
class Ends(Rule):
    """Judges by ratio whether the smallest or the largest batches have the lower loss.

    Smaller batches must be better at the largest ratio and at no other; with `as_in`, the better end must be the same as in the runs of
    that experiment.
    """

    value: str = LOSS
    by: str = BATCH
    groups: int = 2
    as_in: str = ""

    def parts(self, evidence: Evidence, experiment: str) -> list[Part]:
        own = self._by_ratio(evidence, experiment)
        others = self._by_ratio(evidence, self.as_in) if self.as_in else own
        shared = {ratio: groups for ratio, groups in own.items() if ratio in others}
        if len(shared) < (1 if self.as_in else 2):
            return [Part.of(self.claim, None, f"{len(shared)} ratios with two batches or more")]
        if self.as_in:
            holds = all(lower_end(groups) == lower_end(others[ratio]) for ratio, groups in shared.items())
        else:
            holds = [ratio for ratio, groups in shared.items() if lower_end(groups) == "smaller"] == [max(shared)]
        return [Part.of(self.claim, holds, "; ".join(f"ratio {ratio:.3g}: {self.spreads(groups)}" for ratio, groups in shared.items()))]

    def _by_ratio(self, evidence: Evidence, experiment: str) -> dict[float, Groups]:
        by_ratio = self.split(self.rows(evidence, experiment), RATIO)
        return {ratio: groups for ratio, groups in by_ratio.items() if len(groups) > 1}


@declaration
class SameOrder(Rule):
    """Judges whether the order of batches at each batch's best learning rate is the order at the rate that is best overall.

    Rates that lack a batch are left out.
    """

    value: str = LOSS
    by: str = BATCH
    groups: int = 2

    def judge(self, groups: Groups, rows: Rows) -> Judged:
        by_rate = [{batch: statistics.fmean(losses) for batch, losses in own.items()} for own in self.split(rows, RATE).values()]
        whole = [losses for losses in by_rate if len(losses) == len(groups)]
        if len(whole) < 2:
            return None, f"{len(whole)} rates with every batch (2 needed)"
        tuned = {batch: min(losses[batch] for losses in whole) for batch in groups}
        one = min(whole, key=lambda losses: statistics.fmean(losses.values()))
        words = ", ".join(f"{batch:g}: {tuned[batch]:.3f} tuned, {one[batch]:.3f}" for batch in groups)
        return sorted(groups, key=tuned.__getitem__) == sorted(groups, key=one.__getitem__), words


@declaration
class AsPredicted(Rule):
    """Judges whether every two models of one epsilon end in the order that the fit of the laptop's grid predicts.

    Models outside the grid are left out.
    """

    def parts(self, evidence: Evidence, experiment: str) -> list[Part]:
        return [self.judged(self.rows(evidence, experiment), predictor(evidence.home))]

    def judged(self, rows: Rows, predicted: Predictor) -> Part:
        """Returns the verdict on the claim by any prediction."""
        lines = rows.to_dict("records")
        losses = [predicted(row[MODEL], row["steps"], row["noise_multiplier"] / row[BATCH]) for row in lines]
        found = rows.assign(predicted=losses).dropna(subset="predicted") if lines else rows
        groups = [] if found.empty else [(epsilon, own[[MODEL, "predicted", LOSS]]) for epsilon, own in found.groupby("noise.epsilon")]
        by_epsilon = {epsilon: list(own.itertuples(index=False, name=None)) for epsilon, own in groups}
        pairs = [(one, two) for group in by_epsilon.values() for one, two in itertools.combinations(group, 2) if one[0] != two[0]]
        if not pairs:
            return Part.of(self.claim, None, f"{len(rows)} finished runs, no two of one epsilon inside the grid")
        right = sum((one[1] < two[1]) == (one[2] < two[2]) for one, two in pairs)
        lines = [f"{right} of {len(pairs)} pairs"]
        for epsilon, group in by_epsilon.items():
            losses = (f"{model} predicted {loss:.3f}, held-out {heldout:.3f}" for model, loss, heldout in group)
            lines.append(f"epsilon {epsilon:g}: {', '.join(losses)}")
        return Part.of(self.claim, right == len(pairs), "; ".join(lines))


def predictor(home: Path) -> Predictor:
    """Returns the fit of the measured losses: the loss by a model's name, steps and ratio.

    The loss is `None` outside the grid, or without a grid.
    """
    if not (home / MEASUREMENTS).exists():
        return lambda *_: None
    table = Measurements.read(home / MEASUREMENTS)
    grid = grid_of(table)
    if len(grid.parameters_M) < 1 or len(grid.ratios_R) < 2:
        return lambda *_: None
    surface = surface_of(grid, float(table.batch_size[0]), float(table.sequence_length[0]))
    sizes = dict(zip(surface.names, surface.parameters_M.tolist(), strict=True))

    def loss(model: str, steps: float, ratio: float) -> float | None:
        predicted = float(surface.at(sizes[model], steps, ratio).loss) if model in sizes else math.nan
        return predicted if math.isfinite(predicted) else None

    return loss
