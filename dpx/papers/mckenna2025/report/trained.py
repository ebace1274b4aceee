"""Verdicts of the analogues that train (M8, M11, M12, M14, M15, M16, M18, M19, M28): pure functions of runs read from results.csv.

What is compared is the loss on held-out text after the last step: a larger batch sees its rows more often, which the loss of training rows
would hide.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence

from dpx.report import shape
from dpx.report.rows import Run, cells
from dpx.report.shape import Part, Verdict

LOSS, BATCH, RATIO, RATE = "heldout/loss", "batch_schedule.size", "noise.noise_batch_ratio", "lr_schedule.learning_rate"
MODEL, CLIPPED = "model.name", "grad/clipped_fraction"
# Table 1, in order of size.
SIZES = ("tiny", "mini", "small", "medium", "base", "large", "mega")
# (model, steps, ratio) -> predicted loss, `None` outside the grid.
Predicted = Callable[[str, float, float], float | None]


def laptop(runs: Sequence[Run], name: str) -> list[Run]:
    """Finished runs of a laptop recipe."""
    return [run for run in runs if run.experiment == f"laptop_{name}" and LOSS in run.finals]


def losses_by(runs: Sequence[Run], *knobs: str) -> dict[tuple[str, ...], list[float]]:
    """Final losses of replicates by knobs, as their configs write them."""
    by_values: dict[tuple[str, ...], list[float]] = {}
    for run in runs:
        by_values.setdefault(tuple(run.config[knob] for knob in knobs), []).append(run.finals[LOSS])
    return by_values


def by_batch(runs: Sequence[Run]) -> dict[float, dict[float, list[float]]]:
    """Final losses by ratio and then by batch, both ascending."""
    by_ratio: dict[float, dict[float, list[float]]] = {}
    for (ratio, batch), losses in losses_by(runs, RATIO, BATCH).items():
        by_ratio.setdefault(float(ratio), {})[float(batch)] = losses
    return {ratio: dict(sorted(groups.items())) for ratio, groups in sorted(by_ratio.items())}


def _words(groups: Mapping[float, Sequence[float]]) -> str:
    return ", ".join(f"{batch:g}: {shape.spread(losses, percent=False)}" for batch, losses in groups.items())


def physical_batch(runs: Sequence[Run]) -> Verdict:
    """The verdict on M11, the physical batch: judged at the smallest ratio alone; the order at the others is reported, whichever it is."""
    claim = "at the smallest ratio larger batches end lower"
    by_ratio = by_batch(laptop(runs, "mckenna_fig7_physical_batch"))
    if not by_ratio or min(len(groups) for groups in by_ratio.values()) < 2:
        parts = [Part.missing(claim, f"{len(by_ratio)} ratios with two batches or more")]
    else:
        (_, first), *others = by_ratio.items()
        order = shape.descending(first)
        rest = "".join(f". Reported, not judged: ratio {ratio:.3g}: {_words(groups)}; {_direction(groups)}" for ratio, groups in others)
        parts = [Part.of(claim, order.holds, f"{_words(first)}; {order.words()}{rest}")]
    return Verdict(
        "M11", "mckenna_fig7_physical_batch", "order at the smallest ratio; whichever sign at the others is reported", tuple(parts)
    )


def _direction(groups: Mapping[float, Sequence[float]]) -> str:
    """Which end is lower, by means."""
    smallest, largest = statistics.fmean(groups[min(groups)]), statistics.fmean(groups[max(groups)])
    return "smaller batches end lower" if smallest < largest else "larger batches end lower"


def batch_and_rate(runs: Sequence[Run]) -> Verdict:
    """The verdict on M12, batch and rate: the order of batches at the best rate of each is that at the rate which is best over all."""
    claim = "batches stand in the same order at the best rate of each as at one rate for all"
    by_rate: dict[float, dict[float, float]] = {}
    for (batch, rate), losses in losses_by(laptop(runs, "mckenna_fig8_batch_lr"), BATCH, RATE).items():
        by_rate.setdefault(float(rate), {})[float(batch)] = statistics.fmean(losses)
    batches = sorted({batch for losses in by_rate.values() for batch in losses})
    whole = {rate: losses for rate, losses in by_rate.items() if len(losses) == len(batches)}
    if len(batches) < 2 or len(whole) < 2:
        part = Part.missing(claim, f"{len(batches)} batches at {len(whole)} rates (2 of each needed)")
    else:
        tuned = {batch: min(losses[batch] for losses in whole.values()) for batch in batches}
        one = min(whole.values(), key=lambda losses: statistics.fmean(losses.values()))
        words = ", ".join(f"{batch:g}: {tuned[batch]:.3f} tuned, {one[batch]:.3f}" for batch in batches)
        part = Part.of(claim, sorted(batches, key=lambda batch: tuned[batch]) == sorted(batches, key=lambda batch: one[batch]), words)
    return Verdict("M12", "mckenna_fig8_batch_lr", "same order after tuning", (part,))


def batch_of_large(runs: Sequence[Run]) -> Verdict:
    """The verdict on M14, the batch of a large model: the text's reading of Figure 9."""
    claim = "smaller batches end lower at the largest ratio and at no other"
    by_ratio = by_batch(laptop(runs, "mckenna_fig9_batch_large"))
    if len(by_ratio) < 2 or min(len(groups) for groups in by_ratio.values()) < 2:
        part = Part.missing(claim, f"{len(by_ratio)} ratios with two batches or more (2 needed)")
    else:
        smaller = [ratio for ratio, groups in by_ratio.items() if _direction(groups).startswith("smaller")]
        words = "; ".join(f"ratio {ratio:.3g}: {_words(groups)}" for ratio, groups in by_ratio.items())
        part = Part.of(claim, smaller == [max(by_ratio)], words)
    return Verdict("M14", "mckenna_fig9_batch_large", "as text: only at the largest ratio", (part,))


