"""Declares `sampler=truncated_poisson`: independent draws under a cap that they hardly ever exceed.

Who is left out above the cap follows from who was drawn and the key, not from what rows hold.
"""

import math
from typing import Any, ClassVar, Literal

import numpy as np

from dpx.declaration import declaration, require
from dpx.sampler import poisson
from dpx.sampler.sampler_protocol import Assumed, GeneratorFor, Sampler


@declaration
class TruncatedPoisson(Sampler):
    """Draws each row independently, and keeps a uniformly random subset of `cap` rows if more are drawn.

    The cap is the smallest one that a draw exceeds with probability at most `slack`, and at least B + 6 standard deviations:
    from there on dp-accounting's truncated event costs less than 0.1 % of epsilon.

    Attributes:
        slack: Probability with which a draw may exceed the cap.
        assumed: poisson also reports the epsilon that Poisson sampling would give, as unsupported; null does not.
    """

    slack: float = 1e-10
    assumed: Assumed = None
    name: Literal["truncated_poisson"] = "truncated_poisson"
    depends_on_size: ClassVar[bool] = True
    explanation: ClassVar[str] = "each {drawn} is drawn independently at each step, up to a cap that is almost never reached"

    def __post_init__(self) -> None:
        require(
            0 < self.slack <= 1e-9,
            f"sampler.slack={self.slack}",
            "with this slack the cap would drop rows too often",
            "Use a value in (0, 1e-9]",
        )

    def cap(self, size: int, sampling_probability: float) -> int:
        """Returns the largest number of rows of one step, which depends on public numbers only."""
        deviation = math.sqrt(size * sampling_probability * (1 - sampling_probability))
        # Half of what every command would import.
        from scipy.stats import binom

        enough = int(binom.isf(self.slack, size, sampling_probability)) + 1
        return min(size, max(enough, math.ceil(size * sampling_probability + 6 * deviation)))

    def draw(self, size: int, sampling_probability: float, generator_for: GeneratorFor, step: int) -> np.ndarray:
        drawn, cap = poisson.independent(size, sampling_probability, generator_for, step), self.cap(size, sampling_probability)
        return drawn if len(drawn) <= cap else np.sort(generator_for(step, "truncate").permutation(drawn)[:cap])

    def ledger_fields(self, size: int, batch: int) -> dict[str, Any]:
        return super().ledger_fields(size, batch) | {"cap": self.cap(size, batch / size)}
