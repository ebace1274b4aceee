"""The page of Anil et al. 2021, from results.csv and published.csv alone."""

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path

from dpx.papers.anil2021.report import privacy, sweeps
from dpx.papers.anil2021.report.figures import figures
from dpx.papers.anil2021.report.verdicts import verdicts
from dpx.report import shape
from dpx.report.document import Block, Document, Figure, Grid, Items, Paragraph, Section
from dpx.report.published import Published
from dpx.report.rows import Run
from dpx.report.shape import Verdict

TITLE = "Anil et al. 2021, “Large-Scale Differentially Private BERT”: published beside ours"
_TITLES = {
    "A1": "The target without privacy (section 4.2)",
    "A2": "Tuning at batch 32,768 (Figure 1)",
    "A3": "The best values (Table 1)",
    "A4": "Weight decay (section 4.3)",
    "A5": "Scale invariance (section 4.3)",
    "A6": "Accuracy against ε (Figure 2)",
    "A7": "Batch sweep (Figures 3a, 3b)",
    "A8": "The 2M batch (abstract)",
    "A9": "Batch schedule (Figures 4a, 4b)",
    "A10": "Four readings of “14 %” (ours)",
    "A11": "Accounting (sections 3, 5.1)",
    "A12": "Throughput (section 5.3)",
    "A13": "32 times the reference batch (sections 1.1, 5.3)",
}
# A8 is a point of the batch sweep, by name.
_JUDGED_BY = {"A8": ("laptop_anil_batch_sweep",)}
_UNTRAINED = ("A5", "A10", "A11", "A13")


def document(runs: Sequence[Run], published: Sequence[Published], notes: Path) -> Document:
    """`notes` is a CSV (item, note) of what was found out about a verdict; it need not exist."""
    judged, drawn, said = verdicts(runs), figures(runs, published), _notes(notes)
    sections = [
        Section("What must be said first", [Items(privacy.OF_THE_PAPER), Items(privacy.OF_OURS, "and of our runs")], "first"),
        Section("All thirteen at a glance", _glance(judged, runs, published), "glance"),
        *(_experiment(verdict, runs, published, drawn.get(verdict.experiment, []), said.get(verdict.item, [])) for verdict in judged),
        Section("Every run", [_all_runs(runs)], "runs"),
    ]
    return Document(TITLE, _lead(judged, runs), sections)


def _lead(judged: Sequence[Verdict], runs: Sequence[Run]) -> list[str]:
    count = {state: sum(verdict.state == state for verdict in judged) for state in (shape.PASS, shape.FAIL, shape.NOT_RUN)}
    trained = [run for run in runs if sweeps.ACCURACY in run.finals]
    commits = sorted({run.facts["commit"] for run in trained if "commit" in run.facts})
    corpora = sorted({run.facts["corpus"] for run in trained if "corpus" in run.facts})
    text = f" Their text: {'; '.join(corpora)}, the checksum being that of the prepared rows." if corpora else ""
    made = f" made by commits {', '.join(f'`{commit}`' for commit in commits)}" if commits else ""
    return [
        f"Laptop shapes: {count['pass']} pass, {count['fail']} fail, {count['not run']} not run. From {len(trained)} trained runs{made}; "
        f"generated from `results.csv` and `published.csv` by `python -m dpx job=report report.paper=anil2021`.{text}",
        "Three columns never mix. **Published** is what the paper says, and beside it how we know: printed in its text, shown in a "
        "figure only (left blank, nothing was digitised), worked out by us from the paper's own settings, or said in words without a "
        "number. **Ours, full scale** is the same experiment at the "
        "same size, or its cost in hours of one H200 at half of 790 TFLOP/s. **Laptop shape** judges only order, on a two-layer BERT with "
        "another text, batch and number of steps; its values say nothing about the paper's.",
    ]


# What `published.csv` has in one word, for a reader who has not read it.
_HOW_WE_KNOW = {
    "text": "printed in the text",
    "picture": "in a figure only",
    "computed": "worked out from its settings",
    "claim": "said in words",
}


