"""Declares `sampler=fixed_size`: exactly B rows, drawn again at each step."""

from typing import ClassVar, Literal

import numpy as np

from dpx.declaration import declaration
from dpx.sampler.sampler_protocol import GeneratorFor, Sampler


@declaration
class FixedSize(Sampler):
    """Draws a uniformly random subset of exactly B rows at each step.

    Attributes:
        assumed: poisson also reports the epsilon that Poisson sampling would give, as unsupported; null does not.
    """

    assumed: Literal["poisson"] | None = None
    name: Literal["fixed_size"] = "fixed_size"
    depends_on_size: ClassVar[bool] = True
    covers_integer_noise: ClassVar[bool] = False
    explanation: ClassVar[str] = "a fresh random subset of fixed size is drawn at each step"

    def draw(self, size: int, sampling_probability: float, generator_for: GeneratorFor, step: int) -> np.ndarray:
        return _subset(size, round(size * sampling_probability), generator_for(step, "subset"))


def _subset(size: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """Returns a uniform subset of exactly `count` of `size` rows: the first distinct ones of uniform draws."""
    if 2 * count > size:
        left_out = _subset(size, size - count, generator)
        return np.setdiff1d(np.arange(size, dtype=np.int64), left_out, assume_unique=True)
    kept = np.empty(0, np.int64)
    while len(kept) < count:
        candidates = np.concatenate([kept, generator.integers(size, size=count - len(kept) + 16)])
        _, first = np.unique(candidates, return_index=True)
        kept = candidates[np.sort(first)[:count]]
    return np.sort(kept)
