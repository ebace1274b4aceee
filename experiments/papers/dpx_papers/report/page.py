"""The page of a paper, from paper.yaml and the evidence beside it: every item with its verdict, figures, published and own values."""

import dataclasses
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dpx.config import build, recipes
from dpx.declaration import ConfigError, require
from dpx.pages import pictures, read_runs
from dpx.pages.analysis_tables import Lines, Picture, Table
from dpx.pages.page_document import Block, Document, Figure, Section, code, escaped, grid, items
from dpx.pages.read_runs import Run
from dpx_papers.report import analyses, of_rows, privacy, rows, shape, stages
from dpx_papers.report.evidence import Evidence, cell, drawn_tables, mean_of_all
from dpx_papers.report.paper import KINDS, Item, Paper
from dpx_papers.report.rows import MARKS, Published
from dpx_papers.report.rules import name, our_value
from dpx_papers.report.shape import Verdict

# Rows of an analysis' table that the page shows; all of them are in `analyses/`.
SHOWN = 24
# Notes on the whole paper, by the first cell of notes.csv, and their headings.
_HEADINGS = {"first": "Read this first", "ours": "About our runs"}
_HEADINGS["contradictions"] = "Where the paper contradicts itself, or leaves a setting open"
_COLUMNS = (
    "Three columns are kept apart. **Published** is what the paper states, and how we know it: printed in its text, shown in a figure only "
    "(left blank, nothing was digitised), computed here from the paper's settings, or stated without a number. **Ours, full scale** is the "
    "same experiment at the paper's size, or its cost in hours of one H200 at half of 790 TFLOP/s. **Laptop** is a small model with other "
    "text, batches and steps: only order is judged, and its values say nothing about the paper's. In brackets: the 95 % interval of "
    "an accuracy for the held-out rows that it was measured on (Wilson), which replicates share; ±: standard deviation of the n "
    "replicates."
)


def evidence(paper: Paper, home: Path) -> Evidence:
    """Everything that the page of `home` is made from. Raises `ConfigError` for a file with other columns or a note on an unknown item."""
    notes: dict[str, list[str]] = {}
    known = {*_HEADINGS, *(item.number for item in paper.items)}
    for _, line in rows.lines(home / "notes.csv", ("item", "note")):
        fix = f"Give the number of an item, or {', '.join(_HEADINGS)}"
        require(line["item"] in known, f"notes.csv: {line['item']}", "no item of paper.yaml has that number", fix)
        notes.setdefault(line["item"], []).append(line["note"])
    read = Evidence(home, rows.read(home / "results.csv"), rows.read_published(home / "published.csv"), analyses.read(home), notes)
    made = {item.source: {one.name: one} for item in paper.items if item.rows and (one := of_rows.table(item, read)) is not None}
    return dataclasses.replace(read, tables={**read.tables, **made})


def verdict(item: Item, found: Evidence) -> Verdict:
    """Returns every claim of an item, judged."""
    try:
        return Verdict(tuple(part for rule in item.verdict for part in rule.parts(found, item.source)))
    except ConfigError as error:
        raise ConfigError(f"{found.home.name}.{item.number}: {error.value}", error.reason, error.fix) from error


def document(paper: Paper, found: Evidence) -> Document:
    """Returns the page as data."""
    judged = {item.number: verdict(item, found) for item in paper.items}
    sections = [
        *(Section(heading, [items(found.notes[key])], key) for key, heading in _HEADINGS.items() if key in found.notes),
        Section(f"All {len(paper.items)} items at a glance", [_glance(paper, judged, found)], "glance"),
        *(_section(paper, item, judged[item.number], found) for item in paper.items),
        Section("Every run", [_all_runs(paper, found)], "runs"),
    ]
    return Document(f"{paper.title}: published beside ours", _lead(paper, list(judged.values()), found), sections)


def _lead(paper: Paper, judged: Sequence[Verdict], found: Evidence) -> list[str]:
    count = {state: sum(one.state == state for one in judged) for state in (shape.PASS, shape.FAIL, shape.NOT_RUN)}
    trained = [run for run in found.runs if _is_shown(run, paper)]
    commits, corpora = (sorted({run.facts[key] for run in trained if key in run.facts}) for key in ("commit", "corpus"))
    made = f" Commits of the runs: {', '.join(map(code, commits))}." if commits else ""
    text = f" Their text, with the checksum of the prepared rows: {'; '.join(map(escaped, corpora))}." if corpora else ""
    command = f"`python -m dpx job=report report.paper={found.home.name}`"
    states = ", ".join(f"{number} {state}" for state, number in count.items())
    return [f"Verdicts: {states}. Made by {command} from {len(trained)} training runs and the tables in this folder.{made}{text}", _COLUMNS]


def _is_shown(run: Run, paper: Paper) -> bool:
    """Returns whether a run has finished training, alone or as a whole chain."""
    return paper.headline in run.finals or read_runs.is_of_chain(run)


