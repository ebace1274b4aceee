"""The page of McKenna et al. 2025, from results.csv, published.csv, measurements.csv and the tables of analyses."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpx.config import build, recipes
from dpx.papers.mckenna2025.report import evidence, said, trained
from dpx.papers.mckenna2025.report.items import COUNTS, ITEMS, TRAINS, Item, verdicts
from dpx.picture import Picture
from dpx.report import pictures, shape
from dpx.report.document import Block, Document, Figure, Grid, Items, Paragraph, Section
from dpx.report.published import Published
from dpx.report.rows import Run
from dpx.report.shape import Verdict
from dpx.table import Table

TITLE = "McKenna et al. 2025, “Scaling Laws for Differentially Private Language Models”: published beside ours"
# Rows of a table that a reader can take in; the whole of it is in the evidence.
SHOWN = 24
_HOW = {"text": "printed", "picture": "in a figure only", "computed": "worked out from its settings", "claim": "said in words"}


def document(runs: Sequence[Run], published: Sequence[Published], home: Path) -> Document:
    """`home` holds the evidence beside results.csv."""
    judged = verdicts(runs, home)
    sections = [
        Section("What must be said first", [Items(said.HONEST)], "first"),
        Section("Where the paper contradicts itself, or does not say", [Items(said.CONTRADICTIONS)], "contradictions"),
        Section("All thirty-two at a glance", [_glance(judged, home)], "glance"),
        *(_section(item, judged[item.number], runs, published, home) for item in ITEMS),
        Section("Every run", [_all_runs(runs)], "runs"),
    ]
    return Document(TITLE, _lead(list(judged.values()), runs), sections)


def _lead(judged: Sequence[Verdict], runs: Sequence[Run]) -> list[str]:
    count = {one: sum(verdict.state == one for verdict in judged) for one in (shape.PASS, shape.FAIL, shape.NOT_RUN)}
    finished = sum(trained.LOSS in run.finals for run in runs)
    return [
        f"Verdicts: {count['pass']} pass, {count['fail']} fail, {count['not run']} not run; {finished} trained runs. Made by "
        "`python -m dpx job=report report.paper=mckenna2025` from `results.csv`, `published.csv`, `measurements.csv` and `analyses/`.",
        "Three columns never mix: what the paper prints, ours at full scale (computed, or not run with its cost in hours of one H200), and "
        "what a laptop's grid shows, which is judged for order alone. What needs no training is judged at full scale.",
    ]


def _glance(judged: dict[str, Verdict], home: Path) -> Grid:
    rows = [
        (
            f"[{item.number}](#{item.number.lower()}) {item.title}",
            f"`{item.name}`",
            _full(item, home),
            judged[item.number].state,
        )
        for item in ITEMS
    ]
    return Grid(("item", "experiment", "ours, full scale", "verdict"), rows)


def _full(item: Item, home: Path) -> str:
    if item.kind == TRAINS:
        return f"not run ({item.hours:,.0f} H200 hours)" if item.hours >= 1 else "not run (minutes of one H200)"
    if item.kind == COUNTS:
        return "computed" if evidence.tables(home, item.name) else "not run (no cost)"
    return (
        "accounting computed; losses need the grid" if {"printed", "ratios"} & set(evidence.tables(home, item.name)) else "needs the grid"
    )


def _section(item: Item, verdict: Verdict, runs: Sequence[Run], published: Sequence[Published], home: Path) -> Section:
    blocks: list[Block] = [Paragraph(f"`{item.command}`" + (f". Passes if: {verdict.passes_if}." if verdict.passes_if else ""))]
    parts = [(part.claim, part.statistic, part.state) for part in verdict.parts]
    blocks.append(Grid(("claim", "what is found", "full scale" if item.kind == COUNTS else "laptop"), parts))
    by_name = evidence.tables(home, item.name)
    blocks += [*_figures(item, by_name), *(_table(table) for name, table in by_name.items() if name != "verdicts")]
    lines = [line for line in published if line.item == item.number]
    if lines:
        printed = [(line.quantity, f"{line.value} {line.unit}".strip() or "–", _HOW[line.mark], line.where, line.note) for line in lines]
        blocks.append(Grid(("quantity", "published", "how we know", "where", "note"), printed))
    own = [run for run in runs if run.experiment == f"laptop_{item.name}" and trained.LOSS in run.finals]
    if own:
        rows = [(f"`{run.point}`", str(run.replicate), f"{run.finals[trained.LOSS]:.3f}", run.facts.get("guarantee", "?")) for run in own]
        blocks.append(Grid(("point", "replicate", "held-out loss, nats", "guarantee"), rows, f"{len(own)} laptop runs"))
    return Section(f"{item.number}. {item.title}", blocks, item.number.lower())


def _table(table: Table) -> Grid:
    rows = [tuple(_cell(value) for value in row) for row in table.rows[:SHOWN]]
    more = f", {len(table.rows)} rows, the first {SHOWN}" if len(table.rows) > SHOWN else ""
    return Grid(tuple(name.replace("_", " ") for name in table.columns), rows, f"{table.title or table.name}{more}")


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "–", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _figures(item: Item, by_name: dict[str, Table]) -> list[Figure]:
    """Pictures of the analysis whose tables are there and have what they show."""
    if not by_name or item.kind == TRAINS:
        return []
    _, job = build(recipes.compose([f"+experiment={item.name}", *item.options]))
    declared: Any = job
    drawn: Sequence[Picture] = getattr(declared.analysis, "pictures", list)()
    kept = [Picture(one.name, one.caption, panels) for one in drawn if (panels := tuple(p for p in one.panels if _is_there(p, by_name)))]
    return pictures.draw(kept, list(by_name.values()))


def _is_there(panel: Any, by_name: dict[str, Table]) -> bool:
    rows = by_name[panel.table].as_json()["rows"] if panel.table in by_name else []
    where = getattr(panel, "where", None)
    return any(where is None or row[where[0]] == where[1] for row in rows)


def _all_runs(runs: Sequence[Run]) -> Block:
    rows = [
        (
            run.experiment,
            f"`{run.point}`",
            str(run.replicate),
            f"{run.finals[trained.LOSS]:.3f}",
            run.facts.get("seconds", "–"),
            f"`{run.run}`",
        )
        for run in runs
        if trained.LOSS in run.finals
    ]
    if not rows:
        return Paragraph("No training run is in results.csv.")
    return Grid(("experiment", "point", "replicate", "held-out loss", "seconds", "run"), rows, f"{len(rows)} training runs")
