"""Declares samplers of independent draws, which are computed from the gaps between them.

`sampler=truncated_poisson` draws under a cap that is hardly ever exceeded; who is left out above it follows from who was drawn and the key,
not from what rows hold. With `sampler=cyclic_poisson` groups of rows take turns, so that a row is not drawn again for a fixed number of
steps.
"""

import math
from typing import Any, ClassVar, Literal

import numpy as np

from dpx.declaration import declaration, require
from dpx.privacy.declared_privacy import Accountant, Privacy
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
    assumed: Literal["poisson"] | None = None
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
        drawn, cap = independent(size, sampling_probability, generator_for, step), self.cap(size, sampling_probability)
        return drawn if len(drawn) <= cap else np.sort(generator_for(step, "truncate").permutation(drawn)[:cap])

    def ledger_fields(self, size: int, batch: int) -> dict[str, Any]:
        return super().ledger_fields(size, batch) | {"cap": self.cap(size, batch / size)}


@declaration
class CyclicPoisson(Sampler):
    """Draws each row of the step's group independently, with probability `cycle` q_t.

    Row i belongs to group i mod `cycle`, and step t draws from group t mod `cycle`.

    A row's steps are at least `cycle` apart, which correlated noise needs (Choquette-Choo et al. 2023, section 4). The proof assumes that
    the row's group is the same in both neighbours, so rows keep their numbers, and a unit is one row.

    Attributes:
        cycle: Number of groups of rows: a row takes part at most once in so many steps.
    """

    cycle: int
    assumed: None = None
    name: Literal["cyclic_poisson"] = "cyclic_poisson"
    needs_one_batch_size: ClassVar[bool] = True
    needs_fixed_numbers: ClassVar[bool] = True
    explanation: ClassVar[str] = (
        "rows are divided into groups that take turns; each row of the group is drawn independently, and the draw must stay secret"
    )

    def __post_init__(self) -> None:
        require(self.cycle >= 1, f"sampler.cycle={self.cycle}", "there must be at least one group", "Use 1 or more")

    @property
    def steps_apart(self) -> int:
        return self.cycle

    def draw(self, size: int, sampling_probability: float, generator_for: GeneratorFor, step: int) -> np.ndarray:
        return self.draw_part(size, sampling_probability, generator_for, step, WHOLE)

    def draw_part(self, size: int, sampling_probability: float, generator_for: GeneratorFor, step: int, part: Part) -> np.ndarray:
        group = step % self.cycle
        members, q = len(range(group, size, self.cycle)), min(1.0, sampling_probability * self.cycle)
        return group + self.cycle * independent(members, q, generator_for, step, part)

    def largest_batch(self, size: int) -> int:
        return size // self.cycle

    def check(self, privacy: Privacy, accountant: Accountant) -> None:
        name = "sampler=cyclic_poisson"
        require(
            privacy.rows_per_unit_max == 1,
            f"{name}, privacy.rows_per_unit_max={privacy.rows_per_unit_max}",
            "rows of one unit may be in several groups",
            "Use privacy.unit=row",
        )
        require(
            accountant.name != "gdp_clt",
            f"{name}, accountant=gdp_clt",
            "the central limit theorem is known for plain Poisson sampling only",
            "Use accountant=pld",
        )

    def ledger_fields(self, size: int, batch: int) -> dict[str, Any]:
        """Returns q of plain sampling: `cycle` determines how often a row's group has its turn, and the probability in that turn."""
        return super().ledger_fields(size, batch) | {"cycle": self.cycle}
