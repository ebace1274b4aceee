"""Declares `sampler=poisson`: independent draws, computed from the gaps between them."""

from typing import ClassVar, Literal

import numpy as np

from dpx.declaration import declaration
from dpx.sampler.protocol import GeneratorFor, Sampler

# Records of one virtual shard. Shards depend on the number of records only, so a draw is the same on every mesh.
SHARD_RECORDS = 1 << 22


@declaration
class Poisson(Sampler):
    """Draws each unit independently with probability q_t."""

    assumed: None = None
    name: Literal["poisson"] = "poisson"
    explanation: ClassVar[str] = "each {drawn} is drawn independently at each step, and the protection needs the draw to stay secret"

    def draw(self, size: int, sampling_probability: float, generator_for: GeneratorFor, step: int) -> np.ndarray:
        return independent(size, sampling_probability, generator_for, step)


def independent(size: int, sampling_probability: float, generator_for: GeneratorFor, step: int) -> np.ndarray:
    """Returns the indices below `size` that are drawn, each independently with probability `sampling_probability`, ascending."""
    if sampling_probability == 0 or size == 0:
        return np.empty(0, np.int64)
    if sampling_probability == 1:
        return np.arange(size, dtype=np.int64)
    parts = []
    for shard, start in enumerate(range(0, size, SHARD_RECORDS)):
        records = min(SHARD_RECORDS, size - start)
        parts.append(_shard_hits(records, sampling_probability, generator_for(step, shard)) + start)
    return np.concatenate(parts)


def _shard_hits(records: int, q: float, generator: np.random.Generator) -> np.ndarray:
    """Returns the positions of the successes of `records` Bernoulli(q) trials, from the geometric gaps between them."""
    block = int(records * q + 5 * np.sqrt(records * q)) + 8
    parts, position = [], -1
    while position < records:
        # A gap past the end ends the shard whatever its length; the cap keeps the running sum inside int64.
        gaps = np.minimum(generator.geometric(q, size=block), records + 1)
        hits = position + np.cumsum(gaps)
        parts.append(hits)
        position = int(hits[-1])
    hits = np.concatenate(parts)
    return hits[: np.searchsorted(hits, records)]
