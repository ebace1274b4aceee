"""Finds the batch size from which larger batches gain little; the paper says that it grows as N sqrt(epsilon / T) (McKenna et al. 2025,
section 4.1)."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.table import Table
from dpx_papers.mckenna2025.lab import Positive
from dpx_papers.report.shape import Part, verdict_table


@declaration
class MckennaDiminishingBatch(Positive):
    """Finds the batch size from which a doubling hardly reduces the noise-batch ratio, over a grid of N, epsilon and T.

    Attributes:
        delta: Delta of epsilon.
        sizes: Protected records.
        epsilons: Epsilons.
        steps: Numbers of steps.
        smallest_batch_size: Batch size from which the search begins.
        threshold: Reduction by a doubling at which the search ends.
        interval: Grid interval of PLD accounting, which rounds upward.
    """

    delta: float
    sizes: Sequence[int]
    epsilons: Sequence[float | int]
    steps: Sequence[int]
    smallest_batch_size: int
    threshold: float
    interval: float

    def __call__(self) -> list[Table]:
        rows = []
        for size in self.sizes:
            for epsilon in self.epsilons:
                for steps in self.steps:
                    batch = self._turning_point(size, epsilon, steps)
                    scale = size * math.sqrt(epsilon / steps)
                    rows.append((size, epsilon, steps, batch, scale, batch / scale))
        columns = ("size", "epsilon", "steps", "batch_size", "scale", "batch_over_scale")
        logs = np.log([[row[3], row[4]] for row in rows])
        slope = float(np.polyfit(logs[:, 1], logs[:, 0], 1)[0])
        fit = Table("slope", ("slope", "claimed"), ((slope, 1.0),), "log batch size against log N sqrt(epsilon / T)")
        points = Table("turning_points", columns, tuple(rows), f"where doubling the batch gains {self.threshold:.0%}")
        return [points, fit, verdict_table([judged(slope)])]

    def pictures(self) -> list[Picture]:
        """Plots turning points against the claimed scale, one series per number of records."""
        axes: dict[str, Any] = {"x": "scale", "x_label": "N sqrt(epsilon / T)", "x_scale": "log", "y_scale": "log"}
        label = f"batch size where doubling gains {self.threshold:.0%}"
        panel = Lines(table="turning_points", marks=("batch_size",), by="size", y_label=label, **axes)
        return [Picture("mckenna_diminishing_batch", "Where larger batches stop paying, against the claimed scale.", (panel,))]

    def _turning_point(self, size: int, epsilon: float | int, steps: int) -> float:
        """Finds the turning point by bisection on the power of two, then by a straight line between the two gains around the threshold."""
        gains: dict[float | int, float] = {}

        def gain(power: float | int) -> float:
            if power not in gains:
                ratios = [self._ratio(size, self.smallest_batch_size * 2 ** (power + more), epsilon, steps) for more in (0, 1)]
                gains[power] = ratios[0] / ratios[1] - 1
            return gains[power]

        low, high = 0, math.floor(math.log2(size / self.smallest_batch_size)) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if gain(middle) > self.threshold else (low, middle)
        between = (gain(low) - self.threshold) / (gain(low) - gain(high))
        return self.smallest_batch_size * 2 ** (low + min(max(between, 0.0), 1.0))

    def _ratio(self, size: int, batch_size: float | int, epsilon: float | int, steps: int) -> float:
        from dpx.privacy.noise_batch_ratio import noise_batch_ratio

        return noise_batch_ratio(size, batch_size, steps, epsilon=epsilon, delta=self.delta, interval=self.interval).ratio


def judged(slope: float) -> Part:
    """Returns the verdict on the claim, which is a proportion: the slope must be 1, within a fifth."""
    return Part.of("the batch size where larger ones stop paying grows as N sqrt(epsilon / T)", abs(slope - 1) <= 0.2, f"slope {slope:.3f}")
