"""What an analysis of a paper is: a declaration in `conf/analysis`, and one function that makes rows of what the declaration gives.

The declaration holds the values that the function takes, what is said of its tables, and its figures. pandas is imported where rows are
made, so that an analysis can be planned without it.
"""

import dataclasses
import fnmatch
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from dpx.config.instantiate import make
from dpx.config.node import unknown_key
from dpx.declaration import declaration, require
from dpx.packages import require_extra
from dpx.pages.analysis_tables import Picture, Table
from dpx_papers.report.shape import verdict_table

# The value of a parameter that is the path of a file or folder, which must exist before the analysis starts.
Input = Annotated[str, "an input"]
# By the name of its table: mappings by column, a pandas.DataFrame, or under `verdicts` the claims that the function judged.
Made = Mapping[str, Any]
# In place of a value in a panel's `where`: a panel for each value of that column.
EACH = "*"


class Noted(NamedTuple):
    """Rows of a table, with what only the function can say of them; notes come after those of the declaration."""

    rows: Any
    notes: Sequence[str] = ()
    title: str = ""


@declaration
class Analysis:
    """Is the base class of what `analysis` makes.

    Attributes:
        tables: Title and notes of each table, where {name} is replaced by a value of the analysis.
        figures: Name, caption and panels of each figure; a panel has the keys of dpx.pages.analysis_tables.
        measurements: What the lab of the analysis reads in place of its own measurements.
    """

    tables: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    figures: Sequence[Mapping[str, Any]] = ()
    measurements: str | None = None
    function: ClassVar[Callable[..., Made]]
    check: ClassVar[Callable[[Any], None]]
    named_inputs: ClassVar[Sequence[str]]

    def __post_init__(self) -> None:
        if self.measurements is not None:
            own: Any = self.given.get("lab")
            require(own is not None, f"analysis.measurements={self.measurements}", "this analysis reads no measurements", "Leave it out")
            object.__setattr__(self, "lab", dataclasses.replace(own, measurements=self.measurements))
        self.check(self)
        for node, known in (*((one, ("title", "notes")) for one in self.tables.values()), *((one, _FIGURE) for one in self.figures)):
            for key in node.keys() - set(known):
                raise unknown_key(f"analysis.{'figures' if known is _FIGURE else 'tables'}.{key}", known)
        for panel in (panel for figure in self.figures for panel in figure["panels"]):
            _panel(panel, self.given | {"value": 0})

    @property
    def given(self) -> dict[str, Any]:
        """The values that the function takes."""
        names = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names if name not in ("tables", "figures", "measurements")}

    def __call__(self) -> list[Table]:
        require_extra("an analysis of a paper", "papers")
        return [self._table(name, made) for name, made in type(self).function(**self.given).items()]

    def inputs(self) -> list[Path]:
        """Returns the files and folders that must exist before the analysis starts."""
        named = [self.given[name] for name in self.named_inputs]
        return [Path(path) for path in (*named, *(path for value in self.given.values() for path in getattr(value, "inputs", ())))]

    def pictures(self, tables: Sequence[Table]) -> list[Picture]:
        """Returns the figures of the declaration, without panels that `tables` have no rows for."""
        rows = {table.name: table.as_json()["rows"] for table in tables}
        drawn = []
        for node in self.figures:
            panels = tuple(one for panel in node["panels"] for one in _with_rows(panel, rows.get(panel["table"], []), self.given))
            drawn += [Picture(node["name"], node["caption"].format(**self.given), panels, node.get("columns", 0))] if panels else []
        return drawn

    def _table(self, name: str, made: Any) -> Table:
        if name == "verdicts":
            return verdict_table(made)
        rows, notes, title = made if isinstance(made, Noted) else Noted(made)
        said = self.tables.get(name, {})
        title = title or str(said.get("title", name)).format(**self.given)
        return table_of(name, rows, title, (*(note.format(**self.given) for note in said.get("notes", ())), *notes))


def analysis(check: Callable[[Any], None] = lambda _: None) -> Callable[[Callable[..., Made]], Any]:
    """Returns a decorator that makes the declaration of an analysis from its function: the keys are the parameters, and the section
    `Attributes` of the docstring says what they mean. `check` refuses values that cannot be.
    """

    def declared(function: Callable[..., Made]) -> Any:
        taken = inspect.signature(function).parameters
        body: dict[str, Any] = {name: one.default for name, one in taken.items() if one.default is not one.empty}
        body |= {"__annotations__": {name: one.annotation for name, one in taken.items()}, "__module__": function.__module__}
        body |= {"__doc__": function.__doc__, "function": staticmethod(function), "check": staticmethod(check)}
        body["named_inputs"] = tuple(name for name, one in taken.items() if one.annotation is Input)
        return declaration(type(function.__name__, (Analysis,), body))

    return declared


def frame(rows: Any, columns: list[str] | None = None, dtype: type | None = None) -> Any:
    """Returns rows as a `pandas.DataFrame`, whose own types say of no column what it holds."""
    import pandas as pd

    return pd.DataFrame(rows, columns=columns, dtype=dtype)


def table_of(name: str, rows: Any, title: str, notes: Sequence[str] = ()) -> Table:
    """Returns the table of a `pandas.DataFrame` or of mappings by column; what is missing is `None`."""
    if not hasattr(rows, "itertuples"):
        return Table.from_rows(name, rows, title, notes)
    plain = rows.astype(object).where(rows.notna(), None)
    return Table(name, tuple(map(str, plain.columns)), tuple(plain.itertuples(index=False, name=None)), title, tuple(notes))


_FIGURE = ("name", "caption", "panels", "columns")


def _with_rows(node: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> list[Any]:
    """Returns the panels that a panel of the declaration stands for and that have rows; a column of `y` may be a pattern."""
    where = node.get("where") or {}
    column = next((name for name, value in where.items() if value == EACH), "")
    found = []
    for value in dict.fromkeys(row[column] for row in rows) if column else (0,):
        chosen = where | ({column: value} if column else {})
        own = [row for row in rows if all(row[name] == wanted for name, wanted in chosen.items())]
        shown = {**node, **({"where": chosen} if where else {})}
        if isinstance(node.get("y"), list):
            shown["y"] = [name for pattern in node["y"] for name in (fnmatch.filter(own[0], pattern) if own else ()) or (pattern,)]
        panel = _panel(shown, {**values, "value": value})
        drawn = (*getattr(panel, "marks", ()), *(panel.y if isinstance(shown.get("y"), list) else ()))
        if own and (not drawn or any(row.get(name) is not None for row in own for name in drawn)):
            found.append(panel)
    return found


def _panel(node: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """Returns the panel that is declared."""
    given = {name: _formatted(value, values) for name, value in node.items() if name != "where"}
    where = {"where": node["where"]} if "where" in node else {}
    return make({"_target_": kind_of(node), **given, **where}, "analysis.figures")


def kind_of(node: Mapping[str, Any]) -> str:
    """Returns the class of a panel by its keys: arrows have components, cells a value, and all others are lines."""
    return f"dpx.pages.analysis_tables.{'Arrows' if 'right' in node else 'Cells' if 'value' in node else 'Lines'}"


def _formatted(node: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_formatted(one, values) for one in node]
    if isinstance(node, dict):
        return {name: _formatted(one, values) for name, one in node.items()}
    return node.format(**values) if isinstance(node, str) else node