def _glance(paper: Paper, judged: dict[str, Verdict], found: Evidence) -> Block:
    lines = [
        (f"[{item.number}](#{item.number.lower()}) {item.title}", f"`{item.experiment}`", _printed(item, found),
         _full_scale(item, paper, found), judged[item.number].state)
        for item in paper.items
    ]  # fmt: skip
    return grid(("item", "experiment", "published in the text", "ours, full scale", "verdict"), lines)


def _printed(item: Item, found: Evidence) -> str:
    """Returns the numbers that the paper's text gives, or how many there are."""
    lines = [line for line in found.published if line.item == item.number]
    printed = [f"{line.value} {line.unit}".strip() for line in lines if line.value and line.mark == "text" and line.metric != "setting"]
    if len(printed) > 3:
        return f"{len(printed)} numbers"
    return ", ".join(printed) or (MARKS["claim"] if any(line.mark == "claim" for line in lines) else "–")


def _full_scale(item: Item, paper: Paper, found: Evidence) -> str:
    if any(run.experiment == item.experiment and _is_shown(run, paper) for run in found.runs):
        return "ran: values below"
    if item.kind == "trains":
        return not_run(item.hours)
    is_there = bool(found.analysis(item.experiment))
    return KINDS[item.kind] if is_there or item.kind in ("grid", "planned", "rows") else "not run (no cost)"


def not_run(hours: int | float | str, flops: str = "") -> str:
    """Returns `not run` and the cost of running it; `hours` that cannot be read as a number are a range."""
    try:
        number = float(hours or 0)
    except ValueError:
        return f"not run ({hours} H200 hours)"
    words = "minutes of one H200" if number < 1 else f"{number:,.0f} H200 hour{'s' * (number != 1)}"
    return f"not run ({words}{f', {flops} FLOPs' if flops else ''})" if number else "not run (no cost)"


def _section(paper: Paper, item: Item, judged: Verdict, found: Evidence) -> Section:
    lines = [line for line in found.published if line.item == item.number]
    own = [run for run in found.runs if run.experiment == f"laptop_{item.experiment}" and _is_shown(run, paper)]
    # A benchmark in place of a recipe that trains is judged alone; tables under the recipe's own name are shown.
    tables = found.tables.get(item.experiment, {}) if item.kind == "trains" else found.analysis(item.source)
    command = "No recipe yet" if item.kind == "planned" else f"`{shlex.join(('python', '-m', 'dpx', *item.overrides))}`"
    command = f"Made with this page from `{item.rows}`" if item.kind == "rows" else command
    scale = "full scale" if item.kind == "computed" else "from rows" if item.kind == "rows" else "laptop"
    blocks: list[Block] = [
        f"{command}." + f" Passes if: {item.passes}." * bool(item.passes),
        grid(("claim", "what is found", scale), [(part.claim, escaped(part.statistic), part.state) for part in judged.parts]),
        *found.notes.get(item.number, ()),
        *_figures(paper, item, found, tables),
        *(_table(table) for table in tables.values() if table.name != "verdicts"),
    ]
    columns = ("quantity", "published", "how we know", "where", "ours, full scale", "note")
    blocks += [grid(columns, [_published(line, item, found) for line in lines])] if lines else []
    alone, whole = ([run for run in own if read_runs.is_of_chain(run) is chained] for chained in (False, True))
    blocks += [*([_points(alone, paper)] if alone else []), *(stages.tables(whole) if whole else [])]
    blocks += [*_norms(own, item.norms), *_privacy(item, own)]
    return Section(f"{item.number}. {item.title}", blocks, item.number.lower())


def _figures(paper: Paper, item: Item, found: Evidence, tables: analyses.Tables) -> list[Figure]:
    """Figures that the item and its analysis declare; panels without data are left out."""
    drawn = [Picture(one.name, one.caption, tuple(_completed(panel, paper, found) for panel in one.panels)) for one in item.figures]
    if tables and item.kind != "rows":
        declared: Any = build(recipes.compose(item.overrides))[1]
        drawn += declared.analysis.pictures(list(tables.values())) if hasattr(getattr(declared, "analysis", None), "pictures") else []
    known = {**drawn_tables(found, item.experiment), **tables} if drawn else {}
    kept = [Picture(one.name, one.caption, tuple(panel for panel in one.panels if _has_data(panel, known))) for one in drawn]
    return pictures.draw([picture for picture in kept if picture.panels], list(known.values()))


def _completed(panel: Lines, paper: Paper, found: Evidence) -> Lines:
    """Returns the panel with a title, a label, and its dotted line at the mean of the runs of the experiment that `level` names."""
    (key, *_), level, is_ours = (*panel.y, *panel.marks, ""), panel.level, panel.table in ("finals", "curves")
    if isinstance(level, str):
        values = found.laptop(level).get(key, pd.Series(dtype=object)).dropna()
        level = (100 if shape.is_share(key) else 1) * statistics.fmean(values) if len(values) else None
    label = panel.y_label or paper.columns.get(key, key) + ", %" * shape.is_share(key)
    title = panel.title or "laptop: order only" * is_ours + "published, full scale" * (panel.table == "published")
    return dataclasses.replace(panel, level=level, y_label=label, title=title, runs="run" if is_ours and panel.y else panel.runs)


