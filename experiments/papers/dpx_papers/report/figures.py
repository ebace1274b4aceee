"""The figures that an item and its analysis declare, on its page, with a panel for each size that ran."""

import dataclasses
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dpx.config import build, recipes
from dpx.pages import pictures
from dpx.pages.analysis_tables import Arrows, Lines, Panel, Picture, Table
from dpx.pages.page_document import Figure, code
from dpx_papers.analysis import EACH
from dpx_papers.report import of_rows, shape
from dpx_papers.report.analyses import Tables
from dpx_papers.report.evidence import Evidence, drawn_tables
from dpx_papers.report.paper import Figure as ItemFigure
from dpx_papers.report.paper import Item, Paper
from dpx_papers.report.sizes import FULL, LAPTOP, PREFIX, SIZES, SMALLER

_TITLES = {FULL: "ours, full scale", SMALLER: "full-scale recipe, made smaller", LAPTOP: "laptop: order only"}
_ORDER_ONLY = " What is not printed is of a laptop: order only."


def of_item(paper: Paper, item: Item, at: Mapping[str, Evidence], tables: Mapping[str, Tables]) -> list[Figure]:
    """Returns the figures of an item, from its runs and the `tables` of its analysis at each size; panels without data are left out."""
    known = {size: {**drawn_tables(own, item.experiment), **own.analysis(item.source)} for size, own in at.items()}
    drawn: list[Picture] = []
    for one in item.figures:
        made = {size: _made(one, own) for size, own in known.items()}
        drawn.append(Picture(one.name, one.caption, _panels(one, paper, at, made), one.columns))
        known = {size: {**known[size], **{_of(one, name): table for name, table in own.items()}} for size, own in made.items()}
    ran = [size for size in SIZES if tables[size]]
    for size in ran if item.kind != "rows" else ():
        # Of two sizes of an analysis, the first has the figure's name.
        suffix = "" if size == ran[0] else f"-{size}"
        drawn += [
            Picture(
                one.name + suffix,
                f"{one.caption}{_ORDER_ONLY * (size == LAPTOP)}",
                tuple(_at(panel, size) for panel in one.panels),
                one.columns,
            )
            for one in _declared(item, size, list(tables[size].values()))
        ]
    named = {_name(size, name): dataclasses.replace(table, name=_name(size, name)) for size in SIZES for name, table in known[size].items()}
    kept = [dataclasses.replace(one, panels=tuple(panel for panel in one.panels if _has_data(panel, named))) for one in drawn]
    shown = [picture for picture in kept if picture.panels]
    told = [_made_by(item, at, picture) for picture in shown]
    return [dataclasses.replace(one, made=words) for one, words in zip(pictures.draw(shown, list(named.values())), told, strict=True)]


def _made_by(item: Item, at: Mapping[str, Evidence], picture: Picture) -> str:
    """Returns, as Markdown, where a figure belongs, the commands that make what it shows, and links to its rows."""
    named = dict.fromkeys(tuple(panel.table.split(": ", 1)) for panel in picture.panels)
    sizes = dict.fromkeys(size for size, table in named if table.partition(" of ")[0] != "published")
    commands = dict.fromkeys(shlex.join(("python", "-m", "dpx", *item.overrides_at(size))) for size in sizes if item.kind != "rows")
    files = dict.fromkeys(name for size, table in named for name in _files(item, at[size].home, size, table.partition(" of ")[0]))
    parts = [f"[{item.number}](#{item.number.lower()})", ", ".join(map(code, commands))]
    rows = ", ".join(f"[{name}]({name})" for name in files)
    return "; ".join(filter(None, (*parts, f"rows: {rows}" if rows else ""))) + "."


def _files(item: Item, home: Path, size: str, table: str) -> list[str]:
    """Returns the files, beside the page, that hold the rows of a table."""
    if table in ("finals", "curves"):
        return ["results.csv"]
    if table in ("published", "rows"):
        return ["published.csv" if table == "published" or not item.rows.endswith(".csv") else item.rows]
    name = f"{PREFIX * (size == LAPTOP)}{item.experiment}"
    return [f"analyses/{path.name}" for path in sorted((home / "analyses").glob("*.json")) if re.fullmatch(rf"{name}(-\w+)?", path.stem)]