def decoder(runs: Sequence[Run]) -> Verdict:
    """The verdict on M15, a decoder: the signs of Figure 7, on a decoder."""
    own, theirs = (by_batch(laptop(runs, name)) for name in ("mckenna_fig10_decoder", "mckenna_fig7_physical_batch"))
    shared = [ratio for ratio in own if ratio in theirs and min(len(own[ratio]), len(theirs[ratio])) > 1]
    claim = "at each ratio that end is lower which is so in Figure 7"
    if not shared:
        part = Part.missing(claim, "no ratio that both figures ran")
    else:
        words = "; ".join(f"ratio {ratio:.3g}: {_words(own[ratio])}" for ratio in shared)
        part = Part.of(claim, all(_direction(own[ratio]) == _direction(theirs[ratio]) for ratio in shared), words)
    return Verdict("M15", "mckenna_fig10_decoder", "same signs as M11", (part,))


def best_rates(runs: Sequence[Run]) -> dict[tuple[str, float], float]:
    """The rate of the lowest mean loss by (model, ratio), where at least two rates ran."""
    by_rate: dict[tuple[str, float], dict[float, float]] = {}
    for (model, ratio, rate), losses in losses_by(runs, MODEL, RATIO, RATE).items():
        by_rate.setdefault((model, float(ratio)), {})[float(rate)] = statistics.fmean(losses)
    return {key: min(losses, key=lambda rate: losses[rate]) for key, losses in sorted(by_rate.items()) if len(losses) > 1}


def throughput(runs: Sequence[Run]) -> Verdict:
    """The verdict on M16, throughput: examples a second of the private step at its best, by model; speeds are those of one machine."""
    claim = "examples a second fall with the model's size"
    name = "laptop_mckenna_table4_throughput"
    rows = [row for run in runs for row in cells([run], name, "benchmark") if row["clipping"] == "book_keeping"]
    best: dict[str, float] = {}
    for row in rows:
        best[row["model"]] = max(row["examples_per_s"], best.get(row["model"], 0.0))
    speeds = [best[model] for model in SIZES if model in best]
    words = ", ".join(f"{model} {best[model]:.3g}" for model in SIZES if model in best)
    falls = all(later < first for first, later in itertools.pairwise(speeds))
    part = Part.of(claim, falls, f"examples/s: {words}") if len(speeds) > 1 else Part.missing(claim, f"{len(speeds)} sizes (2 needed)")
    return Verdict("M16", "mckenna_table4_throughput", "examples a second fall with the model's size", (part,))


