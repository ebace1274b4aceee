"""Declares `sampler=random_allocation`: each unit takes part in exactly one step of every epoch, at a secret place.

A unit's place is a function of (secret, epoch, number of the unit) alone: word number u of a keyed Philox generator, reduced to a step. It
depends neither on what units hold nor on other units, so leaving one out moves no other. A word has 64 bits, so a step's probability is off
by at most t / 2**64, relative, which the rounding margin of the accountant covers (`dpx.privacy.allocation`).

An epoch is named by the first step of its stretch of equal batch sizes and its number there, so no two epochs of a run share their places,
also if t changes.
"""

from typing import Any, ClassVar, Literal

import numpy as np

from dpx.declaration import declaration, require
from dpx.privacy.declared_privacy import Accountant, Privacy
from dpx.privacy.segments import ALLOCATION, steps_per_epoch
from dpx.processes.place import WHOLE, Part
from dpx.sampler.sampler_protocol import GeneratorFor, Sampler, share

# Units whose places come from one generator. A process draws only its own blocks if there are enough of them to divide evenly.
BLOCK, _LEAST_BLOCKS = 65_536, 8


@declaration
class RandomAllocation(Sampler):
    """Allocates each unit, in every epoch, to one of its ceil(N/B) steps: independently, uniformly and secretly.

    A new batch size begins a new epoch. Time of a draw is proportional to N, memory to the batch.
    """

    assumed: None = None
    name: Literal["random_allocation"] = "random_allocation"
    restarts_with_batch_size: ClassVar[bool] = True
    covers_integer_noise: ClassVar[bool] = False
    covers_packages: ClassVar[bool] = False
    explanation: ClassVar[str] = (
        "each {drawn} takes part in one random step of each epoch, and the protection needs that step to stay secret"
    )

    def draw(self, size: int, sampling_probability: float, generator_for: GeneratorFor, step: int) -> np.ndarray:
        return self.draw_part(size, sampling_probability, generator_for, step, WHOLE)

    def draw_part(self, size: int, sampling_probability: float, generator_for: GeneratorFor, step: int, part: Part) -> np.ndarray:
        steps = steps_per_epoch(sampling_probability)
        epoch, place = divmod(step, steps)
        blocks = -(-size // BLOCK)
        is_own = blocks >= _LEAST_BLOCKS * part.count
        first, last = (blocks * (part.index + more) // part.count for more in (0, 1)) if is_own else (0, blocks)
        found = [np.empty(0, np.int64)]
        for block in range(first, last):
            places = places_of(min(BLOCK, size - block * BLOCK), steps, generator_for("allocation", epoch, block))
            found.append(np.flatnonzero(places == place) + block * BLOCK)
        drawn = np.concatenate(found)
        return drawn if is_own else share(drawn, part)

    def check(self, privacy: Privacy, accountant: Accountant) -> None:
        require(
            privacy.unit_mode != "group" or privacy.rows_per_unit_max == 1,
            f"sampler=random_allocation, privacy.rows_per_unit_max={privacy.rows_per_unit_max}",
            "the rows of one unit would be in several steps of an epoch, and no bound is proved for that",
            "Use privacy.unit_mode=sample_units, or sampler=poisson",
        )

    def ledger_fields(self, size: int, batch: int) -> dict[str, Any]:
        return super().ledger_fields(size, batch) | {"allocation": ALLOCATION, "allocation_steps": steps_per_epoch(batch / size)}


def places_of(units: int, steps: int, generator: np.random.Generator) -> np.ndarray:
    """Returns the step, below `steps`, of each of the first `units` units of a block: the high word of (64 random bits times `steps`)."""
    # Raw words: unlike those of `integers`, they are the same in every version of NumPy, and word u belongs to unit u.
    words = generator.bit_generator.random_raw(units)
    high, low = words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)
    return ((high * np.uint64(steps) + (low * np.uint64(steps) >> np.uint64(32))) >> np.uint64(32)).astype(np.int64)