def _made(figure: ItemFigure, tables: Tables) -> Tables:
    """Returns the tables that the panels of a figure name, as its function makes them."""
    named = {panel.table for panel in figure.panels} & tables.keys()
    if not figure.function:
        return {name: tables[name] for name in named}
    return {name: of_rows.applied(f"{figure.name}.function={figure.function}", figure.function, tables[name]) for name in named}


def _of(figure: ItemFigure, table: str) -> str:
    return f"{table} of {figure.name}" if figure.function else table


def _panels(figure: ItemFigure, paper: Paper, at: Mapping[str, Evidence], made: Mapping[str, Tables]) -> tuple[Panel, ...]:
    """Returns the panels of a figure at each size that has their table; what is published is drawn once."""
    found: list[Panel] = []
    for panel in figure.panels:
        sizes = [FULL] if panel.table == "published" else [size for size in SIZES if panel.table in made[size]]
        for size in sizes:
            rows = made[size][panel.table].as_json()["rows"] if panel.table in made[size] else []
            completed = (_completed(one, paper, at[size], size, bool(rows) and "run" in rows[0]) for one in _each(panel, rows))
            found += [_at(dataclasses.replace(one, table=_of(figure, panel.table)), size) for one in completed]
    return tuple(found)


def _each(panel: Panel, rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Returns the panels that a panel stands for, with the value of each in its title."""
    where = getattr(panel, "where", {})
    column = next((name for name, value in where.items() if value == EACH), None)
    if column is None:
        return [panel]
    values = pictures.in_order([row[column] for row in rows if row.get(column) is not None])
    title = panel.title or f"{column} = {{value}}"
    return [dataclasses.replace(panel, where={**where, column: value}, title=title.format(value=value)) for value in values]


def _declared(item: Item, size: str, tables: list[Table]) -> list[Picture]:
    """Returns the pictures that the item's analysis declares of its tables."""
    job: Any = build(recipes.compose(list(item.overrides_at(size))))[1]
    analysis: Any = getattr(job, "analysis", None)
    return analysis.pictures(tables) if hasattr(analysis, "pictures") else []


def _name(size: str, table: str) -> str:
    return f"{size}: {table}"


def _at(panel: Any, size: str) -> Any:
    return dataclasses.replace(panel, table=_name(size, panel.table))


def _completed(panel: Panel, paper: Paper, own: Evidence, size: str, has_runs: bool) -> Panel:
    """Returns the panel of the tables of one size, with a title, a label, and its dotted line at the mean of the runs of the experiment
    that `level` names; rows with the name of their run are replicates."""
    is_ours = panel.table in ("finals", "curves", "benchmark")
    told = _TITLES[size] if is_ours else "published, full scale" if panel.table == "published" else ""
    title = "; ".join(filter(None, (told, panel.title)))
    if not isinstance(panel, Lines):
        return dataclasses.replace(panel, title=title)
    (key, *_), level = (*panel.y, *panel.marks, ""), panel.level
    if isinstance(level, str):
        values = own.trained(level).get(key, pd.Series(dtype=object)).dropna()
        level = (100 if shape.is_share(key) else 1) * statistics.fmean(values) if len(values) else None
    label = panel.y_label or paper.columns.get(key, key) + ", %" * shape.is_share(key)
    runs = "run" if has_runs and panel.y and not panel.runs else panel.runs
    return dataclasses.replace(panel, level=level, y_label=label, title=title, runs=runs)


def _has_data(panel: Any, tables: Tables) -> bool:
    lines = tables[panel.table].as_json()["rows"] if panel.table in tables else []
    if isinstance(panel, Arrows):
        return bool(lines)
    wanted = {*panel.y, *panel.marks} if isinstance(panel, Lines) else {panel.x, panel.y, panel.value}
    return any(all(line.get(name) is not None for name in wanted) for line in pictures.selected(lines, panel.where))
