"""Items whose tables are made from rows where the page is made: an item names the rows, and at most one function rows -> rows."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from dpx import packages
from dpx.declaration import ConfigError, require
from dpx.pages.analysis_tables import Table
from dpx_papers.analysis import table_of
from dpx_papers.report.evidence import Evidence, Rows, drawn_tables

Made = Callable[[Rows], Rows]
# The name of the table, for verdicts and figures of the item.
TABLE = "rows"
_OF_RUNS = ("finals", "curves", "published")
_MARK = "makes_rows_of_rows"


def of_rows(function: Made) -> Made:
    """Marks a function from a `pandas.DataFrame` to another one as what an item of paper.yaml may name; no other function may be named."""
    setattr(function, _MARK, True)
    return function


def named(value: str, name: str) -> Made:
    """Returns the function of an item, by its full name. Imports only listed packages, and raises `ConfigError` for what is not marked."""
    module, _, last = name.rpartition(".")
    is_name = bool(module) and all(part.isidentifier() for part in name.split("."))
    require(is_name, value, "is not the name of a function", "Write <package>.<module>.<function>")
    packages.require_listed(value, module.partition(".")[0])
    try:
        found = getattr(importlib.import_module(module), last)
    except (Exception, SystemExit) as error:
        reason = f"cannot be loaded ({type(error).__name__}: {error})"
        raise ConfigError(value, reason, "Name a function of an installed package") from error
    require(getattr(found, _MARK, False), value, "is not a function of rows", "Mark it with dpx_papers.report.of_rows.of_rows")
    return found


def table(item: Any, found: Evidence) -> Table | None:
    """Returns the table of an item; `None` if there are no rows yet."""
    value = f"{found.home.name}.{item.number}.rows={item.rows}"
    rows = _read(value, item, found)
    if rows is None or rows.empty:
        return None
    if item.function:
        rows = _called(value, named(f"{found.home.name}.{item.number}.function={item.function}", item.function), rows)
    return table_of(TABLE, rows, item.title)


def applied(value: str, function: str, table: Table) -> Table:
    """Returns what the function of a figure makes of a table."""
    return table_of(table.name, _called(value, named(value, function), pd.DataFrame(table.as_json()["rows"])), table.title)


def _called(value: str, function: Made, rows: Rows) -> Rows:
    name = f"{function.__module__}.{function.__name__}"
    try:
        rows = function(rows)
    except Exception as error:
        reason = f"{name} failed ({type(error).__name__}: {error})"
        raise ConfigError(value, reason, "Correct the function, or the rows that it is given") from error
    require(isinstance(rows, pd.DataFrame), value, f"{name} returned no table", "Return a pandas.DataFrame")
    return rows


def _read(value: str, item: Any, found: Evidence) -> Rows | None:
    if item.rows in _OF_RUNS:
        kept = drawn_tables(found, item.experiment).get(item.rows)
        return None if kept is None else pd.DataFrame(kept.as_json()["rows"])
    fix = f"Name a CSV file beside paper.yaml, or {', '.join(_OF_RUNS)}"
    is_beside = item.rows.endswith(".csv") and Path(item.rows).name == item.rows
    require(is_beside and (found.home / item.rows).is_file(), value, "there are no such rows", fix)
    try:
        return pd.read_csv(found.home / item.rows)
    # What pandas says of a file that is no table, and of letters that are not UTF-8.
    except ValueError as error:
        raise ConfigError(value, f"is no table of comma-separated values ({' '.join(str(error).split())})", "Correct the file") from error
