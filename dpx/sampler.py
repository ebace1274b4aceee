"""Who takes part in a step: indices on the host, and what an accountant may assume of them."""

from collections.abc import Callable
from typing import Literal

import numpy as np

from dpx.declaration import declaration, require

GeneratorFor = Callable[[int], np.random.Generator]

# Records of one virtual shard. Shards depend on the number of records only, so a draw is the same on every mesh.
SHARD_RECORDS = 1 << 22


@declaration
class Poisson:
    """Each unit independently with probability q_t."""

    name: Literal["poisson"] = "poisson"


Sampler = Poisson


def draw(sampler: Sampler, size: int, sampling_probability: float, generator_for: GeneratorFor) -> np.ndarray:
    """Ascending `int64` indices below `size` of one step's batch.

    Time and memory are proportional to the batch (plus one generator per 4M records), not to `size`.
    `generator_for(shard)` gives the generator of one virtual shard of this step.
    """
    del sampler
    require(
        0 <= sampling_probability <= 1, f"q={sampling_probability}", "a sampling probability lies in 0..1", "Use a batch size of at most N"
    )
    return poisson(size, sampling_probability, generator_for)


def poisson(size: int, sampling_probability: float, generator_for: GeneratorFor) -> np.ndarray:
    """Each index below `size` independently with probability `sampling_probability`."""
    if sampling_probability == 0 or size == 0:
        return np.empty(0, np.int64)
    if sampling_probability == 1:
        return np.arange(size, dtype=np.int64)
    parts = []
    for shard, start in enumerate(range(0, size, SHARD_RECORDS)):
        records = min(SHARD_RECORDS, size - start)
        parts.append(_shard_hits(records, sampling_probability, generator_for(shard)) + start)
    return np.concatenate(parts)


def _shard_hits(records: int, q: float, generator: np.random.Generator) -> np.ndarray:
    """Positions of the successes of `records` Bernoulli(q) trials, by the geometric gaps between them."""
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
