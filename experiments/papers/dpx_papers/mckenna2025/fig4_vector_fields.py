"""Computes how much a doubling of the privacy budget, the batch or the data reduces the noise-batch ratio (McKenna et al. 2025, Figure
4)."""

import functools
from collections.abc import Callable, Sequence

from dpx.declaration import declaration
from dpx.picture import Arrows, Picture
from dpx.table import Table
from dpx_papers.mckenna2025 import verdicts
from dpx_papers.mckenna2025.lab import Positive
from dpx_papers.report.shape import Part, verdict_table

PLANES = (("epsilon", "batch_size"), ("size", "batch_size"), ("epsilon", "size"))
PLACES = ("epsilon", "batch_size", "size")


@declaration
class MckennaFig4VectorFields(Positive):
    """Computes arrows ratio(x) / ratio(2x) - 1 along the two axes of each plane.

    On axes of doubling values the end of one arrow is the start of another, so each ratio is computed once.

    Attributes:
        steps: Steps of a run.
        delta: Delta of epsilon.
        sizes: Protected records.
        batch_sizes: Batch sizes.
        epsilons: Epsilons.
        fixed_size: Records in the plane without them.
        fixed_batch_size: Batch size in the plane without it.
        fixed_epsilon: Epsilon in the plane without it.
        interval: Grid interval of PLD accounting, which rounds upward.
    """

    steps: int
    delta: float
    sizes: Sequence[int]
    batch_sizes: Sequence[int]
    epsilons: Sequence[float | int]
    fixed_size: int
    fixed_batch_size: int
    fixed_epsilon: float
    interval: float

    def __call__(self) -> list[Table]:
        ratio = functools.cache(self._ratio)
        place = {"size": self.fixed_size, "batch_size": self.fixed_batch_size, "epsilon": self.fixed_epsilon}
        axes = {"size": self.sizes, "batch_size": self.batch_sizes, "epsilon": self.epsilons}
        planes = [plane(ratio, axes, place, *names) for names in PLANES]
        return [*planes, verdict_table(judged(planes))]

    def pictures(self) -> list[Picture]:
        """Draws the three panels; an arrow over a whole step of the axis halves the ratio."""
        names = {"size": "data N", "batch_size": "batch size", "epsilon": "epsilon"}
        fixed = {
            "size": f"N = {self.fixed_size:,}",
            "batch_size": f"batch {self.fixed_batch_size:,}",
            "epsilon": f"epsilon {self.fixed_epsilon:g}",
        }
        panels = tuple(
            Arrows(
                table=f"{one}_{two}",
                x=one,
                y=two,
                right=f"gain_of_{one}",
                up=f"gain_of_{two}",
                title=next(words for name, words in fixed.items() if name not in (one, two)),
                x_label=names[one],
                y_label=names[two],
            )
            for one, two in PLANES
        )
        caption = (
            f"What doubling takes off the noise-batch ratio after {self.steps:,} steps at delta {self.delta:g}: ratio(x) / ratio(2x) - 1."
        )
        return [Picture("mckenna_vector_fields", caption, panels)]

    def _ratio(self, size: float | int, batch_size: float | int, epsilon: float | int) -> float:
        from dpx.privacy.noise_batch_ratio import noise_batch_ratio

        return noise_batch_ratio(size, batch_size, self.steps, epsilon=epsilon, delta=self.delta, interval=self.interval).ratio


def plane(
    ratio: Callable[..., float], axes: dict[str, Sequence[float | int]], place: dict[str, float | int], first: str, second: str
) -> Table:
    """Returns the table of one panel: a row per point with both components of its arrow."""
    rows = []
    for one in axes[first]:
        for two in axes[second]:
            here = place | {first: one, second: two}
            if here["batch_size"] * 2 > here["size"]:
                continue
            value = ratio(**here)
            arrow = [value / ratio(**(here | {name: 2 * here[name]})) - 1 for name in (first, second)]
            rows.append((one, two, value, *arrow))
    columns = (first, second, "noise_batch_ratio", f"gain_of_{first}", f"gain_of_{second}")
    fixed = ", ".join(f"{name} {value:g}" for name, value in place.items() if name not in (first, second))
    return Table(f"{first}_{second}", columns, tuple(rows), f"gain of doubling, at {fixed}")


# The gains of doubling the one and the other value, by the point of a plane.
Gains = dict[tuple[float, float], tuple[float, float]]


def judged(planes: Sequence[Table]) -> list[Part]:
    """Returns the verdicts on all planes. What is read along epsilon, and at a batch size that the paper does not give, is reported and
    not judged."""
    by_plane = {one.columns[:2]: {(float(a), float(b)): (float(c), float(d)) for a, b, _, c, d, *_ in one.rows} for one in planes}
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
