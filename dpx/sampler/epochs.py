"""Declares samplers that draw every row once in each epoch of ceil(N/B) steps: `shuffled`, `deterministic`, `balls_in_bins`.

No amplification is claimed for them: one Gaussian release per epoch begun. The order follows from N and the key alone, so the content of
a row does not move any row to another step; an added row would, so the table of events refuses `add_remove`.
"""

import math
from typing import ClassVar, Literal

import numpy as np

from dpx.declaration import declaration
from dpx.privacy.declared_privacy import Accountant, Privacy
from dpx.privacy.segments import steps_per_epoch
from dpx.sampler.random_allocation import RandomAllocation
from dpx.sampler.sampler_protocol import Assumed, GeneratorFor, Sampler


@declaration
class _InPasses(Sampler):
    """The base class of samplers in epochs: step t is slot t mod ceil(N/B) of its epoch, and each row appears once in an epoch.

    Attributes:
        assumed: The sampler whose epsilon is also reported, as unsupported: poisson, random_allocation, or null for none.
    """

    assumed: Assumed = None
    needs_one_batch_size: ClassVar[bool] = True

    def draw(self, size: int, sampling_probability: float, generator_for: GeneratorFor, step: int) -> np.ndarray:
        slots = steps_per_epoch(sampling_probability)
        number, slot = divmod(step, slots)
        generator = generator_for("pass", number)
        first, last = self._places(size, slots, slot, generator)
        return self._in_order(np.arange(first, last, dtype=np.int64), size, generator)

    def check(self, privacy: Privacy, accountant: Accountant) -> None:
        if self.assumed == "random_allocation":
            RandomAllocation().check(privacy, accountant)

    def _places(self, size: int, slots: int, slot: int, generator: np.random.Generator) -> tuple[int, int]:
        """Returns the slot's first position in the epoch's order, and the position after its last."""
        return slot * size // slots, (slot + 1) * size // slots

    def _in_order(self, places: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
        """Returns the rows at these positions of the epoch's order, ascending."""
        return np.sort(permuted(places, size, generator))


@declaration
class Shuffled(_InPasses):
    """Draws rows by passes over the data in a fresh random order, ceil(N/B) steps each."""

    name: Literal["shuffled"] = "shuffled"
    explanation: ClassVar[str] = "every epoch reads the {drawn}s in a fresh random order; no protection is claimed from the order"


@declaration
class Deterministic(_InPasses):
    """Draws rows by passes over the data in its stored order, ceil(N/B) steps each."""

    name: Literal["deterministic"] = "deterministic"
    explanation: ClassVar[str] = "every epoch reads the {drawn}s in a fixed order; no protection is claimed from sampling"

    def _in_order(self, places: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
        return places


@declaration
class BallsInBins(_InPasses):
    """Assigns every row, in each epoch, to one of the epoch's ceil(N/B) steps, independently and uniformly."""

    name: Literal["balls_in_bins"] = "balls_in_bins"
    explanation: ClassVar[str] = "each {drawn} is assigned to one random step of each epoch; no protection is claimed from that"

    def _places(self, size: int, slots: int, slot: int, generator: np.random.Generator) -> tuple[int, int]:
        ends = np.cumsum(generator.multinomial(size, np.full(slots, 1 / slots)))
        return int(ends[slot - 1]) if slot else 0, int(ends[slot])


def permuted(places: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
    """Returns the images of `places` under one pseudorandom permutation of `range(size)`, in time proportional to `places`.

    A Feistel network over the next power of four, iterated until its value is below `size`. The order need only look random: no epsilon
    here depends on it.
    """
    half = max(1, math.ceil(math.log2(max(size, 2)) / 2))
    keys = generator.integers(1 << 62, size=8, dtype=np.uint64)
    images = _feistel(places.astype(np.uint64), half, keys)
    while (outside := images >= size).any():
        images[outside] = _feistel(images[outside], half, keys)
    return images.astype(np.int64)


def _feistel(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        # The splitmix64 finaliser; unsigned products wrap by definition.
        mixed = (right + key) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
    return (left << shift) | right
