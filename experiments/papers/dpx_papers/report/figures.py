"""The figures that an item and its analysis declare, on its page, with a panel for each size that ran."""

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

import pandas as pd

from dpx.config import build, recipes
from dpx.pages import pictures
from dpx.pages.analysis_tables import Lines, Picture, Table
from dpx.pages.page_document import Figure
from dpx_papers.report import shape
from dpx_papers.report.analyses import Tables
from dpx_papers.report.evidence import Evidence, drawn_tables
from dpx_papers.report.paper import Item, Paper
from dpx_papers.report.sizes import FULL, LAPTOP, SIZES, SMALLER

_TITLES = {FULL: "ours, full scale", SMALLER: "full-scale recipe, made smaller", LAPTOP: "laptop: order only"}


def of_item(paper: Paper, item: Item, at: Mapping[str, Evidence], tables: Mapping[str, Tables]) -> list[Figure]:
    """Returns the figures of an item, from its runs and the `tables` of its analysis at each size; panels without data are left out."""
    known = {size: {**drawn_tables(own, item.experiment), **tables[size]} for size, own in at.items()}
    drawn = [Picture(one.name, one.caption, _panels(one, paper, at, known)) for one in item.figures]
    ran = [size for size in SIZES if tables[size]]
    for size in ran if item.kind != "rows" else ():
        # Of two sizes of an analysis, the first has the figure's name.
        suffix = "" if size == ran[0] else f"-{size}"
        drawn += [
            Picture(one.name + suffix, one.caption, tuple(_at(panel, size) for panel in one.panels))
            for one in _declared(item, size, list(tables[size].values()))
        ]
    named = {_name(size, name): dataclasses.replace(table, name=_name(size, name)) for size in SIZES for name, table in known[size].items()}
    kept = [Picture(one.name, one.caption, tuple(panel for panel in one.panels if _has_data(panel, named))) for one in drawn]
    return pictures.draw([picture for picture in kept if picture.panels], list(named.values()))


def _panels(figure: Picture, paper: Paper, at: Mapping[str, Evidence], known: Mapping[str, Tables]) -> tuple[Lines, ...]:
    """Returns the panels of a figure at each size that has their table; what is published is drawn once."""
    found: list[Lines] = []
    for panel in figure.panels:
        assert isinstance(panel, Lines)
        sizes = [FULL] if panel.table == "published" else [size for size in SIZES if panel.table in known[size]]
        found += [_completed(panel, paper, at[size], size) for size in sizes]
    return tuple(found)


def _declared(item: Item, size: str, tables: list[Table]) -> list[Picture]:
    """Returns the pictures that the item's analysis declares of its tables."""
    job: Any = build(recipes.compose(list(item.overrides_at(size))))[1]
    analysis: Any = getattr(job, "analysis", None)
    return analysis.pictures(tables) if hasattr(analysis, "pictures") else []


def _name(size: str, table: str) -> str:
    return f"{size}: {table}"


def _at(panel: Any, size: str) -> Any:
    return dataclasses.replace(panel, table=_name(size, panel.table))


def _completed(panel: Lines, paper: Paper, own: Evidence, size: str) -> Lines:
    """Returns the panel of the tables of one size, with a title, a label, and its dotted line at the mean of the runs of the experiment
    that `level` names."""
    (key, *_), level, is_ours = (*panel.y, *panel.marks, ""), panel.level, panel.table in ("finals", "curves")
    if isinstance(level, str):
        values = own.trained(level).get(key, pd.Series(dtype=object)).dropna()
        level = (100 if shape.is_share(key) else 1) * statistics.fmean(values) if len(values) else None
    label = panel.y_label or paper.columns.get(key, key) + ", %" * shape.is_share(key)
    told = _TITLES[size] if is_ours else "published, full scale" if panel.table == "published" else ""
    title = "; ".join(filter(None, (told, panel.title)))
    completed = dataclasses.replace(panel, level=level, y_label=label, title=title, runs="run" if is_ours and panel.y else panel.runs)
    return _at(completed, size)


def _has_data(panel: Any, tables: Tables) -> bool:
    lines = tables[panel.table].as_json()["rows"] if panel.table in tables else []
    if not isinstance(panel, Lines):
        return bool(lines)
    where = panel.where
    return any({*panel.y, *panel.marks} <= set(line) and (where is None or line[where[0]] == where[1]) for line in lines)
