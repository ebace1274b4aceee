"""Compares settings of equal (epsilon, delta), which differ in what an attacker can reach (McKenna et al. 2025, appendix D and Figure
15)."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpx.cost.designs import excess_by_profiles
from dpx_papers.analysis import Made, frame
from dpx_papers.mckenna2025.lab import of_positive
from dpx_papers.report.shape import Part

EPSILONS = np.concatenate([[0.0], np.geomspace(1e-2, 30, 80)])


@of_positive
def mckenna_calibration_profiles(
    size: int, examples: int, epsilon: float, delta: float, batch_sizes: Sequence[int], points: Sequence[float | int], interval: float
) -> Made:
    """Calibrates Poisson settings that visit the same number of records to one (epsilon, delta), and compares them over all of delta(eps).

    Attributes:
        size: Protected records.
        examples: Records that a setting visits.
        epsilon: Epsilon of the calibration.
        delta: Delta of the calibration.
        batch_sizes: Batch sizes.
        points: Epsilons at which delta is compared.
        interval: Grid interval of PLD accounting, which rounds upward.
    """
    from dpx.privacy import solve
    from dpx.privacy.accounting import compose
    from dpx.privacy.events import Release

    settings, profiles, whole = [], {"epsilon": list(points)}, {}
    for batch in batch_sizes:
        charges = [(Release(noise_multiplier=1.0, sampling_probability=batch / size), examples // batch)]
        sigma = solve.solve(charges, epsilon=epsilon, delta=delta, interval=interval)
        composed = compose(solve.scaled(charges, sigma), interval=interval)
        row = {"batch_size": batch, "steps": examples // batch, "noise_multiplier": sigma}
        settings.append(row | {"membership_advantage": composed.delta(0.0)})
        profiles[f"delta_at_batch_{batch}"] = [composed.delta(float(point)) for point in points]
        whole[batch] = deltas(composed)
    excess = [
        {"instead_of": one, "uses": two, "excess": excess_by_profiles(EPSILONS, whole[one], whole[two])}
        for one, two in itertools.permutations(batch_sizes, 2)
    ]
    rows = frame(profiles, dtype=object)
    return {"settings": settings, "profiles": rows, "excess_vulnerability": excess, "verdicts": [judged(rows, float(epsilon))]}


def deltas(composed: Any) -> np.ndarray:
    """Returns delta of a composition at each of `EPSILONS`."""
    return np.array([composed.delta(float(epsilon)) for epsilon in EPSILONS])


def judged(profiles: Any, epsilon: float) -> Part:
    """Returns the verdict: for each two batch sizes, one profile is above the other below the claimed epsilon and below it above that
    epsilon."""
    kept = profiles[profiles["epsilon"] != epsilon].astype(float).set_index("epsilon")
    rises = kept.diff(axis=1).iloc[:, 1:] > 0
    signs = rises.eq(rises.index < epsilon, axis=0)
    right = int(signs.to_numpy().sum())
    claim = f"profiles cross only at epsilon {epsilon:g}: the larger batch reveals more below it and less above"
    return Part.of(claim, 0 < right == signs.size, f"{right} of {signs.size} neighbours in order, over {len(kept)} points")
