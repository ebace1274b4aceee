"""Computes the examples that each reading of the batch schedule saves, the "14 %" of Anil et al. 2021 (section 5.2, A10). Arithmetic
only."""

from typing import Any

from dpx.sampler.batch_schedule import Constant, Linear, Staged, stages
from dpx_papers.analysis import Made, analysis

# Stages of 196,608 more, a quarter of the way each (section 5.2).
SHOWN = 9_000  # steps drawn: all readings are at their largest batch by 7,500
SIZES = (262_144, 458_752, 655_360, 851_968, 1_048_576)


@analysis()
def anil_schedule_savings(steps: int = 20_000) -> Made:
    """Compares four readings of the schedule with a constant largest batch.

    Attributes:
        steps: Steps of a run.
    """
    savings, by_step = [], []
    for option, reading, schedule in readings():
        count = examples(schedule, steps)
        saved = 1 - count / examples(Constant(size=SIZES[-1]), steps)
        savings.append({"option": option, "reading": reading, "examples": count, "saved": saved})
        # The batch size where it changes, and just before: a picture joins these points by straight lines.
        ends = [0]
        for _, length in stages(schedule, steps):
            ends.append(ends[-1] + length)
        places = sorted({step for end in ends for step in (end - 1, end) if 0 <= step < steps})
        # A ramp changes at every step; one in 150 draws the same line. Nothing changes at the end.
        kept = places if len(places) < 100 else [step for step in places if step % 150 == 0]
        shown = (*(step for step in kept if step < SHOWN), SHOWN)
        by_step += [{"option": option or "first rise at 0", "step": step, "batch size": schedule.at(step)} for step in shown]
    return {"schedule_savings": savings, "batch_by_step": by_step}


def readings() -> list[tuple[str, str, Any]]:
    """Returns the readings of the schedule as `(config option or "", how the text was read, schedule)`."""
    return [
        ("step_1875", "stepped, first rise after 1,875 steps", Staged(sizes=SIZES, stage_steps=1875)),
        ("", "stepped, first rise at step 0", Staged(sizes=SIZES[1:], stage_steps=1875)),
        ("linear_7500", "a straight ramp over 7,500 steps", Linear(start=SIZES[0], end=SIZES[-1], ramp_steps=7500)),
        ("five_stage_1500", "five stages of 1,500 steps", Staged(sizes=SIZES, stage_steps=1500)),
    ]


def examples(schedule: Any, steps: int) -> int:
    """Returns the expected number of examples of the whole run."""
    return sum(size * count for size, count in stages(schedule, steps))
