"""The page of one run, and of several side by side: the guarantee in two sentences, what was learnt, curves, results and the config.

Both belong below `private/`, since curves and results depend on the text without noise.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpx.console import figure
from dpx.declaration import require
from dpx.files.results import BASELINES, metric_in_words
from dpx.pages import pictures, read_runs
from dpx.pages.analysis_tables import Lines, Picture, Table
from dpx.pages.page_document import Block, Document, Panels, Section, code, escaped, grid
from dpx.pages.read_runs import Run

# What is drawn, in this order, with the words for it; a metric that no run has is left out.
CURVES = {
    "heldout/mlm_accuracy": "accuracy on held-out masked words",
    "heldout/next_token_accuracy": "accuracy of the next held-out token",
    "heldout/accuracy": "accuracy on held-out rows",
    "heldout/subset_accuracy": "share of held-out rows all of whose labels are right",
    "heldout/pearson": "correlation with held-out numbers",
    "heldout/loss": "loss on held-out rows",
    "train/loss": "loss of the rows that a step drew",
    "grad/snr": "gradient-SNR",
    "grad/clipped_fraction": "share of examples that are clipped",
    "grad/norm": "norm of the noisy gradient",
    "grad/example_norm": "mean norm of an example's gradient",
    "weights/matrices": "norm of all weight matrices",
}
AS_STEPS_GO = "as_steps_go"
_PRIVATE = "This page depends on the protected text without noise: keep it below `private/`."
_MANY = "Whoever sees several of these runs learns more than each of them allows: `job=account` composes what they spent."
# Settings beside one another that a page has room for.
_COLUMNS = 5
# Facts that are numbers; the others are texts, though some look like numbers.
_NUMBERS = ("delta", "noise_multiplier", "seconds")


def read(folder: Path) -> Run:
    """Returns the finished run in `folder`. Raises `ConfigError` for a run that has not finished."""
    runs, left_out = read_runs.collect(folder.parent, (folder.name,))
    found = [run for run in runs if folder.name in (run.run, f"{run.experiment}-{run.run}")]
    reason = next((line.partition(": ")[2] for line in left_out if line.startswith(f"{folder.name}: ")), "is not a run that has finished")
    require(bool(found), f"run={folder}", reason, "Let it train to its end, or name another run")
    return found[0]


def document(run: Run, in_short: str, words: Sequence[str], tables: Sequence[Table]) -> Document:
    """Returns the page of a run; `in_short` says what it guarantees, `words` and `tables` explain the claim (`dpx.job.explain`)."""
    lead = [escaped(in_short)]
    if (metric := _metric(run)) is not None:
        baselines = {BASELINES.get(name, name.replace("_", " ")): value for name, value in _baselines(run).items()}
        beside = ", ".join(f"{metric_in_words(_name(metric), value)} ({name})" for name, value in baselines.items())
        learnt = f"{CURVES[metric].capitalize()}: {_accuracy(run)}{f'; without learning {beside}' if beside else ''}."
        lead.append(escaped(learnt))

    # An indented line continues the one before, an indented item is below it.
    lines: list[str] = []
    for word in words:
        if word.startswith("  ") and not word.startswith("  - ") and lines:
            lines[-1] += f" {escaped(word)}"
        else:
            lines.append(f"  - {escaped(word[4:])}" if word.startswith("  - ") else f"- {escaped(word)}")
    claim: list[Block] = ["\n".join(lines)]
    for table in (table for table in tables if table.name == AS_STEPS_GO):
        rows = table.as_json()["rows"]
        accountants = tuple(column for column in table.columns if column != "steps" and any(row[column] for row in rows))
        drawn = Lines(table=AS_STEPS_GO, x="steps", y=accountants, y_label="epsilon")
        claim += pictures.draw([Picture("epsilon", table.title.capitalize() + ".", (drawn,))], [table]) if accountants else []
    for table in tables:
        heads = tuple(escaped(column.replace("_", " ")) for column in table.columns)
        claim.append(grid(heads, [tuple(map(_cell, row)) for row in table.rows], table.title or table.name))

    config = [(code(key), code(value)) for key, value in sorted(run.config.items())]
    sections = [
        Section("What it learns", _curves([run]), "curves"),
        Section("What it guarantees", claim, "guarantee"),
        Section("Results", [_results([run])], "results"),
        Section("Config", [grid(("key", "value"), config, "every setting")], "config"),
    ]
    return Document(f"Run {label(run)}", [*lead, _PRIVATE], [one for one in sections if one.blocks])


def comparison(runs: Sequence[Run]) -> Document:
    """Returns the page of several runs: what each learns and spends, their curves together, the settings that differ and all numbers."""
    names, side_by_side = _by_difference(runs), []
    for run in runs:
        loss, accountant = run.finals.get("heldout/loss"), run.facts.get("accountant", "")
        epsilon = run.facts.get(f"epsilon/{accountant}")
        spent = "–" if epsilon is None else f"{_rounded(epsilon)} ({accountant})"
        differs = [] if names[label(run)] == label(run) else [escaped(names[label(run)])]
        facts = (escaped(run.facts.get("guarantee", "–")), escaped(spent), escaped(_rounded(run.facts.get("delta", "–"))))
        best = max(_baselines(run).values(), default=None)
        beside = "–" if best is None else metric_in_words(_name(_metric(run)), best)
        side_by_side.append((code(label(run)), *differs, escaped(_accuracy(run)), beside, _cell(loss), *facts))
    what = ["what differs"] if side_by_side and len(side_by_side[0]) == 8 else []
    heads = ("run", *what, "held-out metric", "without learning", "held-out loss", "guarantee", "epsilon", "delta")

    differing, folders = _differing(runs), [escaped(label(run)) for run in runs]
    by_key = [(code(key), *(code(run.config.get(key, "–")) for run in runs)) for key in differing]
    if not differing:
        settings: Block = "None: the runs are replicates."
    elif len(differing) > _COLUMNS:
        settings = grid(("setting", *folders), by_key)
    else:
        # There is room for a row for each run.
        settings = grid(("run", *(line[0] for line in by_key)), list(zip(folders, *(line[1:] for line in by_key), strict=True)))
    sections = [
        Section("Results and privacy", [grid(heads, side_by_side)], "results"),
        Section("Curves", _curves(runs), "curves"),
        Section("Settings that differ", [settings], "settings"),
        Section("All numbers", [_results(runs, "all numbers of each run")], "numbers"),
    ]
    lead = [f"{escaped(f'Guarantee of each run by itself: {privacy(runs)}.')} {_MANY}", _PRIVATE]
    return Document(f"{len(runs)} runs side by side", lead, [one for one in sections if one.blocks])


def privacy(runs: Sequence[Run]) -> str:
    """Returns what the runs spend, in one line: their guarantees, the range of epsilon by their own accountant, unit and delta."""
    if not runs:
        return "nothing is spent"
    told = [", ".join(sorted({run.facts.get("guarantee", "unknown") for run in runs}))]
    for accountant in sorted({run.facts["accountant"] for run in runs if "accountant" in run.facts}):
        own = [run.facts.get(f"epsilon/{accountant}") for run in runs if run.facts.get("accountant") == accountant]
        bounds = [float(value) for value in own if value is not None]
        if bounds:
            least, most = f"{min(bounds):.3g}", f"{max(bounds):.3g}"
            told.append(f"ε {least if least == most else f'{least} to {most}'} ({accountant})")
    for key in ("unit", "delta"):
        values = sorted({run.facts[key] for run in runs if key in run.facts})
        told += [f"{key} {', '.join(values)}"] if values else []
    return "; ".join(told)


def label(run: Run) -> str:
    """Returns the name of a run's folder."""
    return f"{run.experiment}-{run.run}"


