"""The page of a paper, from paper.yaml and the evidence beside it: every item with its verdict, figures, published and own values."""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dpx.declaration import ConfigError, require
from dpx.pages import read_runs
from dpx.pages.analysis_tables import Table
from dpx.pages.page_document import SIGNS, Block, Document, Figure, Section, code, escaped, grid, items
from dpx.pages.read_runs import Run
from dpx_papers.report import analyses, figures, of_rows, privacy, rows, shape, stages
from dpx_papers.report.evidence import Evidence, cell, mean_of_all
from dpx_papers.report.paper import KINDS, Item, Paper
from dpx_papers.report.rows import MARKS, Published
from dpx_papers.report.rules import name, our_value
from dpx_papers.report.shape import BY_CODE, Verdict
from dpx_papers.report.sizes import FACT, FULL, LAPTOP, PREFIX, SIZES, SMALLER

# Rows of an analysis' table that the page shows; all of them are in `analyses/`.
SHOWN = 24
# Notes on the whole paper, by the first cell of notes.csv, and their headings.
_HEADINGS = {"first": "Read this first", "ours": "About our runs"}
_HEADINGS["contradictions"] = "Where the paper contradicts itself, or leaves a setting open"
_COLUMNS = (
    "Three columns are kept apart. **Published** is what the paper states, and how we know it: printed in its text, shown in a figure only "
    "(left blank, nothing was digitised), computed here from the paper's settings, or stated without a number. **Full scale** is the same "
    "experiment at the paper's size, its values beside the published ones, or its cost in hours of one H200 at half of 790 TFLOP/s. "
    "**Laptop** is a small model with other text, batches and steps: only order is judged, and its values say nothing about the paper's. A "
    "run belongs to an item by the name of its recipe: one of a full-scale recipe whose command made it smaller is judged apart, by order "
    "alone. In brackets: the 95 % interval of an accuracy for the held-out rows that it was measured on (Wilson), which replicates share; "
    "±: standard deviation of the n replicates."
)
_COUNTED = (
    "**A verdict** is that of the largest size that is judged. A claim passes or fails by a rule whose margins are declared in paper.yaml, "
    "in the paper's units; “match” and “unchanged” are tests of equivalence. What cannot be false, by what is compared, is marked as "
    "arithmetic and is not counted. Runs are the fewest replicates that a claim rests on: a verdict on one run says no more than that run."
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
    made = {
        PREFIX * (size == LAPTOP) + item.source: {one.name: one}
        for item in paper.items
        for size in item.sizes_of_rows
        if (one := of_rows.table(item, read.at(size))) is not None
    }
    return dataclasses.replace(read, tables={**read.tables, **made})


def verdicts(item: Item, found: Evidence) -> dict[str, Verdict]:
    """Returns every claim of an item, judged at each size (`evidence.SIZES`) that has runs or tables of it, by the rules that fit it."""
    judged = {}
    try:
        for size in SIZES:
            own = found.at(size)
            parts = tuple(part for rule in item.rules(size) for part in rule.judged(own, item.source))
            if any(part.state != shape.NOT_RUN for part in parts):
                judged[size] = Verdict(parts)
    except ConfigError as error:
        raise ConfigError(f"{found.home.name}.{item.number}: {error.value}", error.reason, error.fix) from error
    return judged


def verdict(item: Item, found: Evidence) -> Verdict:
    """Returns the verdict that counts: that of the first size with one, or every claim of the item as not run."""
    judged = verdicts(item, found)
    settled = [one for one in judged.values() if one.state != shape.NOT_RUN]
    if judged:
        return [*settled, *judged.values()][0]
    nothing = Evidence(found.home, published=found.published)
    return Verdict(tuple(part for rule in item.rules(item.own_size) for part in rule.judged(nothing, item.source)))


def document(paper: Paper, found: Evidence) -> Document:
    """Returns the page as data."""
    judged = {item.number: verdict(item, found) for item in paper.items}
    sections = [
        _how_to_read(paper, found),
        *(Section(heading, [items(found.notes[key])], key) for key, heading in _HEADINGS.items() if key in found.notes),
        Section(f"All {len(paper.items)} items at a glance", [_glance(paper, judged, found)], "glance"),
        *([Section("How the recipes read the paper", [_readings(paper)], "readings")] if paper.readings else []),
        *([Section("Where the paper's code differs from its text", _choices(paper), "choices")] if paper.choices else []),
        *(_section(paper, item, judged[item.number], found) for item in paper.items),
        Section("Every run", [_all_runs(paper, found)], "runs"),
    ]
    drawn = {block.name: block for section in sections for block in section.blocks if isinstance(block, Figure)}
    first = [drawn[name] for name in paper.first if name in drawn]
    return Document(f"{paper.title}: published beside ours", [_lead(paper, list(judged.values()), found)], sections, first)


def _lead(paper: Paper, judged: Sequence[Verdict], found: Evidence) -> str:
    count = {state: sum(one.state == state for one in judged) for state in (shape.PASS, shape.FAIL, shape.NOT_RUN, shape.ARITHMETIC)}
    trained = sum(_is_shown(run, paper) for run in found.runs)
    command = f"`python -m dpx job=report report.paper={found.home.name}`"
    states = ", ".join(f"{number} {state}" for state, number in count.items() if number or state != shape.ARITHMETIC)
    return f"Verdicts: {states}. Made by {command} from {trained} training runs and the tables in this folder."


def _how_to_read(paper: Paper, found: Evidence) -> Section:
    trained = [run for run in found.runs if _is_shown(run, paper)]
    commits, corpora = (sorted({run.facts[key] for run in trained if key in run.facts}) for key in ("commit", "corpus"))
    made = [f"Commits of the runs: {', '.join(map(code, commits))}."] if commits else []
    text = [f"Their text, with the checksum of the prepared rows: {'; '.join(map(escaped, corpora))}."] if corpora else []
    return Section(
        "How to read this page", [_COLUMNS, _COUNTED, *made, *text], "reading", "columns, sizes, verdicts, and what the runs are of"
    )


def _readings(paper: Paper) -> Block:
    lines = [(", ".join(map(code, one.recipes)), *map(escaped, (one.setting, one.paper, one.taken, one.why))) for one in paper.readings]
    return grid(("recipes", "setting", "the paper says", "taken", "why"), lines)


# The sign of each choice, on every number that it changes.
_SIGNS_OF_CHOICES = "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖ"


def _choices(paper: Paper) -> list[Block]:
    """Returns what the signs on the numbers mean."""
    words = (
        "A number with a sign would be another one by the paper's published code. The word after the signs says by which of the two it is."
    )
    lines = [
        (sign, escaped(one.name), escaped(one.text), escaped(one.code), code(one.options),
         ", ".join(item.number for item in paper.items if one.is_of(item.experiment)))
        for sign, one in zip(_SIGNS_OF_CHOICES, paper.choices, strict=False)
    ]  # fmt: skip
    return [words, grid(("sign", "setting", "the text", "the published code", "taken with", "items"), lines)]


def _marks(paper: Paper, item: Item, at: Evidence) -> str:
    """Returns the signs of the choices that change an item's numbers, and by which side they are; empty if none does."""
    signs = [sign for sign, one in zip(_SIGNS_OF_CHOICES, paper.choices, strict=False) if one.is_of(item.experiment)]
    notes = [note for table in at.analysis(item.source).values() for note in table.notes]
    side = "code" if any(note.startswith(BY_CODE) for note in notes) else "text"
    return f"{''.join(signs)} {side}" if signs else ""


def _is_shown(run: Run, paper: Paper) -> bool:
    """Returns whether a run has finished training, alone or as a whole chain."""
    return paper.headline in run.finals or read_runs.is_of_chain(run)


def _glance(paper: Paper, judged: dict[str, Verdict], found: Evidence) -> Block:
    lines = []
    for item in paper.items:
        at = verdicts(item, found)
        smaller = f"; made smaller: {at[SMALLER].state}" if SMALLER in at else ""
        full = at[FULL].state if FULL in at else _full_scale(item, found) + smaller
        sizes = (full, at[LAPTOP].state if LAPTOP in at else "–")
        runs = in_runs(judged[item.number].repeats)
        title = f"[{item.number}](#{item.number.lower()}) {item.title}"
        lines.append((title, f"`{item.experiment}`", _printed(item, found), *sizes, runs, judged[item.number].state))
    return grid(("item", "experiment", "published in the text", FULL, LAPTOP, "runs", "verdict"), lines)


def in_runs(repeats: int) -> str:
    """Returns on how many replicates a verdict rests, as text."""
    return "–" if not repeats else "one run" if repeats == 1 else f"{repeats} runs"


def _printed(item: Item, found: Evidence) -> str:
    """Returns the numbers that the paper's text gives, or how many there are."""
    lines = [line for line in found.published if line.item == item.number]
    printed = [f"{line.value} {line.unit}".strip() for line in lines if line.value and line.mark == "text" and line.metric != "setting"]
    if len(printed) > 3:
        return f"{len(printed)} numbers"
    return ", ".join(printed) or (MARKS["claim"] if any(line.mark == "claim" for line in lines) else "–")


def _full_scale(item: Item, found: Evidence) -> str:
    """Returns what there is of an item at full scale that has no verdict there."""
    if any(run.experiment == item.experiment for run in found.at(FULL).runs):
        return "ran: values below"
    if item.kind == "trains":
        return not_run(item.hours)
    is_there = bool(found.at(FULL).analysis(item.experiment))
    return KINDS[item.kind] if is_there or item.kind in ("grid", "accounting and grid", "planned", "rows") else "not run (no cost)"


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
    at = {size: found.at(size) for size in SIZES}
    own = {size: [run for run in at[size].runs if run.experiment == item.experiment and _is_shown(run, paper)] for size in SIZES}
    tables = {size: _shown_tables(item, at[size]) for size in SIZES}
    marks = {size: _marks(paper, item, at[size]) for size in SIZES}
    at_sizes = verdicts(item, found)
    blocks: list[Block] = [
        _commands(item) + f" Passes if: {item.passes}." * bool(item.passes),
        _claims(item, judged, at_sizes, marks),
        *found.notes.get(item.number, ()),
        *_readings_of(paper, item),
        *figures.of_item(paper, item, at, tables),
        *(
            _table(table, size if len(tables[FULL]) and size != FULL else "", marks[size])
            for size in SIZES
            for table in tables[size].values()
        ),
    ]
    columns = ("quantity", "published", "how we know", "where", "ours, full scale", "note")
    blocks += [grid(columns, [_published(line, item, at[FULL], marks[FULL]) for line in lines])] if lines else []
    for size, runs in own.items():
        alone, whole = ([run for run in runs if read_runs.is_of_chain(run) is chained] for chained in (False, True))
        told = sorted({run.facts[FACT] for run in runs if FACT in run.facts})
        blocks += [f"Runs made smaller by their command: {escaped('; '.join(told))}."] if told else []
        blocks += [*([_points(alone, paper, size)] if alone else []), *(stages.tables(whole) if whole else [])]
        blocks += _norms(runs, item.norms)
    blocks += _privacy(item, own)
    return Section(f"{item.number}. {item.title}", blocks, item.number.lower(), _in_short(judged, list(at_sizes), blocks))


def _in_short(judged: Verdict, sizes: Sequence[str], blocks: Sequence[Block]) -> str:
    """Returns the verdict of an item and how much there is below it, as text."""
    counts = {"claim": len(judged.parts), "figure": sum(isinstance(block, Figure) for block in blocks)}
    words = ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items() if count)
    return f"{SIGNS.get(judged.state, judged.state)}{f', {sizes[0]}' if sizes else ''}: {words}"


