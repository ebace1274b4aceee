"""Declares the expected batch size as a function of the step (Anil et al. 2021, section 5.2)."""

import bisect
import itertools
from collections.abc import Sequence
from typing import ClassVar

from dpx.declaration import declaration, require


@declaration
class Constant:
    """Uses the same expected batch size at every step.

    Attributes:
        size: Expected number of units in the logical batch of a step.
    """

    size: int
    # The first step from which on the size stays the same.
    settles_at: ClassVar[int] = 0
    # How to set the schedule so that no batch is larger than `limit`, as text.
    at_most: ClassVar[str] = "Set batch_schedule.size={limit} or less"

    def __post_init__(self) -> None:
        require(self.size > 0, f"batch_schedule.size={self.size}", "a batch needs at least one example", "Give a positive size")

    def at(self, step: int) -> int:
        del step
        return self.size


@declaration
class Staged:
    """Uses each size for the same number of steps; the last size stays until the end.

    Attributes:
        sizes: Expected batch size of each stage.
        stage_steps: Steps of a stage.
    """

    sizes: Sequence[int]
    stage_steps: int
    at_most: ClassVar[str] = "Set every one of batch_schedule.sizes to {limit} or less"

    def __post_init__(self) -> None:
        require(
            bool(self.sizes) and min(self.sizes) > 0,
            f"batch_schedule.sizes={list(self.sizes)}",
            "every stage needs a positive size",
            "List positive sizes",
        )
        require(
            self.stage_steps > 0,
            f"batch_schedule.stage_steps={self.stage_steps}",
            "a stage lasts at least one step",
            "Give a positive number",
        )

    @property
    def settles_at(self) -> int:
        """The same as `Constant.settles_at`, for these settings."""
        return self.stage_steps * (len(self.sizes) - 1)

    def at(self, step: int) -> int:
        return self.sizes[min(step // self.stage_steps, len(self.sizes) - 1)]


@declaration
class Linear:
    """Increases the batch size linearly from `start` to `end` over `ramp_steps` steps, then uses `end`.

    Step t of the ramp uses the value at its middle, t + 1/2, so that the ramp's mean is (start + end) / 2 exactly.

    Attributes:
        start: Expected batch size at the first step.
        end: Expected batch size from the end of the ramp on.
        ramp_steps: Steps of the ramp.
    """

    start: int
    end: int
    ramp_steps: int
    at_most: ClassVar[str] = "Set batch_schedule.start and batch_schedule.end to {limit} or less"

    def __post_init__(self) -> None:
        require(
            min(self.start, self.end) > 0,
            f"batch_schedule={self.start}..{self.end}",
            "a batch needs at least one example",
            "Give positive sizes",
        )
        require(
            self.ramp_steps > 0, f"batch_schedule.ramp_steps={self.ramp_steps}", "a ramp lasts at least one step", "Give a positive number"
        )

    @property
    def settles_at(self) -> int:
        """The same as `Constant.settles_at`, for these settings."""
        return self.ramp_steps

    def at(self, step: int) -> int:
        if step >= self.ramp_steps:
            return self.end
        return round(self.start + (self.end - self.start) * (step + 0.5) / self.ramp_steps)


BatchSchedule = Constant | Staged | Linear


def stages(schedule: BatchSchedule, steps: int) -> tuple[tuple[int, int], ...]:
    """Returns the pairs (expected batch size, consecutive steps) of a run of `steps` steps; equal neighbours are merged."""
    settled = min(schedule.settles_at, steps)
    sizes = [(schedule.at(step), 1) for step in range(settled)]
    sizes += [(schedule.at(settled), steps - settled)] if steps > settled else []
    return tuple((size, sum(count for _, count in equal)) for size, equal in itertools.groupby(sizes, lambda pair: pair[0]))


def stretch_of(schedule: BatchSchedule, step: int) -> int:
    """Returns the first step of the stretch of equal batch sizes that `step` is in."""
    size, first = schedule.at(step), min(step, schedule.settles_at)
    if not isinstance(schedule, Staged):
        # Sizes only grow, or only fall, so those of the stretch are the last ones.
        return bisect.bisect_left(range(first + 1), True, key=lambda earlier: schedule.at(earlier) == size)
    first -= first % schedule.stage_steps
    while first and schedule.at(first - 1) == size:
        first -= schedule.stage_steps
    return first
