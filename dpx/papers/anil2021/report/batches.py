"""Shapes of the batch sweep, the largest batch and the batch schedule (A7-A9): pure functions of runs read from results.csv."""

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence

from dpx.papers.anil2021.report.sweeps import accuracies, by, laptop, on_the_text_of
from dpx.report import shape
from dpx.report.rows import Run
from dpx.report.shape import Part, Verdict

SNR, EXAMPLES, SIZE = "grad/snr", "train/expected_examples", "batch_schedule.size"


def batch_sweep(runs: Sequence[Run]) -> Verdict:
    """The verdict on A7, the batch sweep."""
    claims = ("SNR ordered by batch at each step", "SNR falls along training, at every batch", "final accuracy ordered by batch")
    groups = by(laptop(runs, "anil_batch_sweep"), SIZE)
    groups = {size: [run for run in group if SNR in run.curves] for size, group in groups.items()}
    groups = {size: group for size, group in groups.items() if group}
    if len(groups) < 2:
        parts = tuple(Part.missing(claim, f"{len(groups)} batch sizes (2 needed)") for claim in claims)
    else:
        trend = shape.trend({size: accuracies(group) for size, group in groups.items()})
        parts = (_snr_ordered(claims[0], groups), _snr_falls(claims[1], groups), Part.of(claims[2], trend.holds, trend.words()))
    return Verdict("A7", "anil_batch_sweep", "SNR ordered by q at each step; SNR falls along training; final accuracy ordered by q", parts)


def _snr_ordered(claim: str, groups: Mapping[float, Sequence[Run]]) -> Part:
    curves = {size: shape.mean_curve([run.curves[SNR] for run in group]) for size, group in groups.items()}
    tables = [dict(curve) for _, curve in sorted(curves.items())]
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    wrong = [step for step in steps if any(low[step] >= high[step] for low, high in itertools.pairwise(tables))]
    words = f"{len(steps) - len(wrong)} of {len(steps)} windows of training in order (means over replicates)"
    words += f"; not those that end at step {', '.join(map(str, wrong[:8]))}" if wrong else ""
    return Part.of(claim, bool(steps) and not wrong, words)


def fall(run: Run) -> float:
    """Mean SNR of the last quarter of training over that of the first."""
    return shape.part_of_curve(run.curves[SNR], 0.75, 1) / shape.part_of_curve(run.curves[SNR], 0, 0.25)


def _snr_falls(claim: str, groups: Mapping[float, Sequence[Run]]) -> Part:
    ratios = {size: [fall(run) for run in group] for size, group in groups.items()}
    words = "last over first quarter: " + ", ".join(f"{size:g}: {shape.spread(values, percent=False)}" for size, values in ratios.items())
    return Part.of(claim, all(max(values) < 1 for values in ratios.values()), words)


def largest_batch(runs: Sequence[Run]) -> Verdict:
    """The verdict on A8, the largest batch: its own runs, and those of the sweep at the same settings."""
    claim = "highest accuracy of the batch sweep"
    groups = by(laptop(runs, "anil_batch_sweep"), SIZE)
    own = on_the_text_of([run for group in groups.values() for run in group], laptop(runs, "anil_2m_batch"))
    if groups:
        own = own + groups.pop(max(groups))
    if not own or not groups:
        part = Part.missing(claim, f"{len(own)} runs of the largest batch, {len(groups)} smaller batches")
    else:
        means = {size: statistics.fmean(accuracies(group)) for size, group in groups.items()}
        best = max(means, key=lambda size: means[size])
        words = f"{shape.spread(accuracies(own))}; the best smaller batch, {best:g}, {shape.spread(accuracies(groups[best]))}"
        part = Part.of(claim, statistics.fmean(accuracies(own)) > means[best], words)
    return Verdict("A8", "anil_2m_batch", "highest accuracy of A7", (part,))


def schedules(runs: Sequence[Run], name: str = "anil_batch_schedule") -> dict[str, list[Run]]:
    """Runs of Figure 4 by role: `small` and `large` constant batches, and the `schedule` between them."""
    by_role: dict[str, list[Run]] = {}
    constant: dict[int, list[Run]] = {}
    for run in laptop(runs, name):
        sizes = json.loads(run.config.get("batch_schedule.sizes", "[]"))
        if len(sizes) > 1:
            by_role.setdefault("schedule", []).append(run)
        elif sizes:
            constant.setdefault(sizes[0], []).append(run)
    if len(constant) > 1:
        by_role |= {"small": constant[min(constant)], "large": constant[max(constant)]}
    return by_role


def unevenness(run: Run) -> float:
    """Standard deviation of log SNR along training, the first tenth left out: 0 for a flat curve."""
    last = run.curves[SNR][-1][0]
    return statistics.pstdev(math.log(value) for step, value in run.curves[SNR] if step > 0.1 * last)


def batch_schedule(runs: Sequence[Run]) -> Verdict:
    """The verdict on A9, the batch schedule."""
    claims = (
        "the schedule's final accuracy is within noise of the large batch's",
        "the schedule's SNR is flatter than the large batch's",
        "the schedule needs fewer examples",
    )
    roles = schedules(runs)
    if len(roles) < 3:
        have = ", ".join(sorted(roles)) or "none"
        parts = [Part.missing(claim, f"needs a small, a large batch and the schedule; there are: {have}") for claim in claims]
    else:
        parts = [_matches(claims[0], roles), _flatter(claims[1], roles), _fewer(claims[2], roles)]
    passes_if = "schedule's final accuracy within noise of the large batch; SNR of the schedule stays flatter; examples saved as in (e)1"
    return Verdict("A9", "anil_batch_schedule", passes_if, tuple(parts))


def _matches(claim: str, roles: Mapping[str, Sequence[Run]]) -> Part:
    ours, large = accuracies(roles["schedule"]), accuracies(roles["large"])
    if min(len(ours), len(large)) < 2:
        return Part.missing(claim, "noise needs two replicates of each")
    holds, difference, error = shape.within_noise(ours, large)
    gap = f"difference {100 * difference:+.3g} %, two standard errors {200 * error:.2g} %"
    small = f"the small batch {shape.spread(accuracies(roles['small']))}"
    return Part.of(claim, holds, f"{shape.spread(ours)} against {shape.spread(large)}: {gap}; {small}")


def _flatter(claim: str, roles: Mapping[str, Sequence[Run]]) -> Part:
    if not all(SNR in run.curves for role in ("schedule", "large") for run in roles[role]):
        return Part.missing(claim, "no SNR")
    ours, large = ([unevenness(run) for run in roles[role]] for role in ("schedule", "large"))
    words = f"{shape.spread(ours, percent=False)} against {shape.spread(large, percent=False)}"
    return Part.of(claim, shape.all_above(large, ours), f"standard deviation of log SNR after the first tenth {words}")


def _fewer(claim: str, roles: Mapping[str, Sequence[Run]]) -> Part:
    ours, large = (statistics.fmean(run.finals[EXAMPLES] for run in roles[role]) for role in ("schedule", "large"))
    saved = 1 - ours / large
    return Part.of(claim, saved > 0, f"{saved:.2%} fewer expected examples than the large batch")


def variants(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of the three readings of the schedule, by point."""
    by_point: dict[str, list[Run]] = {}
    for run in laptop(runs, "anil_schedule_variants"):
        by_point.setdefault(run.point, []).append(run)
    return by_point
