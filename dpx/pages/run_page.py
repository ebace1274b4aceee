"""The page of one run, and of several side by side: the statement as sentences, epsilon by step, curves, norms, results and the config.

Both belong below `private/`, since curves and results depend on the text without noise.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dpx.declaration import require
from dpx.pages import pictures
from dpx.pages.document import Block, Document, Figure, Section, code, escaped, grid
from dpx.picture import Lines, Picture
from dpx.report import collect
from dpx.report.rows import Run
from dpx.table import Table

# Metrics of one picture, with its caption; a metric that no run has is left out.
PICTURES = (
    ("learning", "What it learns: the task's held-out metric, held-out loss and training loss.",
     (*collect.HELDOUT, "train/loss")),
    ("signal", "Gradient-SNR, and the share of examples that are clipped.", ("grad/snr", "grad/clipped_fraction")),
    ("norms", "Norms of the noisy gradient, of an example's gradient and of all weight matrices.",
     ("grad/norm", "grad/example_norm", "weights/matrices")),
)  # fmt: skip
AS_STEPS_GO = "as_steps_go"


def read(folder: Path) -> Run:
    """Returns the finished run in `folder`. Raises `ConfigError` for a run that has not finished."""
    runs, left_out = collect.collect(folder.parent, (folder.name,))
    found = [run for run in runs if folder.name in (run.run, f"{run.experiment}-{run.run}")]
    reason = next((line.partition(": ")[2] for line in left_out if line.startswith(f"{folder.name}: ")), "is not a run that has finished")
    require(bool(found), f"run={folder}", reason, "Let it train to its end, or name another run")
    return found[0]


def document(run: Run, words: Sequence[str], tables: Sequence[Table]) -> Document:
    """Returns the page of a run; `words` and `tables` explain its claim (`dpx.job.explain`)."""
    drawn: list[Any] = _epsilon(tables)
    sections = [
        Section("What it guarantees", [_in_words(words), *drawn, *map(_grid, tables)], "guarantee"),
        Section("Curves", figures([run]), "curves"),
        Section("Results", [_results([run])], "results"),
        Section("Config", [grid(("key", "value"), [(code(key), code(value)) for key, value in sorted(run.config.items())])], "config"),
    ]
    return Document(f"Run {run.experiment}-{run.run}", [_PRIVATE], [one for one in sections if one.blocks])


def comparison(runs: Sequence[Run]) -> Document:
    """Returns the page of several runs: the settings that differ, results, what each spends, and their curves together."""
    names = [label(run) for run in runs]
    keys = sorted({key for run in runs for key in run.config})
    differing = [key for key in keys if len({run.config.get(key) for run in runs}) > 1]
    settings = [(code(key), *(code(run.config.get(key, "–")) for run in runs)) for key in differing]
    sections = [
        Section(
            "Settings that differ",
            [grid(("key", *map(escaped, names)), settings)] if settings else ["None: the runs are replicates."],
            "settings",
        ),
        Section("Results and privacy", [_results(runs)], "results"),
        Section("Curves", figures(runs), "curves"),
    ]
    # Not in the heads of tables, which a narrow screen hides: a page gives these names links.
    lead = [_PRIVATE, f"The runs: {', '.join(map(code, names))}."]
    return Document(f"{len(runs)} runs side by side", lead, [one for one in sections if one.blocks])


_PRIVATE = "This page depends on the protected text without noise: keep it below `private/`."


def _in_words(words: Sequence[str]) -> str:
    """Returns the lines of an explanation as a list: an indented line continues the one before, an indented item is below it."""
    lines: list[str] = []
    for word in words:
        if word.startswith("  ") and not word.startswith("  - ") and lines:
            lines[-1] += f" {escaped(word)}"
        else:
            lines.append(f"  - {escaped(word[4:])}" if word.startswith("  - ") else f"- {escaped(word)}")
    return "\n".join(lines)


def label(run: Run) -> str:
    """Returns the name of a run's folder."""
    return f"{run.experiment}-{run.run}"


def _by_difference(runs: Sequence[Run]) -> dict[str, str]:
    """Returns a name for each run in a legend: the settings that differ, such as `noise.epsilon=2`, or its folder's where they are long."""
    keys = sorted({key for run in runs for key in run.config})
    differing = [key for key in keys if len({run.config.get(key) for run in runs}) > 1]
    said = [" ".join(f"{key}={run.config.get(key, '–')}" for key in differing) for run in runs]
    is_plain = len(set(said)) == len(said) and all(0 < len(one) <= 40 for one in said)
    return {label(run): one if is_plain else label(run) for run, one in zip(runs, said, strict=True)}


def figures(runs: Sequence[Run]) -> list[Any]:
    """Returns the pictures of the runs' curves, a line for each run."""
    tables = {metric: list(_points(runs, metric)) for _, _, metrics in PICTURES for metric in metrics}
    known = [Table.from_rows(metric, rows) for metric, rows in tables.items() if rows]
    named = {table.name for table in known}
    by = "run" if len(runs) > 1 else ""
    panels = [(name, caption, [metric for metric in metrics if metric in named]) for name, caption, metrics in PICTURES]
    drawn = [
        Picture(name, caption, tuple(Lines(table=one, x="step", y=(one,), by=by, y_label=one) for one in metrics))
        for name, caption, metrics in panels
        if metrics
    ]
    return list(pictures.draw(drawn, known))


def _points(runs: Sequence[Run], metric: str) -> Iterator[dict[str, Any]]:
    names = _by_difference(runs)
    for run in runs:
        yield from ({"run": names[label(run)], "step": step, metric: value} for step, value in run.curves.get(metric, ()))


def _epsilon(tables: Sequence[Table]) -> list[Figure]:
    """Returns the picture of epsilon by step, by each accountant; none for a run without epsilon."""
    table = next((table for table in tables if table.name == AS_STEPS_GO), None)
    if table is None:
        return []
    accountants = [column for column in table.columns if column != "steps" and any(row[column] for row in table.as_json()["rows"])]
    lines = Lines(table=AS_STEPS_GO, x="steps", y=tuple(accountants), y_label="epsilon")
    return pictures.draw([Picture("epsilon", table.title.capitalize() + ".", (lines,))], [table]) if accountants else []


def _grid(table: Table) -> Block:
    rows = [tuple(map(_cell, row)) for row in table.rows]
    return grid(tuple(escaped(column.replace("_", " ")) for column in table.columns), rows, table.title or table.name)


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else escaped(value)


def _results(runs: Sequence[Run]) -> Block:
    metrics = sorted({key for run in runs for key in run.finals if not key.startswith("weights/")})
    facts = sorted({key for run in runs for key in run.facts if key.startswith("epsilon/")})
    facts = ["guarantee", *facts, "delta", "unit", "noise_multiplier", "seconds", "commit"]
    lines = [(code(key), *(f"{run.finals[key]:.4g}" if key in run.finals else "–" for run in runs)) for key in metrics]
    lines += [(escaped(key.replace("_", " ")), *(_cell(run.facts.get(key)) for run in runs)) for key in facts]
    return grid(("", *(escaped(label(run)) for run in runs)), lines)