def _readings_of(paper: Paper, item: Item) -> list[Block]:
    """Returns the settings of an item's recipe that are readings, which the table above the items explains."""
    own = [one.setting for one in paper.readings if one.is_of(item.experiment)]
    return [f"[Readings](#readings) of the recipe: {escaped('; '.join(own))}."] if own else []


def _commands(item: Item) -> str:
    """Returns the commands that make the evidence of an item."""
    if item.kind in ("planned", "rows"):
        return "No recipe yet." if item.kind == "planned" else f"Made with this page from `{item.rows}`."
    commands = dict.fromkeys((item.overrides_at(FULL), item.overrides_at(LAPTOP)))
    shown = [f"`{shlex.join(('python', '-m', 'dpx', *one))}`" for one in commands]
    also = f", alone and with `{shlex.join(item.also)}`" if item.also else ""
    return f"{shown[0]}{also}." if len(shown) == 1 else f"Full scale: {shown[0]}{also}. Laptop: {shown[1]}."


def _claims(item: Item, judged: Verdict, at: Mapping[str, Verdict], marks: Mapping[str, str]) -> Block:
    shown = at or {item.own_size: judged}
    size = {FULL: "from rows"} if item.kind == "rows" else {}
    lines = [
        (
            escaped(part.claim),
            _marked(escaped(part.statistic), marks[name]),
            escaped(part.says) or "–",
            size.get(name, name),
            in_runs(part.repeats),
            part.state,
        )
        for name, one in shown.items()
        for part in one.parts
    ]
    return grid(("claim", "what is found", "in the paper", "size", "runs", "verdict"), lines)


