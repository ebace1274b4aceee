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
    """Judges by ratio whether the smallest or the largest batches have the lower loss: the smaller ones at the largest ratio, and at no
    other."""

    value: str = LOSS
    by: str = BATCH
    groups: int = 2

    def judge(self, groups: Groups, rows: Rows) -> Judged:
        by_ratio = {ratio: own for ratio, own in self.split(rows, RATIO).items() if len(own) > 1}
        if len(by_ratio) < 2:
            return None, f"{len(by_ratio)} ratios with two batches or more"
        holds = [ratio for ratio, own in by_ratio.items() if lower_end(own) == "smaller"] == [max(by_ratio)]
        return holds, "; ".join(f"ratio {ratio:.3g}: {self.spreads(own)}" for ratio, own in by_ratio.items())


@declaration
class Tuned(Rule):
    """Judges whether the loss of each batch at its own best learning rate rises with the batch. Rates that lack a batch are left out."""

    value: str = LOSS
    by: str = BATCH
    groups: int = 2

    def judge(self, groups: Groups, rows: Rows) -> Judged:
        by_rate = [{batch: statistics.fmean(losses) for batch, losses in own.items()} for own in self.split(rows, RATE).values()]
        whole = [losses for losses in by_rate if len(losses) == len(groups)]
        if len(whole) < 2:
            return None, f"{len(whole)} rates with every batch (2 needed)"
        tuned = {batch: min(losses[batch] for losses in whole) for batch in groups}
        words = ", ".join(f"{batch:g}: {loss:.3f}" for batch, loss in tuned.items())
        return all(low < high for low, high in itertools.pairwise(tuned.values())), f"at the best rate of each: {words}"


@declaration
class AsPredicted(Rule):
    """Judges whether every two models of one epsilon end in the order that the fit of the laptop's grid predicts.

    Models outside the grid are left out.
    """

    def parts(self, evidence: Evidence, experiment: str) -> list[Part]:
        return [self.compared(self.rows(evidence, experiment), predictor(evidence.home))]

    def compared(self, rows: Rows, predicted: Predictor) -> Part:
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
