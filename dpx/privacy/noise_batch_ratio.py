"""Computes the noise multiplier over the batch size, by which McKenna et al. 2025 compare runs of different batch sizes (appendix B.1).

It is the smaller of two branches. One is Poisson sampling with amplification. In the other, batches are deterministic: a record takes part
at most ceil(T B / N) times, and the noise is that of one Gaussian release times the root of this number.
"""

import math
from dataclasses import dataclass

from dpx.privacy import closed_form, solve
from dpx.privacy.accounting import Real
from dpx.privacy.events import Release


@dataclass(frozen=True)
class NoiseBatchRatio:
    """The noise of both branches; `chosen` is the branch with less noise, and the sampler that a run must use with it."""

    batch_size: Real
    poisson: float
    deterministic: float
    participations: int

    @property
    def chosen(self) -> str:
        """Returns the name of the branch with less noise."""
        return "poisson" if self.poisson <= self.deterministic else "deterministic"

    @property
    def ratio(self) -> float:
        """Returns the smaller noise multiplier over the batch size."""
        return min(self.poisson, self.deterministic) / self.batch_size


def noise_batch_ratio(
    size: Real,
    batch_size: Real,
    steps: int,
    *,
    epsilon: Real,
    delta: float,
    interval: float | None = None,
    coarse: float | None = None,
) -> NoiseBatchRatio:
    """Returns the smallest noise over batch size for (epsilon, delta) under zero_out, by PLD.

    `interval` and `coarse` have the same meaning as in `dpx.privacy.solve.solve`.
    """
    release = Release(noise_multiplier=1.0, sampling_probability=min(1.0, batch_size / size))
    poisson = solve.solve([(release, steps)], epsilon=epsilon, delta=delta, interval=interval, coarse=coarse)
    participations = math.ceil(steps * batch_size / size)
    deterministic = math.sqrt(participations) / closed_form.mu(epsilon, delta)
    return NoiseBatchRatio(batch_size, poisson, deterministic, participations)