def _marked(number: str, marks: str) -> str:
    """Returns a number with the signs of its choices, which lead to what they mean; any other text is returned as it is."""
    return f"{number} [{marks}](#choices)" if marks and any(one.isdigit() for one in number) else number


def _shown_tables(item: Item, at: Evidence) -> dict[str, Table]:
    """Returns the tables of an item that are shown: its verdicts are with the claims, and a benchmark in place of a recipe that trains is
    judged alone."""
    left_out = {"verdicts"} | ({"benchmark"} if item.kind == "trains" else set())
    return {name: table for name, table in at.analysis(item.source).items() if name not in left_out}


def _table(table: Table, size: str, marks: str) -> Block:
    more = f", {len(table.rows)} rows, the first {SHOWN}" if len(table.rows) > SHOWN else ""
    cells = [tuple(map(_cell, row)) for row in table.rows[:SHOWN]]
    return grid(
        tuple(escaped(column.replace("_", " ")) for column in table.columns),
        cells,
        f"{table.title or table.name}{f', {size}' * bool(size)}{more}{f', {marks}' * bool(marks)}",
    )


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "–", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else escaped(value)


def _published(line: Published, item: Item, full: Evidence, marks: str) -> tuple[str, ...]:
    value = f"{int(line.value):,}" if line.value.isdigit() else line.value
    own = ours(line, item, full)
    how = (MARKS[line.mark], line.where, own if our_value(line, full) is None else _marked(own, marks), line.note)
    return (line.quantity, f"{value} {line.unit}".strip() if line.value else "–", *how)