def _glance(judged: Sequence[Verdict], runs: Sequence[Run], published: Sequence[Published]) -> list[Block]:
    rows = []
    for verdict in judged:
        lines = [line for line in published if line.item == verdict.item]
        named = [f"{line.value} {line.unit}" for line in lines if line.value and line.mark == "text" and line.unit in ("%", "×")]
        claimed = "said in words" if any(line.mark == "claim" for line in lines) else "nothing"
        title = f"[{verdict.item}](#{verdict.item.lower()}) {_TITLES[verdict.item]}"
        ours = _exact_state(verdict) if verdict.item in _UNTRAINED else _whole(lines, runs)
        rows.append((title, ", ".join(named) or claimed, ours, verdict.state))
    return [Grid(("experiment", "published in the text", "ours, full scale", "laptop shape"), rows)]


def _whole(lines: Sequence[Published], runs: Sequence[Run]) -> str:
    """Our values at full scale, or what all runs of the experiment cost."""
    points = [line for line in lines if "=" in line.point]
    if any(sweeps.ACCURACY in run.finals for run in runs if run.experiment == lines[0].experiment):
        return ", ".join(_ours(line, runs) for line in points or lines[:1])
    return _not_run(sum(float(line.h200_hours) for line in points or lines[:1]))


def _exact_state(verdict: Verdict) -> str:
    return "not run (no cost)" if verdict.state == shape.NOT_RUN else "needs no training: see below"


def _experiment(
    verdict: Verdict, runs: Sequence[Run], published: Sequence[Published], drawn: Sequence[Figure], notes: Sequence[str]
) -> Section:
    lines = [line for line in published if line.item == verdict.item]
    ours = [run for run in runs if run.experiment == f"laptop_{verdict.experiment}" and sweeps.ACCURACY in run.finals]
    blocks: list[Block] = [
        Paragraph(f"`+experiment={verdict.experiment}`. Passes if: {verdict.passes_if}."),
        Grid(
            ("what should hold", "what our repeats show", "laptop shape"),
            [(part.claim, part.statistic, part.state) for part in verdict.parts],
        ),
        *map(Paragraph, notes),
        *drawn,
        Grid(("quantity", "published", "how we know", "ours, full scale", "note"), [_published_row(line, runs) for line in lines]),
    ]
    if ours:
        blocks.append(Grid(_POINT_COLUMNS, _points(ours), f"laptop runs by point: {len(ours)} in all"))
    if verdict.item == "A4":
        blocks += _matrices(ours)
    names = (verdict.experiment, f"laptop_{verdict.experiment}", *_JUDGED_BY.get(verdict.item, ()))
    said = privacy.statement([run for run in runs if run.experiment in names])
    # One line is shown as it is; several (a sweep over epsilon, say) are folded.
    several = f"privacy of these runs, {len(said)} kinds" if len(said) > 1 else ""
    blocks.append(Items([f"Privacy: {line}" for line in said], several) if said else Paragraph(_no_statement(verdict)))
    return Section(f"{verdict.item}. {_TITLES[verdict.item]}", blocks, verdict.item.lower())


def _matrices(runs: Sequence[Run]) -> list[Grid]:
    """Norm of every weight matrix, end over start, by weight decay: the mean over replicates."""
    groups = sweeps.by(runs, "optimizer.weight_decay")
    names = sorted({name for run in runs for name in run.finals if name.startswith("weights/") and name in run.curves})
    if not names:
        return []
    rows = [(f"`{name.removeprefix('weights/')}`", *(_growth(name, group) for group in groups.values())) for name in names]
    return [Grid(("matrix", *(f"λ = {decay:g}" for decay in groups)), rows, "norm of every weight matrix, end over start")]


def _growth(name: str, runs: Sequence[Run]) -> str:
    ratios = [run.finals[name] / run.curves[name][0][1] for run in runs if name in run.finals and name in run.curves]
    return f"{statistics.fmean(ratios):.3g}" if ratios else "–"


def _no_statement(verdict: Verdict) -> str:
    if verdict.item in _UNTRAINED:
        return "Privacy: nothing is trained and no data is read, so no ε is spent."
    return "Privacy: none of these ran, so nothing was spent."