def _metric(run: Run) -> str | None:
    """Returns the key of the held-out metric that the run's task measures; `None` without one."""
    return next((name for name in run.finals if name.startswith("heldout/") and name in CURVES and name != "heldout/loss"), None)


def _accuracy(run: Run) -> str:
    rows = run.finals.get("heldout/rows")
    metric = _metric(run)
    return "–" if metric is None else metric_in_words(_name(metric), run.finals[metric], None if rows is None else int(rows))


def _name(metric: str | None) -> str:
    """Returns the task's name of a metric that is a key such as heldout/accuracy."""
    return (metric or "").partition("/")[2]


def _baselines(run: Run) -> dict[str, float]:
    return {name.removeprefix("baseline/"): value for name, value in run.finals.items() if name.startswith("baseline/")}


def _differing(runs: Sequence[Run]) -> list[str]:
    keys = sorted({key for run in runs for key in run.config})
    return [key for key in keys if len({run.config.get(key) for run in runs}) > 1]


def _by_difference(runs: Sequence[Run]) -> dict[str, str]:
    """Returns a name for each run: the settings that differ, with short keys, such as `epsilon=2, steps=100`.

    Runs of several experiments, of which too much differs, are named by their experiment and what differs within it, or by their folder.
    """
    if (names := _differences(runs)) is None:
        by_experiment = {run.experiment: [one for one in runs if one.experiment == run.experiment] for run in runs}
        alone = {label(of[0]): "" for of in by_experiment.values() if len(of) == 1}
        within = [_differences(of) for of in by_experiment.values() if len(of) > 1]
        if len(by_experiment) == 1 or None in within:
            return {label(run): label(run) for run in runs}
        said = {name: text for one in (alone, *filter(None, within)) for name, text in one.items()}
        names = {label(run): ", ".join(filter(None, (run.experiment, said[label(run)]))) for run in runs}
    return names