def ours(line: Published, item: Item, full: Evidence) -> str:
    """Returns our value at full scale, or the text that it did not run and what it would cost."""
    value = our_value(line, full)
    if value is not None:
        return f"{value:,.0f}" if value >= 1e5 else f"{value:.4g} {line.unit}".strip()
    if line.metric == "setting":
        return "set in the recipe"
    if item.kind == "trains":
        return not_run(line.h200_hours, line.flops)
    return "see the tables above" if full.analysis(item.experiment) else KINDS[item.kind]


def _points(runs: Sequence[Run], paper: Paper, size: str) -> Block:
    lines = []
    for point in dict.fromkeys(run.point for run in runs):
        own = [run for run in runs if run.point == point]
        lines.append((code(point), *(_mean(own, key) for key in paper.columns), _guarantee(own)))
    return grid(("point", *paper.columns.values(), "guarantee"), lines, f"{size} runs by point: {len(runs)} in all")


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


def _privacy(item: Item, own: Mapping[str, Sequence[Run]]) -> list[Block]:
    """Returns what the statements of the runs say."""
    ran = {size: privacy.lines(runs) for size, runs in own.items() if runs}
    if found := [f"Privacy, {size}: {line}" for size, lines in ran.items() for line in lines]:
        # One line is shown, several (a sweep over epsilon, for example) are folded.
        return [items(found, f"privacy of these runs, {len(found)} kinds" if len(found) > 1 else "")]
    if item.kind == "trains":
        return ["Privacy: no finished run of this item is here, so there is no ε to state."]
    return ["Privacy: nothing is trained for this item, so no ε is spent."] if item.kind in ("computed", "rows") else []


def _all_runs(paper: Paper, found: Evidence) -> Block:
    lines = [
        (escaped(run.experiment), code(run.point), str(run.replicate),
         "a chain" if read_runs.is_of_chain(run) else _mean([run], paper.headline),
         escaped(" on ".join(run.facts[key] for key in ("seconds", "device") if key in run.facts) or "–"),
         code(run.facts.get("commit", "unknown")), code(run.run))
        for run in found.runs
        if _is_shown(run, paper)
    ]  # fmt: skip
    columns = ("experiment", "point", "replicate", paper.columns.get(paper.headline, paper.headline), "seconds", "commit", "run")
    return grid(columns, lines, f"{len(lines)} training runs") if lines else "results.csv holds no training run."
