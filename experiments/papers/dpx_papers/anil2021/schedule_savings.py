"""Computes the examples that each reading of the batch schedule saves, the "14 %" of Anil et al. 2021 (section 5.2, A10). Arithmetic
only."""

from typing import Any

from dpx.batch_schedule import Constant, Linear, Staged, stages
from dpx.declaration import declaration
from dpx.picture import Lines, Picture
from dpx.table import Table

# Stages of 196,608 more, a quarter of the way each (section 5.2).
SHOWN = 9_000  # steps drawn: all readings are at their largest batch by 7,500
SIZES = (262_144, 458_752, 655_360, 851_968, 1_048_576)


@declaration
class AnilScheduleSavings:
    """Compares four readings of the schedule with a constant largest batch over `steps` steps.

    Attributes:
        steps: Steps of a run.
    """

    steps: int = 20_000

    def __call__(self) -> list[Table]:
        constant = examples(Constant(size=SIZES[-1]), self.steps)
        rows = []
        for name, reading, schedule in readings():
            count = examples(schedule, self.steps)
            rows.append((name, reading, count, 1 - count / constant))
        notes = (
            'published: "14 %" (text); it may also be measured to matched accuracy, which no arithmetic gives',
            "the stepped text saves 17.58 %, 10.55 % if its first rise is at step 0; the ramp and five stages of 1,500 save 14.06 %",
        )
        return [
            Table("schedule_savings", ("option", "reading", "examples", "saved"), tuple(rows), "examples saved against 1,048,576", notes),
            self._by_step(),
        ]

    def _by_step(self) -> Table:
        """Returns the batch size of each reading where it changes, and just before: a picture joins these points by straight lines."""
        rows = []
        for option, _, schedule in readings():
            ends = [0]
            for _, count in stages(schedule, self.steps):
                ends.append(ends[-1] + count)
            steps = sorted({step for end in ends for step in (end - 1, end) if 0 <= step < self.steps})
            # A ramp changes at every step; one in 150 draws the same line. Nothing changes at the end.
            kept = steps if len(steps) < 100 else [step for step in steps if step % 150 == 0]
            rows += [(option or "first rise at 0", step, schedule.at(step)) for step in [*(step for step in kept if step < SHOWN), SHOWN]]
        return Table("batch_by_step", ("option", "step", "batch size"), tuple(rows), "batch size of each reading")

    def pictures(self) -> list[Picture]:
        """Plots every reading by step, and what each saves."""
        steps = Lines(table="batch_by_step", x="step", y=("batch size",), by="option", y_label="batch size")
        return [Picture("anil_schedules", "Readings of the rising batch; the paper says that it saves 14 % of the examples.", (steps,))]


def readings() -> list[tuple[str, str, Any]]:
    """Returns the readings of the schedule as `(config option or None, how the text was read, schedule)`."""
    return [
        ("step_1875", "stepped, first rise after 1,875 steps", Staged(sizes=SIZES, stage_steps=1875)),
        ("", "stepped, first rise at step 0", Staged(sizes=SIZES[1:], stage_steps=1875)),
        ("linear_7500", "a straight ramp over 7,500 steps", Linear(start=SIZES[0], end=SIZES[-1], ramp_steps=7500)),
        ("five_stage_1500", "five stages of 1,500 steps", Staged(sizes=SIZES, stage_steps=1500)),
    ]


def examples(schedule: Any, steps: int) -> int:
    """Returns the expected number of examples of the whole run."""
    return sum(size * count for size, count in stages(schedule, steps))
