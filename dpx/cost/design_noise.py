"""Computes the noise-batch ratio that a budget needs, for many settings at once: the smaller of Poisson sampling and fixed batches.

Poisson noise depends on (q, T) alone at one (epsilon, delta). It is solved by PLD, to 1 %, on the nodes of a coarse grid, kept on disk,
and interpolated between them on logarithms for a search; a configuration that is chosen is solved exactly (`exact`).

Computes the noise multiplier over the batch size, by which McKenna et al. 2025 compare runs of different batch sizes (appendix B.1).

It is the smaller of two branches. One is Poisson sampling with amplification. In the other, batches are deterministic: a record takes part
at most ceil(T B / N) times, and the noise is that of one Gaussian release times the root of this number.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass

import numpy as np

from dpx.declaration import require
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


# Nodes in a decade of q and of T.
NODES_A_DECADE = 2


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Noise-batch ratios at one (epsilon, delta). An `epsilon` of inf means no noise: a ratio of 0 by the branch "none".

    `coarse` is the width of the grid on which a chosen configuration is solved, as in `dpx.privacy.solve.solve`.
    """

    epsilon: float | int
    delta: float
    coarse: float | None = None

    def __post_init__(self) -> None:
        require(
            self.epsilon > 0, f"epsilon={self.epsilon}", "a privacy budget must be positive", "Give a value above 0, or inf for no noise"
        )
        require(0 < self.delta < 1, f"delta={self.delta}", "delta is a probability above 0 and below 1", "Give a value between 0 and 1")

    def ratio(self, size: np.ndarray, batch_size: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (ratio, whether fixed batches need less noise than Poisson sampling), broadcast.

        The ratio is NaN if a batch is larger than the data.
        """
        n, b, t = np.broadcast_arrays(*(np.asarray(value, float) for value in (size, batch_size, steps)))
        if math.isinf(self.epsilon):
            return np.zeros(n.shape), np.zeros(n.shape, bool)
        q = np.minimum(b / n, 1.0)
        is_possible = b <= n
        poisson = np.full(n.shape, np.nan)
        poisson[is_possible] = self._poisson(q[is_possible], t[is_possible])
        uses = np.ceil(t * b / n * (1 - 1e-12))
        fixed = np.sqrt(uses) / closed_form.mu(self.epsilon, self.delta)
        return np.where(is_possible, np.minimum(poisson, fixed) / b, np.nan), is_possible & (fixed < poisson)

    def exact(self, size: float | int, batch_size: float | int, steps: int) -> NoiseBatchRatio:
        """Returns the ratio of one setting, with both branches solved exactly instead of interpolated."""
        return noise_batch_ratio(size, batch_size, steps, epsilon=self.epsilon, delta=self.delta, coarse=self.coarse)

    def _poisson(self, q: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Returns noise multipliers, interpolated between solved nodes.

        The quotient of solved and central-limit noise is interpolated bilinearly on logarithms; no node lies beyond q = 1.
        """
        if not q.size:
            return np.zeros(0)
        x, y = np.log10(q) * NODES_A_DECADE, np.log10(steps) * NODES_A_DECADE
        out = np.zeros(q.shape)
        low_x, low_y = np.minimum(np.floor(x), -1), np.floor(y)
        for dx in (0, 1):
            for dy in (0, 1):
                weight = np.abs(1 - dx - (x - low_x)) * np.abs(1 - dy - (y - low_y))
                out += weight * _nodes(low_x + dx, low_y + dy, self.epsilon, self.delta)
        return np.exp(out) * _central_limit(q, steps, self.epsilon, self.delta)


def _central_limit(q: np.ndarray, steps: np.ndarray, epsilon: float | int, delta: float) -> np.ndarray:
    """Returns noise by the central limit of Gaussian DP, mu = q sqrt(T (e^(1 / sigma^2) - 1)) (Bu et al. 2020).

    It is not a bound, but its ratio to the solved noise hardly varies, so that little is lost between nodes.
    """
    return 1 / np.sqrt(np.log1p(closed_form.mu(epsilon, delta) ** 2 / (q**2 * steps)))


def _nodes(x: np.ndarray, y: np.ndarray, epsilon: float | int, delta: float) -> np.ndarray:
    """Returns the logarithm of the solved noise multiplier over the central-limit one at each node."""
    pairs, where = np.unique(np.stack([x, y], axis=-1).reshape(-1, 2), axis=0, return_inverse=True)
    solved, near = _solved(epsilon, delta), 0.0
    for at in pairs.tolist():
        pair = (at[0], at[1])
        if pair not in solved:
            q, steps = min(1.0, 10 ** (at[0] / NODES_A_DECADE)), max(1, round(10 ** (at[1] / NODES_A_DECADE)))
            limit = float(_central_limit(np.array([q]), np.array([steps]), epsilon, delta)[0])
            charges = [(Release(noise_multiplier=1.0, sampling_probability=q), steps)]
            # The search starts from the neighbour's.
            solved[pair] = math.log(solve.nearly(charges, epsilon=epsilon, delta=delta, start=limit * math.exp(near)) / limit)
        near = solved[pair]
    return np.array([solved[x, y] for x, y in pairs.tolist()])[where.reshape(x.shape)]


@functools.cache
def _solved(epsilon: float | int, delta: float) -> dict[tuple[float, float], float]:
    """Returns the dict of the nodes that this process has solved, by their position."""
    return {}
