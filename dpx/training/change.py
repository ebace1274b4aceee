"""Compares what a run trained with where it began, and with how far its noise alone would have moved it.

The squared norm of a change by noise alone is a sum over n coordinates. With mean e and variance v of one coordinate, estimated by m
simulated ones (`noise_alone`), it is compared with a gamma distribution of mean n e and variance n v (1 + n / m) plus a share for
rounding (`ROUNDING`). For SGD without decay this is the chi-squared distribution of Gaussian noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import gammainc, gammaincc, gammainccinv

from dpx.declaration import ConfigError
from dpx.init.weights import Leaves
from dpx.training.noise_alone import Moment

# The probability with which noise alone would be taken for a change by the data, over all comparisons of a run.
CHANCE = 1e-3
# The relative deviation of a squared norm that rounding alone may give.
ROUNDING = 1e-3

Verdict = Literal["unmoved", "within", "less", "moved"]
_SENTENCES = {
    "unmoved": "WARNING: the released weights are the weights that the run began with, so it changed nothing",
    "within": "Inconclusive: a change by the data of this size or less is hidden by the noise; held-out rows show whether the run learnt",
    "less": "The change is smaller than noise alone gives, so gradients of the data opposed it; held-out rows show whether the run learnt",
    "moved": "The change is larger than noise alone gives; whether it is an improvement, held-out rows show",
}


class NotCompared(ConfigError):
    """Says why a change cannot be compared with noise alone; without a path of this machine, since it is released."""

    def __init__(self, value: str, reason: str, fix: str = "Nothing else depends on this comparison"):
        super().__init__(value, reason, fix)


@dataclass(frozen=True)
class Compared:
    """The change of some parameters beside the change that noise alone gives.

    Attributes:
        parameter: Its path, or what the row is about.
        numbers: Number of coordinates.
        change: Norm of the difference between released and initial values.
        noise_alone: Root of the mean squared norm of that difference under noise alone.
        above: Probability that noise alone gives at least this norm.
        below: Probability that noise alone gives at most this norm.
        shape: Shape of the gamma distribution of the squared norm under noise alone; infinite without variance.
    """

    parameter: str
    numbers: int
    change: float
    noise_alone: float
    above: float
    below: float
    shape: float = float("inf")

    def seen_from(self, chance: float) -> float | None:
        """Returns the ratio to `noise_alone` from which the test calls a norm larger at `chance`; `None` where noise gives none."""
        if not self.noise_alone or self.shape == float("inf"):
            return None
        return float(gammainccinv(self.shape, chance) / self.shape) ** 0.5

    @property
    def ratio(self) -> float | None:
        return self.change / self.noise_alone if self.noise_alone else None


@dataclass(frozen=True)
class Change:
    """What a run changed: of each compared parameter, of all of them together, and the trained numbers in all, compared or not."""

    parts: tuple[Compared, ...]
    whole: Compared
    trained: int

    @property
    def verdict(self) -> Verdict:
        """Whether the change, of all parameters or of any one, is larger than noise alone gives at the probability `CHANCE`."""
        every = (*self.parts, self.whole)
        if self.whole.change == 0:
            return "unmoved"
        if min(one.above for one in every) * len(every) < CHANCE:
            return "moved"
        return "less" if self.whole.below < CHANCE else "within"

    def sentence(self) -> str:
        """Returns what a user reads, on one line: the norms, what they show, and the smallest change that the test sees."""
        whole, ratio = self.whole, "" if self.whole.ratio is None else f", {self.whole.ratio:.4g} times as much"
        of = f"{whole.numbers:,} of {self.trained:,} trained numbers"
        line = f"What training changed: {of} by the norm {whole.change:.4g}, where noise alone gives {whole.noise_alone:.4g}{ratio}"
        if whole.numbers < self.trained:
            line += " (the others were drawn from the run's secret, so where they began is not known)"
        seen = whole.seen_from(CHANCE / (len(self.parts) + 1))
        power = "" if seen is None or self.verdict == "unmoved" else f" The test sees changes from {seen:.4g} times that of noise alone on."
        return f"{line}. {_SENTENCES[self.verdict]}.{power}"

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of a table, by column."""
        return [
            {
                "parameter": one.parameter,
                "numbers": one.numbers,
                "norm_of_change": one.change,
                "norm_by_noise_alone": one.noise_alone,
                "ratio": one.ratio,
                "chance_by_noise_alone": one.above,
            }
            for one in (*self.parts, self.whole)
        ]


def compare(begun: Leaves, ended: Leaves, moments: Mapping[str, Moment]) -> Change:
    """Returns the change of every trained parameter whose initial values are known.

    Args:
        begun: The known initial values, by path.
        ended: The released values of all trained parameters, by path.
        moments: The moments of a coordinate's squared change by noise alone, by path.

    Raises:
        NotCompared: If training or noise alone leads to values that are not finite.
    """
    parts = {path: _Sum.of(begun[path], ended[path], moments[path]) for path in sorted(begun)}
    whole = _Sum(*map(sum, zip(*parts.values(), strict=True)))
    compared = tuple(part.compared(path) for path, part in parts.items())
    return Change(compared, whole.compared("all of these"), sum(leaf.size for leaf in ended.values()))


class _Sum(NamedTuple):
    """Squared norm of a change, with its mean and variance under noise alone."""

    numbers: int
    squared: float
    mean: float
    variance: float

    @classmethod
    def of(cls, begun: np.ndarray, ended: np.ndarray, moment: Moment) -> "_Sum":
        difference = ended.astype(np.float64) - begun.astype(np.float64)
        # The mean is known from a sample only, whose error is common to all coordinates.
        variance = begun.size * moment.variance * (1 + begun.size / moment.coordinates)
        return cls(begun.size, float(np.square(difference).sum()), begun.size * moment.mean, variance)

    def compared(self, parameter: str) -> Compared:
        if not np.isfinite([self.squared, self.mean, self.variance]).all():
            raise NotCompared(parameter, "training, or noise alone, leads to values that are not finite")
        # After one step of Adam all coordinates moved alike, up to rounding, which the sample's variance does not show.
        variance = self.variance + (ROUNDING * self.mean) ** 2
        above, below, shape = float(self.squared == 0), 1.0, float("inf")
        if variance > 0:
            shape = self.mean**2 / variance
            place = self.squared * self.mean / variance
            above, below = float(gammaincc(shape, place)), float(gammainc(shape, place))
        return Compared(parameter, self.numbers, self.squared**0.5, self.mean**0.5, above, below, shape)
