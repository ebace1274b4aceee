"""Who takes part in a step: indices on the host, and what an accountant may assume of them.

Each declaration's `name` is the kind of release that is true of its draw (`dpx.privacy.events`). `assumed` names the sampler
whose epsilon a paper quotes for it: that value is reported as unsupported, and a target epsilon is met under it.
"""

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from scipy.stats import binom

from dpx.declaration import declaration, require

# `generator_for(step, shard)` for what is drawn at each step, `generator_for("pass", number)` for an order that lasts a pass.
GeneratorFor = Callable[..., np.random.Generator]
Assumed = Literal["poisson"] | None

# Records of one virtual shard. Shards depend on the number of records only, so a draw is the same on every mesh.
SHARD_RECORDS = 1 << 22


@declaration
class Poisson:
    """Each unit independently with probability q_t."""

    assumed: None = None
    name: Literal["poisson"] = "poisson"


@declaration
class TruncatedPoisson:
    """A Poisson draw of at most `cap` rows, a uniformly random subset of the drawn ones where there are more.

    The cap is the smallest one that a draw exceeds with probability at most `slack`, and at least B + 6 standard deviations:
    from there on dp-accounting's truncated event costs less than 0.1 % of epsilon.
    """

    slack: float = 1e-10
    assumed: Assumed = None
    name: Literal["truncated_poisson"] = "truncated_poisson"

    def __post_init__(self) -> None:
        require(0 < self.slack <= 1e-9, f"sampler.slack={self.slack}", "a cap this low drops rows often", "Use a value in (0, 1e-9]")

    def cap(self, size: int, sampling_probability: float) -> int:
        """Most rows of one step; depends on public numbers only."""
        deviation = math.sqrt(size * sampling_probability * (1 - sampling_probability))
        enough = int(binom.isf(self.slack, size, sampling_probability)) + 1
        return min(size, max(enough, math.ceil(size * sampling_probability + 6 * deviation)))


@declaration
class FixedSize:
    """A uniformly random subset of exactly B rows, anew at each step."""

    assumed: Assumed = None
    name: Literal["fixed_size"] = "fixed_size"


@declaration
class Shuffled:
    """Passes over the data in a fresh random order, ceil(N/B) steps each."""

    assumed: Assumed = None
    name: Literal["shuffled"] = "shuffled"


@declaration
class Deterministic:
    """Passes over the data in its stored order, ceil(N/B) steps each."""

    assumed: Assumed = None
    name: Literal["deterministic"] = "deterministic"


@declaration
class BallsInBins:
    """In each pass every row falls into one of its ceil(N/B) steps, independently and uniformly."""

    assumed: Assumed = None
    name: Literal["balls_in_bins"] = "balls_in_bins"


@declaration
class CyclicPoisson:
    """Row i belongs to group i mod `cycle`; step t draws each row of group t mod `cycle` independently with probability `cycle` q_t.

    A row's steps are `cycle` apart at least, which correlated noise needs (Choquette-Choo et al. 2023, section 4).
    """

    cycle: int
    assumed: None = None
    name: Literal["cyclic_poisson"] = "cyclic_poisson"

    def __post_init__(self) -> None:
        require(self.cycle >= 1, f"sampler.cycle={self.cycle}", "there is one group at least", "Use 1 or more")


Sampler = Poisson | TruncatedPoisson | FixedSize | Shuffled | Deterministic | BallsInBins | CyclicPoisson

# Every row takes part once in each pass of ceil(N/B) steps; no amplification is claimed.
IN_PASSES = ("shuffled", "deterministic", "balls_in_bins")


def steps_per_pass(sampling_probability: float) -> int:
    """ceil(1/q), unharmed by the last bits of q = B/N."""
    return math.ceil(1 / sampling_probability * (1 - 1e-12))


def draw(sampler: Sampler, size: int, sampling_probability: float, generator_for: GeneratorFor, step: int = 0) -> np.ndarray:
    """Distinct `int64` indices below `size`: one step's batch.

    Time and memory are proportional to the batch (plus one generator per 4M records), not to `size`.
    """
    q = sampling_probability
    require(0 <= q <= 1, f"q={q}", "a sampling probability lies in 0..1", "Use a batch size of at most N")
    if isinstance(sampler, Poisson):
        return poisson(size, q, generator_for, step)
    if isinstance(sampler, TruncatedPoisson):
        return _truncated(poisson(size, q, generator_for, step), sampler.cap(size, q), generator_for(step, "truncate"))
    if isinstance(sampler, CyclicPoisson):
        group = step % sampler.cycle
        return group + sampler.cycle * poisson(len(range(group, size, sampler.cycle)), min(1.0, q * sampler.cycle), generator_for, step)
    if isinstance(sampler, FixedSize):
        return _subset(size, round(size * q), generator_for(step, "subset"))
    return _slot_of_pass(sampler, size, steps_per_pass(q), generator_for, step)


def poisson(size: int, sampling_probability: float, generator_for: GeneratorFor, step: int) -> np.ndarray:
    """Each index below `size` independently with probability `sampling_probability`, ascending."""
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


def _truncated(drawn: np.ndarray, cap: int, generator: np.random.Generator) -> np.ndarray:
    if len(drawn) <= cap:
        return drawn
    return np.sort(generator.permutation(drawn)[:cap])


def _subset(size: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """A uniform subset of exactly `count` of `size`, by keeping the first distinct ones of uniform draws."""
    if 2 * count > size:
        left_out = _subset(size, size - count, generator)
        return np.setdiff1d(np.arange(size, dtype=np.int64), left_out, assume_unique=True)
    kept = np.empty(0, np.int64)
    while len(kept) < count:
        candidates = np.concatenate([kept, generator.integers(size, size=count - len(kept) + 16)])
        _, first = np.unique(candidates, return_index=True)
        kept = candidates[np.sort(first)[:count]]
    return np.sort(kept)


def _slot_of_pass(sampler: Sampler, size: int, slots: int, generator_for: GeneratorFor, step: int) -> np.ndarray:
    """The rows of step `step % slots` of its pass; over a pass every row appears exactly once."""
    number, slot = divmod(step, slots)
    generator = generator_for("pass", number)
    if isinstance(sampler, BallsInBins):
        ends = np.cumsum(generator.multinomial(size, np.full(slots, 1 / slots)))
        first, last = int(ends[slot - 1]) if slot else 0, int(ends[slot])
    else:
        first, last = slot * size // slots, (slot + 1) * size // slots
    places = np.arange(first, last, dtype=np.int64)
    return places if isinstance(sampler, Deterministic) else np.sort(permuted(places, size, generator))


def permuted(places: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
    """Images of `places` under one random-looking permutation of `range(size)`, in time proportional to `places`.

    A Feistel network over the next power of four, walked until it lands below `size`. The order need only look random: no epsilon
    here rests on it.
    """
    half = max(1, math.ceil(math.log2(max(size, 2)) / 2))
    keys = generator.integers(1 << 62, size=8, dtype=np.uint64)
    found = _feistel(places.astype(np.uint64), half, keys)
    while (outside := found >= size).any():
        found[outside] = _feistel(found[outside], half, keys)
    return found.astype(np.int64)


def _feistel(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        # The splitmix64 finaliser; unsigned products wrap by definition.
        mixed = (right + key) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
    return (left << shift) | right