def _published_row(line: Published, runs: Sequence[Run]) -> tuple[str, ...]:
    value = f"{int(line.value):,}" if line.value.isdigit() else line.value
    return (line.quantity, f"{value} {line.unit}".strip() if line.value else "–", _HOW_WE_KNOW[line.mark], _ours(line, runs), line.note)


def _ours(line: Published, runs: Sequence[Run]) -> str:
    """Our value at full scale, or that it did not run and what it would cost."""
    known = [run for run in runs if run.experiment == line.experiment and line.metric in run.finals]
    values = [run.finals[line.metric] for run in known if _is_point(run, line.point)]
    if line.mark == "claim" and line.h200_hours == "0":
        return "see the table above" if any(run.experiment == line.experiment for run in runs) else "not run (no cost)"
    if values:
        value = max(values) if line.point == "max" else statistics.fmean(values)
        scale = 100 if line.metric == sweeps.ACCURACY else 1
        return f"{scale * value:,.0f}" if value >= 1e5 else f"{scale * value:.4g} {line.unit}".strip()
    if line.metric == "setting":
        return "set in the recipe"
    return _not_run(float(line.h200_hours), line.flops)


def _not_run(hours: int | float, flops: str = "") -> str:
    """`not run` and the cost of running it."""
    if not hours:
        return "not run (no cost)"
    words = f"{hours:,.0f} H200 hour{'' if hours == 1 else 's'}"
    return f"not run ({words}{f', {flops} FLOPs' if flops else ''})"


def _is_point(run: Run, point: str) -> bool:
    """`key=value` of the run's own config, numbers compared as numbers; an empty point or `max` takes every run."""
    key, equals, value = point.partition("=")
    return not equals or (key in run.config and float(run.config[key]) == float(value))


_SNR_COLUMNS = ("SNR, first quarter", "SNR, last quarter")
_POINT_COLUMNS = ("point", "held-out accuracy", "most frequent token", "expected examples", *_SNR_COLUMNS, "guarantee")


def _points(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.point, []).append(run)
    return [(f"`{point}`", *_point(group)) for point, group in grouped.items()]


def _point(group: Sequence[Run]) -> tuple[str, ...]:
    curves = [run.curves["grad/snr"] for run in group if "grad/snr" in run.curves]
    quarters = [_quarter(curves, begin) if curves else "–" for begin in (0, 0.75)]
    guarantees = ", ".join(sorted({run.facts.get("guarantee", "?") for run in group}))
    epsilons = [max(float(value) for key, value in run.facts.items() if key.startswith("epsilon/")) for run in group if _has_epsilon(run)]
    return (
        shape.spread(sweeps.accuracies(group)),
        f"{100 * statistics.fmean(run.finals.get('baseline/most_frequent_token', float('nan')) for run in group):.3g} %",
        f"{statistics.fmean(run.finals['train/expected_examples'] for run in group):,.0f}",
        *quarters,
        guarantees + (f", ε = {max(epsilons):.3g}" if epsilons else ""),
    )


def _quarter(curves: Sequence[Sequence[tuple[int, float]]], begin: int | float) -> str:
    return shape.spread([shape.part_of_curve(curve, begin, begin + 0.25) for curve in curves], percent=False)


def _has_epsilon(run: Run) -> bool:
    return any(key.startswith("epsilon/") for key in run.facts)


def _all_runs(runs: Sequence[Run]) -> Block:
    trained = [run for run in runs if sweeps.ACCURACY in run.finals]
    rows = [
        (run.experiment, f"`{run.point}`", str(run.replicate), f"{run.finals[sweeps.ACCURACY]:.2%}", run.facts.get("seconds", "–"),
         f"`{run.facts.get('commit', 'unknown')}`", f"`{run.run}`")
        for run in trained
    ]  # fmt: skip
    if not rows:
        return Paragraph("No training run is in results.csv.")
    return Grid(("experiment", "point", "replicate", "held-out accuracy", "seconds", "commit", "run"), rows, f"{len(rows)} training runs")


def _notes(path: Path) -> dict[str, list[str]]:
    if not path.exists():
        return {}
    by_item: dict[str, list[str]] = {}
    with open(path, newline="") as file:
        for line in csv.DictReader(file):
            by_item.setdefault(line["item"], []).append(line["note"])
    return by_item
