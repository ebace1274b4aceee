"""Computes how much a doubling of the privacy budget, the batch or the data reduces the noise-batch ratio (McKenna et al. 2025, Figure
4)."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpx_papers.analysis import Made, Noted
from dpx_papers.mckenna2025 import verdicts
from dpx_papers.mckenna2025.lab import Lab, chosen_by, of_positive
from dpx_papers.report.shape import Part

PLANES = (("epsilon", "batch_size"), ("size", "batch_size"), ("epsilon", "size"))
PLACES = ("epsilon", "batch_size", "size")


@of_positive
def mckenna_fig4_vector_fields(
    lab: Lab,
    steps: int,
    sizes: Sequence[int],
    batch_sizes: Sequence[int],
    epsilons: Sequence[float | int],
    fixed_size: int,
    fixed_batch_size: int,
    fixed_epsilon: float,
    interval: float,
) -> Made:
    """Computes arrows ratio(x) / ratio(2x) - 1 along the two axes of each plane.

    On axes of doubling values the end of one arrow is the start of another, so each ratio is computed once.

    Attributes:
        lab: Delta, and whose choices are taken: the authors' code accounts for Poisson sampling alone.
        steps: Steps of a run.
        sizes: Protected records.
        batch_sizes: Batch sizes.
        epsilons: Epsilons.
        fixed_size: Records in the plane without them.
        fixed_batch_size: Batch size in the plane without it.
        fixed_epsilon: Epsilon in the plane without it.
        interval: Grid interval of PLD accounting, which rounds upward.
    """
    from dpx.cost.designs import noise_batch_ratio

    @functools.cache
    def ratio(size: float | int, batch_size: float | int, epsilon: float | int) -> float:
        found = noise_batch_ratio(size, batch_size, steps, epsilon=epsilon, delta=lab.delta, interval=interval)
        return found.poisson / batch_size if lab.by == "authors" else found.ratio

    place = {"size": fixed_size, "batch_size": fixed_batch_size, "epsilon": fixed_epsilon}
    axes = {"size": sizes, "batch_size": batch_sizes, "epsilon": epsilons}
    planes = {names: plane(ratio, axes, place, *names) for names in PLANES}
    noted = {"_".join(names): Noted(rows, [chosen_by(lab.by)]) for names, rows in planes.items()}
    return {**noted, "verdicts": judged(planes)}


def plane(
    ratio: Callable[..., float], axes: Mapping[str, Sequence[float | int]], place: Mapping[str, float | int], first: str, second: str
) -> list[dict[str, Any]]:
    """Returns the rows of one panel: a point each, with both components of its arrow."""
    rows = []
    for one in axes[first]:
        for two in axes[second]:
            here = {**place, first: one, second: two}
            if here["batch_size"] * 2 > here["size"]:
                continue
            value = ratio(**here)
            arrow = {f"gain_of_{name}": value / ratio(**(here | {name: 2 * here[name]})) - 1 for name in (first, second)}
            rows.append({first: one, second: two, "noise_batch_ratio": value} | arrow)
    return rows


# The gains of doubling the one and the other value, by the point of a plane.
Gains = dict[tuple[float, float], tuple[float, float]]


def judged(planes: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> list[Part]:
    """Returns the verdicts on all planes. What is read along epsilon, and at a batch size that the paper does not give, is reported and
    not judged."""
    by_plane: dict[tuple[str, str], Gains] = {
        (a, b): {(float(row[a]), float(row[b])): (row[f"gain_of_{a}"], row[f"gain_of_{b}"]) for row in rows}
        for (a, b), rows in planes.items()
    }
    parts = [part for gains in by_plane.values() for both in gains.values() for part in both]
    claim = "each part of an arrow lies between 0 and 1: doubling at best halves the ratio"
    bounded = Part.of(claim, min(parts) >= 0 and max(parts) <= 1, f"from {min(parts):.3g} to {max(parts):.3g}")
    along = {name: [pair for names, gains in by_plane.items() for pair in _once_more(gains, names, name)] for name in PLACES}
    alone = verdicts.ascending("doubling the batch, or the data, once more gains less", along["batch_size"] + along["size"])
    steady = {names: _diagonal(gains) for names, gains in by_plane.items()}
    of_batch = [pair for names, pairs in steady.items() if "batch_size" in names for pair in pairs]
    both = verdicts.ascending("doubling both keeps the gain steadier than doubling the worse of the two alone", of_batch)
    rest = [pair for names, pairs in steady.items() if "batch_size" not in names for pair in pairs]
    return [bounded, _beside(alone, "of epsilon", along["epsilon"]), _beside(both, "epsilon and data at one batch size", rest)]


def _beside(part: Part, words: str, pairs: Sequence[tuple[float, float]]) -> Part:
    """Returns the part, with the order of pairs that it does not judge."""
    reported = f"Reported, not judged: {words} {sum(low < high for low, high in pairs)} of {len(pairs)}"
    return Part(part.claim, f"{part.statistic}. {reported}", part.state)


def _once_more(gains: Gains, names: Sequence[str], name: str) -> list[tuple[float, float]]:
    """Returns (gain of `name` after its value is doubled, gain before) at every point of a plane that has `name`."""
    if name not in names:
        return []
    at = list(names).index(name)
    doubled = {point: (2 * point[0], point[1]) if at == 0 else (point[0], 2 * point[1]) for point in gains}
    return [(gains[later][at], gains[point][at]) for point, later in doubled.items() if later in gains]


def _diagonal(gains: Gains) -> list[tuple[float, float]]:
    """Returns the largest change of both gains when both values are doubled, and of one value's gain when that value alone is doubled."""
    pairs = []
    for (one, two), here in gains.items():
        both, first, second = (2 * one, 2 * two), (2 * one, two), (one, 2 * two)
        if all(point in gains for point in (both, first, second)):
            moved = abs(sum(gains[both]) / sum(here) - 1)
            pairs.append((moved, max(abs(gains[first][0] / here[0] - 1), abs(gains[second][1] / here[1] - 1))))
    return pairs
