"""McKenna et al. 2025, Figure 4: what doubling the privacy budget, the batch or the data takes off the noise-batch ratio."""

import functools
from collections.abc import Callable, Sequence

from dpx.declaration import declaration
from dpx.picture import Arrows, Picture
from dpx.table import Table

PLANES = (("epsilon", "batch_size"), ("size", "batch_size"), ("epsilon", "size"))


@declaration
class MckennaFig4VectorFields:
    """Arrows ratio(x) / ratio(2x) - 1 along two axes of each plane; the third value is `fixed_*`.

    On axes of doubling values the end of one arrow is the start of another, so each ratio is computed once.
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
        return [plane(ratio, axes, place, *names) for names in PLANES]

    def pictures(self) -> list[Picture]:
        """The three panels; an arrow over a whole step of the axis halves the ratio."""
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
    """One panel: a row per point with both components of its arrow."""
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