def _has_data(panel: Any, tables: analyses.Tables) -> bool:
    lines = tables[panel.table].as_json()["rows"] if panel.table in tables else []
    if not isinstance(panel, Lines):
        return bool(lines)
    where = panel.where
    return any({*panel.y, *panel.marks} <= set(line) and (where is None or line[where[0]] == where[1]) for line in lines)


def _table(table: Table) -> Block:
    more = f", {len(table.rows)} rows, the first {SHOWN}" if len(table.rows) > SHOWN else ""
    cells = [tuple(map(_cell, row)) for row in table.rows[:SHOWN]]
    return grid(tuple(escaped(column.replace("_", " ")) for column in table.columns), cells, f"{table.title or table.name}{more}")


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "–", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else escaped(value)


def _published(line: Published, item: Item, found: Evidence) -> tuple[str, ...]:
    value = f"{int(line.value):,}" if line.value.isdigit() else line.value
    how = (MARKS[line.mark], line.where, ours(line, item, found), line.note)
    return (line.quantity, f"{value} {line.unit}".strip() if line.value else "–", *how)


def ours(line: Published, item: Item, found: Evidence) -> str:
    """Returns our value at full scale, or the text that it did not run and what it would cost."""
    value = our_value(line, found)
    if value is not None:
        return f"{value:,.0f}" if value >= 1e5 else f"{value:.4g} {line.unit}".strip()
    if line.metric == "setting":
        return "set in the recipe"
    if item.kind == "trains":
        return not_run(line.h200_hours, line.flops)
    return "see the tables above" if item.kind == "computed" and found.analysis(item.experiment) else KINDS[item.kind]


def _points(runs: Sequence[Run], paper: Paper) -> Block:
    lines = []
    for point in dict.fromkeys(run.point for run in runs):
        own = [run for run in runs if run.point == point]
        lines.append((code(point), *(_mean(own, key) for key in paper.columns), _guarantee(own)))
    return grid(("point", *paper.columns.values(), "guarantee"), lines, f"laptop runs by point: {len(runs)} in all")


def _mean(runs: Sequence[Run], key: str) -> str:
    values = [value for run in runs if (value := cell(run, key)) is not None]
    return shape.of_rows(values, key, runs[0].finals.get("heldout/rows")) if values else "–"


def _guarantee(runs: Sequence[Run]) -> str:
    names = ", ".join(sorted({run.facts.get("guarantee", "?") for run in runs}))
    bounds = [max(known.values()) for run in runs if (known := privacy.epsilons(run.facts))]
    return escaped(names) + (f", ε = {max(bounds):.4g}" if bounds else "")


def _norms(runs: Sequence[Run], knob: str) -> list[Block]:
    """Returns the norm of every weight matrix, end over start, by the value of `knob`: means over replicates."""
    matrices = sorted({metric for run in runs for metric in run.finals if metric.startswith("weights/") and metric in run.curves})
    if not knob or not matrices:
        return []
    growth: Any = pd.DataFrame({metric: [cell(run, f"{metric}@last/first") for run in runs] for metric in matrices})
    means = growth.groupby([cell(run, knob) for run in runs]).agg(mean_of_all)
    values = list(means.index)
    lines = [(code(metric.removeprefix("weights/")), *(f"{ratio:.3g}" for ratio in means[metric])) for metric in matrices]
    return [
        grid(("matrix", *(escaped(f"{knob} = {name(value)}") for value in values)), lines, "norm of every weight matrix, end over start")
    ]


def _privacy(item: Item, runs: Sequence[Run]) -> list[Block]:
    if found := [f"Privacy: {line}" for line in privacy.lines(runs)]:
        # One line is shown, several (a sweep over epsilon, for example) are folded.
        return [items(found, f"privacy of these runs, {len(found)} kinds" if len(found) > 1 else "")]
    return ["Privacy: nothing was trained for this item, so no ε is spent."] if item.kind in ("trains", "computed", "rows") else []


def _all_runs(paper: Paper, found: Evidence) -> Block:
    lines = [
        (escaped(run.experiment), code(run.point), str(run.replicate),
         "a chain" if read_runs.is_of_chain(run) else _mean([run], paper.headline),
         escaped(run.facts.get("seconds", "–")), code(run.facts.get("commit", "unknown")), code(run.run))
        for run in found.runs
        if _is_shown(run, paper)
    ]  # fmt: skip
    columns = ("experiment", "point", "replicate", paper.columns.get(paper.headline, paper.headline), "seconds", "commit", "run")
    return grid(columns, lines, f"{len(lines)} training runs") if lines else "results.csv holds no training run."
