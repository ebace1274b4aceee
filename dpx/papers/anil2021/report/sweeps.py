"""Shapes of the tuning, weight-decay and epsilon runs (A1-A4, A6): pure functions of runs read from results.csv."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from dpx.report import shape
from dpx.report.rows import Run
from dpx.report.shape import Part, Verdict

ACCURACY = "heldout/mlm_accuracy"
TRIALS = 30  # section 4.2
SMALLEST_DECAY, LARGEST_DECAY = 0.1, 1.0  # the searched range
# "Bounded": the norm's peak stays below this many times its start. A random walk without decay doubles it here.
BOUND = 1.5


def laptop(runs: Sequence[Run], name: str) -> list[Run]:
    """The runs of a laptop analogue that have a final accuracy."""
    return [run for run in runs if run.experiment == f"laptop_{name}" and ACCURACY in run.finals]


def on_the_text_of(others: Sequence[Run], runs: Sequence[Run]) -> list[Run]:
    """Those of `runs` that trained on the text of `others`: accuracies on different texts are not compared."""
    corpora = {run.facts.get("corpus") for run in others}
    return [run for run in runs if run.facts.get("corpus") in corpora]


def by(runs: Sequence[Run], knob: str) -> dict[float, list[Run]]:
    """Runs by the value of a swept knob, ascending; runs without it are left out."""
    groups: dict[float, list[Run]] = defaultdict(list)
    for run in runs:
        if knob in run.config:
            groups[run.number(knob)].append(run)
    return dict(sorted(groups.items()))


def accuracies(runs: Sequence[Run]) -> list[float]:
    return [run.finals[ACCURACY] for run in runs]


def nonprivate_baseline(runs: Sequence[Run]) -> Verdict:
    """The verdict on A1, the run without privacy."""
    claim = "non-private final accuracy above every private run at equal steps"
    plain = laptop(runs, "anil_nonprivate_baseline")
    steps = {run.config.get("steps") for run in plain}
    private = [
        run
        for run in on_the_text_of(plain, runs)
        if run.experiment.startswith("laptop_anil")
        and run.config.get("mechanism") != "NoPrivacy"
        and run.config.get("steps") in steps
        and ACCURACY in run.finals
    ]
    if not plain or not private:
        part = Part.missing(claim, f"{len(plain)} non-private and {len(private)} private runs of equal steps")
    else:
        best = max(private, key=lambda run: run.finals[ACCURACY])
        words = f"lowest non-private {min(accuracies(plain)):.2%} (n = {len(plain)}), highest of {len(private)} private runs "
        words += f"{best.finals[ACCURACY]:.2%} ({best.experiment}, {best.point})"
        part = Part.of(claim, shape.all_above(accuracies(plain), accuracies(private)), words)
    return Verdict("A1", "anil_nonprivate_baseline", claim, (part,))


def tuning(runs: Sequence[Run]) -> Verdict:
    """The verdict on A2, tuning."""
    claim = "the best trial's weight decay is in the top third of its range"
    trials = laptop(runs, "anil_tune_32k")
    third = LARGEST_DECAY * (SMALLEST_DECAY / LARGEST_DECAY) ** (1 / 3)
    if len(trials) < TRIALS:
        part = Part.missing(claim, f"{len(trials)} of {TRIALS} trials")
    else:
        best = max(trials, key=lambda run: run.finals[ACCURACY])
        decay = best.number("optimizer.weight_decay")
        words = f"best of {len(trials)} trials {best.finals[ACCURACY]:.2%} at λ = {decay:.3g}; top third (log scale) from {third:.3g}"
        part = Part.of(claim, decay >= third, words)
    return Verdict("A2", "anil_tune_32k", claim, (part,))


def table1_best(runs: Sequence[Run]) -> Verdict:
    """The verdict on A3, the best settings of Table 1."""
    claim = "reaches the best trial within one standard deviation over replicates"
    ours = laptop(runs, "anil_table1_best")
    trials = on_the_text_of(ours, laptop(runs, "anil_tune_32k"))
    if len(ours) < 2 or len(trials) < TRIALS:
        part = Part.missing(claim, f"{len(ours)} replicates (2 needed) and {len(trials)} of {TRIALS} trials")
    else:
        best, deviation = max(accuracies(trials)), statistics.stdev(accuracies(ours))
        words = f"{shape.spread(accuracies(ours))} against the best trial's {best:.2%}"
        part = Part.of(claim, statistics.fmean(accuracies(ours)) + deviation >= best, words)
    return Verdict("A3", "anil_table1_best", claim, (part,))


def weight_decay(runs: Sequence[Run]) -> Verdict:
    """The verdict on A4, weight decay."""
    groups = by(laptop(runs, "anil_weight_decay"), "optimizer.weight_decay")
    groups = {decay: group for decay, group in groups.items() if all("weights/matrices" in run.curves for run in group)}
    claims = (
        "without decay weight norms grow",
        "the final weight norm falls as decay rises",
        f"at the largest decay norms are bounded (peak below {BOUND:g} times the start)",
        "at the smallest decay per-example gradients are smaller than at the largest (last quarter of training)",
        "at the smallest decay accuracy is lower than at the largest",
    )
    passes_if = "at small λ norms grow and gradient norms shrink, accuracy lower; at λ=1 norms bounded"
    if len(groups) < 2:
        parts = [Part.missing(claim, f"{len(groups)} weight decays (2 needed)") for claim in claims]
    else:
        smallest, largest = min(groups), max(groups)
        parts = [
            _growth(claims[0], groups[smallest], smallest),
            _norms_fall(claims[1], groups),
            _bounded(claims[2], groups[largest], largest),
            _gradients_shrink(claims[3], groups[smallest], groups[largest]),
            _lower(claims[4], groups[smallest], groups[largest]),
        ]
    return Verdict("A4", "anil_weight_decay", passes_if, tuple(parts))


def _ratios(runs: Sequence[Run]) -> list[float]:
    """Norm of all decayed matrices, at the end over the start."""
    return [run.curves["weights/matrices"][-1][1] / run.curves["weights/matrices"][0][1] for run in runs]


def _growth(claim: str, runs: Sequence[Run], decay: float) -> Part:
    ratios = _ratios(runs)
    return Part.of(claim, min(ratios) > 1, f"λ = {decay:g}: end over start {shape.spread(ratios, percent=False)}")


def _norms_fall(claim: str, groups: dict[float, list[Run]]) -> Part:
    trend = shape.descending({decay: [run.curves["weights/matrices"][-1][1] for run in group] for decay, group in groups.items()})
    return Part.of(claim, trend.holds, trend.words())


def _bounded(claim: str, runs: Sequence[Run], decay: float) -> Part:
    peaks = [max(value for _, value in run.curves["weights/matrices"]) / run.curves["weights/matrices"][0][1] for run in runs]
    return Part.of(claim, max(peaks) < BOUND, f"λ = {decay:g}: peak over start {shape.spread(peaks, percent=False)}")


def _gradients_shrink(claim: str, smallest: Sequence[Run], largest: Sequence[Run]) -> Part:
    if not all("grad/example_norm" in run.curves for run in (*smallest, *largest)):
        return Part.missing(claim, "no per-example gradient norms")
    low, high = ([shape.part_of_curve(run.curves["grad/example_norm"], 0.75, 1) for run in group] for group in (smallest, largest))
    words = f"{shape.spread(low, percent=False)} against {shape.spread(high, percent=False)}"
    return Part.of(claim, shape.all_above(high, low), words)


def _lower(claim: str, smallest: Sequence[Run], largest: Sequence[Run]) -> Part:
    low, high = accuracies(smallest), accuracies(largest)
    return Part.of(claim, shape.all_above(high, low), f"{shape.spread(low)} against {shape.spread(high)}")


def epsilon_sweep(runs: Sequence[Run]) -> Verdict:
    """The verdict on A6, the sweep of epsilon."""
    groups = {epsilon: accuracies(group) for epsilon, group in by(laptop(runs, "anil_epsilon_sweep"), "noise.epsilon").items()}
    rises, concave = "accuracy rises with ε", "concave: the first interval's slope is above the last one's"
    if len(groups) < 3:
        parts = tuple(Part.missing(claim, f"{len(groups)} values of ε (3 needed)") for claim in (rises, concave))
    else:
        trend = shape.trend(groups)
        means = [(epsilon, statistics.fmean(values)) for epsilon, values in groups.items()]
        slopes = [100 * (high[1] - low[1]) / (high[0] - low[0]) for low, high in zip(means, means[1:], strict=False)]
        words = f"slopes of the means {', '.join(f'{slope:.3g}' for slope in slopes)} % per unit of ε"
        parts = (Part.of(rises, trend.holds, trend.words()), Part.of(concave, slopes[0] > slopes[-1] and not math.isnan(slopes[0]), words))
    return Verdict("A6", "anil_epsilon_sweep", "accuracy rises with ε, concave", parts)