def _differences(runs: Sequence[Run]) -> dict[str, str] | None:
    """Returns the settings that differ by the folder of each run; `None` where they are long or the same."""
    differing = _differing(runs)
    ends = Counter(key.rpartition(".")[2] for key in differing)
    short = {key: end if ends[end := key.rpartition(".")[2]] == 1 else key for key in differing}
    said = [", ".join(f"{short[key]}={_rounded(run.config.get(key, '–'))}" for key in differing) for run in runs]
    if len({run.replicate for run in runs}) > 1:
        said = [", ".join(filter(None, (one, f"replicate={run.replicate}"))) for one, run in zip(said, runs, strict=True)]
    is_plain = len(set(said)) == len(said) and all(0 < len(one) <= 120 for one in said)
    return {label(run): one for run, one in zip(runs, said, strict=True)} if is_plain else None


def _curves(runs: Sequence[Run]) -> list[Block]:
    """Returns a picture for each metric with a line for each run, and one legend for all of them."""
    names = _by_difference(runs)
    by, series = ("run", tuple(names.values())) if len(runs) > 1 else ("", ())
    drawn, known = [], []
    for metric, words in CURVES.items():
        rows = [{"run": names[label(run)], "step": step, metric: value} for run in runs for step, value in run.curves.get(metric, ())]
        if not rows:
            continue
        # The largest baseline of the task's metric is a dotted line, unless runs have different ones.
        baselines = {max(_baselines(run).items(), key=lambda one: one[1], default=None) for run in runs if _metric(run) == metric}
        best = baselines.pop() if len(baselines) == 1 else None
        level, said = (None, "") if best is None else (best[1], f"; dotted: {BASELINES.get(best[0], best[0].replace('_', ' '))}")
        known.append(Table.from_rows(metric, rows))
        lines = Lines(table=metric, x="step", y=(metric,), by=by, series=series, y_label=metric, level=level)
        drawn.append(Picture(metric.replace("/", "_"), f"{words[0].upper()}{words[1:]}{said}.", (lines,)))
    if not drawn:
        return []
    return [Panels(pictures.draw(drawn, known), pictures.legend("legend", "The runs, by what differs.", series) if series else None)]


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else escaped(value)


def _rounded(text: str) -> str:
    """Returns a long number with three decimal places, or two digits if it is small, and any other text as it is."""
    try:
        value = float(text)
    except ValueError:
        return text
    return text if len(text) <= 6 or value.is_integer() else figure(value)


def _results(runs: Sequence[Run], summary: str = "") -> Block:
    metrics = sorted({key for run in runs for key in run.finals if not key.startswith("weights/")})
    epsilons = sorted({key for run in runs for key in run.facts if key.startswith("epsilon/")})
    facts = ["guarantee", *epsilons, "delta", "unit", "noise_multiplier", "seconds", "device", "commit"]
    lines = [(code(key), *(f"{run.finals[key]:.4g}" if key in run.finals else "–" for run in runs)) for key in metrics]
    for key in facts:
        told = (run.facts.get(key, "–") for run in runs)
        lines.append((escaped(key.replace("_", " ")), *(escaped(_rounded(one) if key in (*_NUMBERS, *epsilons) else one) for one in told)))
    heads = [escaped(label(run)) for run in runs] if len(runs) > 1 else ["value"]
    return grid(("", *heads), lines, summary)
