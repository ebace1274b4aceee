"""Noise multiplier over batch size, the number that compares claims across batch sizes (McKenna et al. 2025, appendix B.1).

It is the smaller of two branches: Poisson sampling with amplification, or deterministic batches in which a record takes part at most ceil(T
B / N) times and the noise is that of one Gaussian release times the root of that.
"""

import math
from dataclasses import dataclass

from dpx.privacy import closed_form, solve
from dpx.privacy.accounting import Real
from dpx.privacy.events import Release


@dataclass(frozen=True)
class NoiseBatchRatio:
    """Both branches; `chosen` is the branch with less noise, and the sampler that a run of it must use."""

    batch_size: Real
    poisson: float
    deterministic: float
    participations: int

    @property
    def chosen(self) -> str:
        return "poisson" if self.poisson <= self.deterministic else "deterministic"

    @property
    def ratio(self) -> float:
        return min(self.poisson, self.deterministic) / self.batch_size


def noise_batch_ratio(
    size: Real, batch_size: Real, steps: int, *, epsilon: Real, delta: float, interval: float | None = None
) -> NoiseBatchRatio:
    """Smallest noise over batch for (epsilon, delta) under zero_out, by PLD; `interval` as in `dpx.privacy.solve.solve`."""
    release = Release(noise_multiplier=1.0, sampling_probability=min(1.0, batch_size / size))
    poisson = solve.solve([(release, steps)], epsilon=epsilon, delta=delta, interval=interval)
    participations = math.ceil(steps * batch_size / size)
    deterministic = math.sqrt(participations) / closed_form.mu(epsilon, delta)
    return NoiseBatchRatio(batch_size, poisson, deterministic, participations)
