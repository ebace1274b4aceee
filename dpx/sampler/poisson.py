"""Declares `sampler=poisson`: independent draws, computed from the gaps between them."""

from typing import ClassVar, Literal

import numpy as np

from dpx.declaration import declaration
from dpx.processes.place import WHOLE, Part
from dpx.sampler.sampler_protocol import GeneratorFor, Sampler, share

# Virtual shards depend on the number of records only, so a draw is the same on every mesh and for every number of processes. There are at
# least 4,096 of them if each then has at least 512 records; with fewer, starting the generators would cost more than the draws.
_SHARDS, _LEAST_RECORDS = 4096, 512
# A process draws its own shards alone if each process has at least this many; fewer would divide a batch unevenly.
_LEAST_SHARDS = 8


def shard_records(size: int) -> int:
    """Returns the number of records of each virtual shard but the last, of `size` records in all."""
    return max(_LEAST_RECORDS, size // _SHARDS)


@declaration
class Poisson(Sampler):
    """Draws each unit independently with probability q_t."""

    assumed: None = None
    name: Literal["poisson"] = "poisson"
    explanation: ClassVar[str] = "each {drawn} is drawn independently at each step, and the protection needs the draw to stay secret"

    def draw(self, size: int, sampling_probability: float, generator_for: GeneratorFor, step: int) -> np.ndarray:
        return independent(size, sampling_probability, generator_for, step)

    def draw_part(self, size: int, sampling_probability: float, generator_for: GeneratorFor, step: int, part: Part) -> np.ndarray:
        return independent(size, sampling_probability, generator_for, step, part)


def independent(size: int, sampling_probability: float, generator_for: GeneratorFor, step: int, part: Part = WHOLE) -> np.ndarray:
    """Returns the indices below `size` that are drawn, each independently with probability `sampling_probability`, ascending.

    One `part` of them comes from the virtual shards of that part, or, where there are few shards, an equal share of what all shards draw.
    """
    if sampling_probability == 0 or size == 0:
        return np.empty(0, np.int64)
    if sampling_probability == 1:
        return share(np.arange(size, dtype=np.int64), part)
    records = shard_records(size)
    shards = -(-size // records)
    is_own = shards >= _LEAST_SHARDS * part.count
    first, last = (shards * (part.index + more) // part.count for more in (0, 1)) if is_own else (0, shards)
    drawn = [
        _shard_hits(min(records, size - shard * records), sampling_probability, generator_for(step, shard)) + shard * records
        for shard in range(first, last)
    ]
    found = np.concatenate(drawn)
    return found if is_own else share(found, part)


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
