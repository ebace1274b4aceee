"""The paper's figures redrawn: published values in separate panels, never on the axes of a laptop run."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dpx.papers.anil2021.report import batches, sweeps
from dpx.report import drawing
from dpx.report.document import Figure
from dpx.report.published import Published
from dpx.report.rows import Run, cells
from dpx.report.shape import mean_curve

PUBLISHED, LAPTOP = "published, full scale", "laptop: order only"
_ENDS = {
    True: "Left, the two values that the paper's text gives; right, the laptop analogue.",
    False: "The two values that the paper's text gives; no laptop analogue has run.",
}


def figures(runs: Sequence[Run], published: Sequence[Published]) -> dict[str, list[Figure]]:
    """Figures by experiment; an experiment without runs and without published numbers has no figure."""
    drawn: dict[str, list[Figure]] = {
        "anil_tune_32k": _tuning(runs),
        "anil_weight_decay": _weight_decay(runs),
        "anil_scale_invariance": _scale_invariance(runs),
        "anil_epsilon_sweep": _epsilon(runs, published),
        "anil_batch_sweep": _batch_sweep(runs, published),
        "anil_batch_schedule": _batch_schedule(runs),
        "anil_accounting": _accounting(runs),
    }
    return {name: made for name, made in drawn.items() if made}


def _numbers(published: Sequence[Published], experiment: str, knob: str) -> list[tuple[float, float]]:
    """(knob, percent) of the accuracies that have a value."""
    lines = [line for line in published if line.experiment == experiment and line.value and line.point.startswith(f"{knob}=")]
    return [(float(line.point.partition("=")[2]), float(line.value)) for line in lines]


def _curves(runs: Sequence[Run], metric: str, scale: int) -> list[list[tuple[int, float]]]:
    return [[(step, scale * value) for step, value in run.curves[metric]] for run in runs if metric in run.curves]


def _grouped(axes: Any, groups: Mapping[float, Sequence[Run]], metric: str, name: str, scale: int = 1) -> None:
    """One series per value of a knob."""
    for number, (value, group) in enumerate(groups.items()):
        curves = _curves(group, metric, scale)
        if curves:
            drawing.lines(axes, number, f"{value:g}", curves, mean_curve(curves))
    axes.set_xlabel("step")
    drawing.legend(axes, name)


def _against(axes: Any, groups: Mapping[float, Sequence[Run]], xlabel: str, number: int = 0) -> None:
    """Final accuracy of every replicate and the mean, against a knob."""
    points = [(value, 100 * run.finals[sweeps.ACCURACY]) for value, group in groups.items() for run in group]
    means = [(value, 100 * statistics.fmean(sweeps.accuracies(group))) for value, group in groups.items()]
    drawing.scatter(axes, number, points)
    drawing.lines(axes, number, "mean", [], means)
    axes.set(xlabel=xlabel, ylabel="held-out accuracy, %", title=LAPTOP)


def _tuning(runs: Sequence[Run]) -> list[Figure]:
    drawn: list[Figure] = []
    trials = sweeps.laptop(runs, "anil_tune_32k")
    if trials:
        caption = f"Figure 1, laptop analogue: {len(trials)} trials. The paper's points are a picture that is not digitised."
        knobs = {"optimizer.weight_decay": "weight decay λ", "lr_schedule.learning_rate": "learning rate η"}
        with drawing.panels("anil-figure-1", caption, 2, drawn) as both:
            for axes, (knob, label) in zip(both, knobs.items(), strict=True):
                drawing.scatter(axes, 0, [(run.number(knob), 100 * run.finals[sweeps.ACCURACY]) for run in trials])
                axes.set(xscale="log", xlabel=label, ylabel="held-out accuracy, %", title=LAPTOP)
    return drawn


def _weight_decay(runs: Sequence[Run]) -> list[Figure]:
    drawn: list[Figure] = []
    groups = sweeps.by(sweeps.laptop(runs, "anil_weight_decay"), "optimizer.weight_decay")
    if groups:
        caption = "Section 4.3, laptop analogue: norm of all decayed matrices and mean norm of a per-example gradient, by weight decay λ."
        with drawing.panels("anil-weight-decay", caption, 2, drawn) as (left, right):
            _grouped(left, groups, "weights/matrices", "λ")
            _grouped(right, groups, "grad/example_norm", "λ")
            left.set(ylabel="weight norm", title=LAPTOP)
            right.set(ylabel="per-example gradient norm", yscale="log")
    return drawn


def _scale_invariance(runs: Sequence[Run]) -> list[Figure]:
    drawn: list[Figure] = []
    rows = cells(runs, "anil_scale_invariance", "scale_invariance")
    rows = [row for row in rows if row["alpha"] == 2 and row["numbers"] == "float64"]
    if rows:
        caption = "Section 4.3: relative change of the output when weights are doubled (random model, float64); 1e-16 is rounding."
        with drawing.panels("anil-scale-invariance", caption, 1, drawn) as (axes,):
            axes.get_figure().set_size_inches(9.4, 3.4)
            for holds, number, label in (("True", 0, "the claim holds"), ("False", 1, "it does not")):
                chosen = [(row["relative change of the output"], row["scaled by alpha"]) for row in rows if row["claim holds"] == holds]
                drawing.scatter(axes, number, [(max(change, 1e-16), case) for change, case in chosen], label)
            axes.set(xscale="log", xlabel="relative change of the output at α = 2", xlim=(3e-17, 10))
            axes.invert_yaxis()
            drawing.legend(axes)
    return drawn


def _epsilon(runs: Sequence[Run], published: Sequence[Published]) -> list[Figure]:
    drawn: list[Figure] = []
    groups = sweeps.by(sweeps.laptop(runs, "anil_epsilon_sweep"), "noise.epsilon")
    caption = f"Figure 2: accuracy against ε. {_ENDS[bool(groups)]}"
    with drawing.panels("anil-figure-2", caption, 2 if groups else 1, drawn) as axes:
        numbers = _numbers(published, "anil_epsilon_sweep", "noise.epsilon")
        drawing.scatter(axes[0], 1, numbers)
        drawing.values(axes[0], numbers)
        axes[0].set(xlabel="ε", ylabel="masked-token accuracy, %", title=PUBLISHED, xlim=(0, 11), ylim=(25, 45))
        if groups:
            _against(axes[1], groups, "ε")
    return drawn


def _batch_sweep(runs: Sequence[Run], published: Sequence[Published]) -> list[Figure]:
    drawn: list[Figure] = []
    groups = sweeps.by(sweeps.laptop(runs, "anil_batch_sweep"), batches.SIZE)
    if groups:
        caption = "Figures 3a and 3b, laptop analogue: gradient-SNR (windows of steps) and held-out accuracy by expected batch size."
        with drawing.panels("anil-figure-3", caption, 2, drawn) as (left, right):
            _grouped(left, groups, batches.SNR, "batch")
            left.set(ylabel="gradient-SNR", yscale="log", title=LAPTOP)
            _grouped(right, groups, sweeps.ACCURACY, "batch", 100)
            swept = [run for group in groups.values() for run in group]
            plain = sweeps.on_the_text_of(swept, sweeps.laptop(runs, "anil_nonprivate_baseline"))
            if plain:
                right.axhline(100 * statistics.fmean(sweeps.accuracies(plain)), color=drawing.SOFT, linewidth=1.2, linestyle=":")
                right.set_title("dotted: without privacy")
            right.set(ylabel="held-out accuracy, %")
    caption = f"Figure 3b's ends: accuracy against batch size. {_ENDS[bool(groups)]}"
    with drawing.panels("anil-figure-3-ends", caption, 2 if groups else 1, drawn) as axes:
        numbers = _numbers(published, "anil_batch_sweep", batches.SIZE)
        drawing.scatter(axes[0], 1, numbers)
        drawing.values(axes[0], numbers)
        axes[0].axhline(70, color=drawing.SOFT, linewidth=1.2, linestyle=":")
        axes[0].annotate("70 % without privacy", (32768, 70), textcoords="offset points", xytext=(0, -13), fontsize=9)
        axes[0].set(xscale="log", xlabel="batch size", ylabel="masked-token accuracy, %", title=PUBLISHED)
        if groups:
            _against(axes[1], groups, "expected batch size")
            axes[1].set_xscale("log")
            # The sizes that ran: within one decade matplotlib's own labels run into each other.
            axes[1].set_xticks(list(groups), [f"{size:g}" for size in groups])
            axes[1].minorticks_off()
    return drawn


def _batch_schedule(runs: Sequence[Run]) -> list[Figure]:
    drawn: list[Figure] = []
    roles = batches.schedules(runs)
    if roles:
        caption = "Figures 4a and 4b, laptop analogue: gradient-SNR and held-out accuracy of a rising batch between two constant ones."
        with drawing.panels("anil-figure-4", caption, 2, drawn) as (left, right):
            for axes, metric, scale in ((left, batches.SNR, 1), (right, sweeps.ACCURACY, 100)):
                for number, role in enumerate(role for role in ("small", "large", "schedule") if role in roles):
                    curves = _curves(roles[role], metric, scale)
                    if curves:
                        drawing.lines(axes, number, role, curves, mean_curve(curves))
                axes.set_xlabel("step")
                drawing.legend(axes)
            left.set(ylabel="gradient-SNR", yscale="log", title=LAPTOP)
            right.set(ylabel="held-out accuracy, %")
    return drawn


def _accounting(runs: Sequence[Run]) -> list[Figure]:
    drawn: list[Figure] = []
    rows = cells(runs, "anil_accounting", "sigma_by_batch")
    if rows:
        caption = "Full scale: the noise multiplier that ε = 5.36 needs, and the ε that a PLD accountant finds at RDP's noise."
        with drawing.panels("anil-accounting", caption, 2, drawn) as (left, right):
            drawing.lines(left, 0, "σ by RDP", [], [(row["batch size"], row["sigma (rdp)"]) for row in rows], markers=True)
            drawing.lines(left, 1, "σ by PLD", [], [(row["batch size"], row["sigma (pld)"]) for row in rows], markers=True)
            drawing.lines(right, 0, "RDP", [], [(row["batch size"], row["epsilon (rdp)"]) for row in rows], markers=True)
            drawing.lines(right, 1, "PLD", [], [(row["batch size"], row["epsilon (pld)"]) for row in rows], markers=True)
            left.set(xscale="log", xlabel="batch size", ylabel="noise multiplier σ")
            right.set(xscale="log", xlabel="batch size", ylabel="ε at that σ", ylim=(4, 5.6))
            drawing.legend(left)
            drawing.legend(right)
    return drawn
