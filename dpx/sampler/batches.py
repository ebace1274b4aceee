"""Batches for your own training loop: one function for each sampler, which yields the padded indices of each step with their event."""

import dataclasses
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dpx.declaration import require
from dpx.randomness import SECRET_BYTES, RootSecret
from dpx.sampler.epochs import BallsInBins, Deterministic, Shuffled
from dpx.sampler.fixed_size import FixedSize
from dpx.sampler.poisson import CyclicPoisson, Poisson, TruncatedPoisson
from dpx.sampler.random_allocation import RandomAllocation
from dpx.sampler.sampler_protocol import Sampler, draw


@dataclasses.dataclass(frozen=True)
class Batch:
    """The draw of one step.

    Attributes:
        step: Number of the step, from 0.
        indices: Rows of the step, int64 [n]; n is a multiple of the padding, and padding holds index 0.
        is_padding: Which of them are padding, bool [n]. Padding must contribute exactly zero.
        expected_batch_size: What the noisy sum is divided by: a constant, and not the number drawn.
        event: How the rows were drawn, as the ledger has it: `sampler`, `q` and what else decides the cost.
        key: Key of the step's noise for `dpx.add_noise`, uint32 [2]; it is used for one sum.
    """

    step: int
    indices: np.ndarray
    is_padding: np.ndarray
    expected_batch_size: int
    event: Mapping[str, Any]
    key: np.ndarray


@dataclasses.dataclass(frozen=True)
class Batches:
    """The batches of a loop. Iterated alone they come from a fresh secret of the operating system; `dpx.Ledger.record` charges each first.

    Attributes:
        sampler: How rows are drawn.
        size: Number N of rows, which is public.
        batch_size: Expected number of rows of a step.
        steps: Number of steps.
        pad_to: Rows are padded to a multiple of this number, so that few shapes are compiled.
        first_step: Number of the first step.
    """

    sampler: Sampler
    size: int
    batch_size: int
    steps: int
    pad_to: int
    first_step: int = 0

    def __post_init__(self) -> None:
        numbers = {"size": self.size, "batch_size": self.batch_size, "steps": self.steps, "pad_to": self.pad_to}
        for name, value in numbers.items():
            require(value >= 1, f"{name}={value}", "must be at least 1", "Give a positive whole number")
        require(self.first_step >= 0, f"first_step={self.first_step}", "steps are numbered from 0", "Give 0 or more")
        most = self.sampler.largest_batch(self.size)
        require(self.batch_size <= most, f"batch_size={self.batch_size}", f"a step draws from {most} rows", f"Give {most} or less")

    @property
    def event(self) -> dict[str, Any]:
        """How the rows of a step are drawn, as the ledger has it."""
        fields = self.sampler.ledger_fields(self.size, self.batch_size)
        # Epochs are counted from step 0, as there is one batch size.
        return fields | ({"allocation_from": 0} if "allocation" in fields else {})

    @property
    def has_epochs(self) -> bool:
        """Whether what one step draws depends on other steps of its epoch, so that a loop has one batch size."""
        return self.sampler.needs_one_batch_size or self.sampler.restarts_with_batch_size

    def __iter__(self) -> Iterator[Batch]:
        secret = RootSecret(secrets.token_bytes(SECRET_BYTES))
        return (self.at(step, secret) for step in range(self.first_step, self.first_step + self.steps))

    def at(self, step: int, secret: RootSecret) -> Batch:
        """Returns the batch of a step; the same secret gives the same batch and the same key."""
        drawn = draw(self.sampler, self.size, self.batch_size / self.size, lambda *place: secret.generator("sample", *place), step)
        # A step that drew nothing is a step of noise alone.
        length = max(1, -(-len(drawn) // self.pad_to)) * self.pad_to
        indices = np.zeros(length, np.int64)
        indices[: len(drawn)] = drawn
        return Batch(step, indices, np.arange(length) >= len(drawn), self.batch_size, self.event, secret.key("noise", step))


def poisson(size: int, batch_size: int, steps: int, *, pad_to: int | None = None, first_step: int = 0) -> Batches:
    """Draws each row of each step independently of all others.

    Args:
        size: Number N of rows, which is public.
        batch_size: Expected number of rows of a step; each is drawn with probability `batch_size / size`.
        steps: Number of steps.
        pad_to: Rows are padded to a multiple of this number; None takes `batch_size`.
        first_step: Number of the first step.

    Returns:
        The batches, to iterate over or to give to `dpx.Ledger.record`.

    Raises:
        ConfigError: For a number below 1, or a batch size above N.

    Example:
        >>> import dpx
        >>> batches = list(dpx.sampler.poisson(1000, 64, steps=3))
        >>> [batch.step for batch in batches], batches[0].event
        ([0, 1, 2], {'sampler': 'poisson', 'q': 0.064})
        >>> all(len(batch.indices) % 64 == 0 for batch in batches)
        True
    """
    return Batches(Poisson(), size, batch_size, steps, pad_to or batch_size, first_step)


def truncated_poisson(size: int, batch_size: int, steps: int, *, first_step: int = 0) -> Batches:
    """Draws as `poisson` does, under a cap that is hardly ever exceeded: all batches have one shape, that of the cap."""
    sampler = TruncatedPoisson()
    return Batches(sampler, size, batch_size, steps, sampler.cap(size, batch_size / size) if batch_size < size else size, first_step)


def cyclic_poisson(size: int, batch_size: int, steps: int, cycle: int, *, pad_to: int | None = None, first_step: int = 0) -> Batches:
    """Draws as `poisson` does, from `cycle` groups of rows that take turns."""
    return Batches(CyclicPoisson(cycle=cycle), size, batch_size, steps, pad_to or batch_size, first_step)


def fixed_size(size: int, batch_size: int, steps: int, *, pad_to: int | None = None, first_step: int = 0) -> Batches:
    """Draws a random subset of exactly `batch_size` rows at each step."""
    return Batches(FixedSize(), size, batch_size, steps, pad_to or batch_size, first_step)


def shuffled(size: int, batch_size: int, steps: int, *, pad_to: int | None = None, first_step: int = 0) -> Batches:
    """Passes over the rows in a fresh random order each time; no amplification is claimed."""
    return Batches(Shuffled(), size, batch_size, steps, pad_to or batch_size, first_step)


def deterministic(size: int, batch_size: int, steps: int, *, pad_to: int | None = None, first_step: int = 0) -> Batches:
    """Passes over the rows in their stored order; no amplification is claimed."""
    return Batches(Deterministic(), size, batch_size, steps, pad_to or batch_size, first_step)


def balls_in_bins(size: int, batch_size: int, steps: int, *, pad_to: int | None = None, first_step: int = 0) -> Batches:
    """Assigns each row to one random step of each epoch; no amplification is claimed."""
    return Batches(BallsInBins(), size, batch_size, steps, pad_to or batch_size, first_step)


def random_allocation(size: int, batch_size: int, steps: int, *, pad_to: int | None = None, first_step: int = 0) -> Batches:
    """Allocates each row, in every epoch, to one secret random step."""
    return Batches(RandomAllocation(), size, batch_size, steps, pad_to or batch_size, first_step)
