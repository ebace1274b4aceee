"""Defines the verdict on Anil et al. 2021 that no declared rule expresses: the examples that a schedule saves at a matched accuracy."""

from collections.abc import Sequence

from dpx.declaration import declaration
from dpx.pages.pictures import mean_curve
from dpx_papers.report.rules import Groups, Judged, Rows, Rule

SIZES, STAGE_STEPS = "batch/each", "batch_schedule.stage_steps"
# (step, value) in the order of steps.
Curve = Sequence[tuple[int, int | float]]


@declaration
class Saves(Rule):
    """Judges whether the schedule of several batch sizes needs fewer examples than the constant one, until the mean curve of its replicates
    reaches the lower of the two final values. Between two evaluations a curve is a straight line."""

    value: str = "heldout/mlm_accuracy@points"
    by: str = "batch_schedule.sizes"
    groups: int = 2

    def judge(self, groups: Groups, rows: Rows) -> Judged:
        sizes = {text: (found, steps) for text, found, steps in zip(rows[self.by], rows[SIZES], rows[STAGE_STEPS], strict=True)}
        curves = {text: mean_curve(own) for text, own in groups.items()}
        if sorted(len(found) > 1 for found, _ in sizes.values()) != [False, True]:
            return None, f"{len(curves)} schedules; needs a constant batch and one that rises to it"
        matched = min(curve[-1][1] for curve in curves.values())
        needed = {len(sizes[text][0]) > 1: examples(reached(curve, matched), *sizes[text]) for text, curve in curves.items()}
        saved = 1 - needed[True] / needed[False]
        text = f"{needed[True]:,.0f} examples against {needed[False]:,.0f} to {100 * matched:.4g} %: {100 * saved:.3g} % saved"
        return saved > 0, text


def reached(curve: Curve, value: int | float) -> int | float:
    """Returns the step at which a curve first is at a value; infinite if it never is."""
    step, before = 0.0, 0.0
    for at, now in curve:
        if now >= value:
            return step + (at - step) * (value - before) / (now - before) if now > before else float(at)
        step, before = float(at), float(now)
    return float("inf")


def examples(step: int | float, sizes: Sequence[int], stage_steps: int | float) -> int | float:
    """Returns the expected number of examples that are drawn until a step, with `sizes` for `stage_steps` steps each and then the last."""
    risen = sum(size * min(max(step - place * stage_steps, 0), stage_steps) for place, size in enumerate(sizes[:-1]))
    return risen + sizes[-1] * max(step - (len(sizes) - 1) * stage_steps, 0)