def rates_by_ratio(runs: Sequence[Run]) -> Verdict:
    """The verdict on M18, rates by ratio."""
    claim, best = "the best rate does not rise with the ratio", best_rates(laptop(runs, "mckenna_fig12_lr_curves"))
    models = {model for model, _ in best}
    curves = {model: [rate for (one, _), rate in best.items() if one == model] for model in sorted(models)}
    pairs = [pair for curve in curves.values() for pair in itertools.pairwise(curve)]
    words = "; ".join(f"{model}: {', '.join(f'{rate:.3g}' for rate in curve)}" for model, curve in curves.items())
    part = Part.of(claim, all(low >= high for low, high in pairs), words) if pairs else Part.missing(claim, "no model with two ratios")
    return Verdict("M18", "mckenna_fig12_lr_curves", "best rate falls slowly with the ratio", (part,))


def rates_without_noise(runs: Sequence[Run]) -> Verdict:
    """The verdict on M19, rates without noise."""
    claim, best = "the same rate is best for every size", best_rates(laptop(runs, "mckenna_lr_nonprivate"))
    words = ", ".join(f"{model}: {rate:.3g}" for (model, _), rate in best.items())
    part = Part.of(claim, len(set(best.values())) == 1, words) if len(best) > 1 else Part.missing(claim, f"{len(best)} sizes (2 needed)")
    return Verdict("M19", "mckenna_lr_nonprivate", "same best rate across two sizes", (part,))


def clipped(runs: Sequence[Run]) -> Verdict:
    """The verdict on M28, how many examples are clipped: the mean over the run, of every finished run of the recipe."""
    claim = "more than 0.9 of all examples are clipped"
    own = [run for run in laptop(runs, "mckenna_clip_check") if CLIPPED in run.curves]
    shares = [statistics.fmean(share for _, share in run.curves[CLIPPED]) for run in own]
    part = Part.of(claim, min(shares) > 0.9, shape.spread(shares)) if shares else Part.missing(claim, "no finished run")
    return Verdict("M28", "mckenna_clip_check", "> 0.9", (part,))


def direct(runs: Sequence[Run], predicted: Predicted) -> Verdict:
    """The verdict on M8, settings trained directly: pairs of settings at one epsilon stand as the fit of the grid has them."""
    claim, settings = "settings of one epsilon end in the order that the fit of the grid predicts", laptop(runs, "mckenna_fig5_direct")
    by_epsilon: dict[float, list[tuple[str, float, float]]] = {}
    for run in settings:
        ratio = float(run.facts["noise_multiplier"]) / run.number(BATCH)
        loss = predicted(run.config[MODEL], run.number("steps"), ratio)
        if loss is not None:
            by_epsilon.setdefault(run.number("noise.epsilon"), []).append((run.config[MODEL], loss, run.finals[LOSS]))
    pairs = [(one, two) for group in by_epsilon.values() for one, two in itertools.combinations(group, 2) if one[0] != two[0]]
    if not pairs:
        part = Part.missing(claim, f"{len(settings)} finished runs, no two of one epsilon inside the grid")
    else:
        right = sum((one[1] < two[1]) == (one[2] < two[2]) for one, two in pairs)
        words = "; ".join(
            f"epsilon {epsilon:g}: "
            + ", ".join(f"{model} predicted {loss:.3f}, held-out {measured:.3f}" for model, loss, measured in group)
            for epsilon, group in sorted(by_epsilon.items())
        )
        part = Part.of(claim, right == len(pairs), f"{right} of {len(pairs)} pairs; {words}")
    return Verdict("M8", "mckenna_fig5_direct", "order of the three agrees with the fit", (part,))
