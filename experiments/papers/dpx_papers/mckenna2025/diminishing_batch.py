"""Finds the batch size from which larger batches gain little; the paper says that it grows as N sqrt(epsilon / T) (McKenna et al. 2025,
section 4.1)."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

from dpx_papers.analysis import Made, frame
from dpx_papers.mckenna2025 import verdicts
from dpx_papers.mckenna2025.lab import of_positive
from dpx_papers.report.shape import Part


@of_positive
def mckenna_diminishing_batch(
    delta: float,
    sizes: Sequence[int],
    epsilons: Sequence[float | int],
    steps: Sequence[int],
    smallest_batch_size: int,
    threshold: float,
    interval: float,
) -> Made:
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
    rows = []
    for size, epsilon, count in itertools.product(sizes, epsilons, steps):

        def ratio_of(batch: float | int, at: tuple = (size, epsilon, count)) -> float:
            return ratio(at[0], batch, at[1], at[2], delta, interval)

        batch, scale = turning_point(ratio_of, size, smallest_batch_size, threshold), size * math.sqrt(epsilon / count)
        row = {"size": size, "epsilon": epsilon, "steps": count, "batch_size": batch, "scale": scale}
        rows.append(row | {"batch_over_scale": batch / scale})
    points = frame(rows)
    slope = verdicts.slope(points, "scale", "batch_size").slope
    return {"turning_points": points, "slope": [{"slope": slope, "claimed": 1.0}], "verdicts": [judged(slope)]}


def turning_point(ratio_of: Callable[[float | int], float], size: int, smallest: int, threshold: float) -> float:
    """Finds the turning point by bisection on the power of two, then by a straight line between the two gains around the threshold."""

    @functools.cache
    def gain(power: float | int) -> float:
        first, second = (ratio_of(smallest * 2 ** (power + more)) for more in (0, 1))
        return first / second - 1

    low, high = 0, math.floor(math.log2(size / smallest)) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if gain(middle) > threshold else (low, middle)
    between = (gain(low) - threshold) / (gain(low) - gain(high))
    return smallest * 2 ** (low + min(max(between, 0.0), 1.0))


def ratio(size: int, batch_size: float | int, epsilon: float | int, steps: int, delta: float, interval: float) -> float:
    """Returns the noise-batch ratio of a setting."""
    from dpx.cost.designs import noise_batch_ratio

    return noise_batch_ratio(size, batch_size, steps, epsilon=epsilon, delta=delta, interval=interval).ratio


def judged(slope: float) -> Part:
    """Returns the verdict on the claim, which is a proportion: the slope must be 1, within a fifth."""
    return Part.of("the batch size where larger ones stop paying grows as N sqrt(epsilon / T)", abs(slope - 1) <= 0.2, f"slope {slope:.3f}")
