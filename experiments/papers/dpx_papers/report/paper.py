"""`paper.yaml`: the items of a paper and how each is judged; `dpx/docs/extending.md` explains the keys."""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dpx import config
from dpx.config import recipes
from dpx.config.node import nearest
from dpx.declaration import ConfigError, declaration, require
from dpx.pages.analysis_tables import Cells, Lines, Picture
from dpx.pages.read_runs import Run
from dpx_papers.analysis import kind_of
from dpx_papers.report import rules
from dpx_papers.report.readings import Choice, Reading
from dpx_papers.report.rules import Rule
from dpx_papers.report.sizes import FULL, LAPTOP, SMALLER

# What "ours, full scale" shows of an item that has not run at full scale, by its kind.
KINDS = {
    "trains": "not run",
    "computed": "computed",
    "grid": "needs the grid",
    "accounting and grid": "accounting computed; losses need the grid",
    "planned": "no recipe yet",
    "rows": "made from rows",
}
_SCALES = {FULL: ("", "full"), SMALLER: ("", "small"), LAPTOP: ("", "small", "laptop")}
# The declarations that the keys of paper.yaml hold; `rule` names that of a verdict.
_PARTS = {
    "items": "dpx_papers.report.paper.Item",
    "than": "dpx_papers.report.evidence.Selection",
    "best": "dpx_papers.report.evidence.Best",
    "figures": "dpx_papers.report.paper.Figure",
    "readings": "dpx_papers.report.readings.Reading",
    "choices": "dpx_papers.report.readings.Choice",
}


@declaration
class Figure(Picture):
    """A picture whose panels are each of a table of the item's analysis or of `evidence.drawn_tables`, or of what `function` makes of that
    table: it is marked by `dpx_papers.report.of_rows.of_rows` and named in full. A panel whose `where` has `*` as a value stands for one
    panel for each value of that column."""

    panels: Sequence[Lines | Cells]
    function: str = ""


@declaration
class Item:
    """One experiment of a paper. `hours` of one H200 at half of 790 TFLOP/s is its cost at full scale; `options` are those of the
    laptop's command, or of an item that is computed; `also` are overrides with which the paper has the points of the recipe too, such as a
    second model of its table. `passes` says what has to hold. Without a `verdict` its analysis judges itself.
    `norms` is the knob by which the growth of every weight matrix is listed. An item of the kind `rows` has no recipe: its table `rows` is
    made where the page is, from `rows`, a CSV file beside paper.yaml or the `finals`, `curves` or `published` numbers of `experiment`, by
    at most one `function`, which is marked by `dpx_papers.report.of_rows.of_rows` and named in full."""

    number: str
    experiment: str
    title: str
    kind: str
    hours: float = 0.0
    options: Sequence[str] = ()
    also: Sequence[str] = ()
    passes: str = ""
    verdict: Sequence[Rule] = (rules.Analysis(),)
    figures: Sequence[Figure] = ()
    norms: str = ""
    rows: str = ""
    function: str = ""

    def __post_init__(self) -> None:
        is_of_rows = self.kind == "rows"
        reason = "an item of this kind is made from rows" if is_of_rows else "no item of this kind is made from rows"
        fix = "Give kind: rows and rows: <file>.csv, or neither"
        require(is_of_rows == bool(self.rows), f"{self.number}.kind={self.kind}", reason, fix)
        require(is_of_rows or not self.function, f"{self.number}.function={self.function}", reason, "Give kind: rows, or an analysis")
        require(self.kind in KINDS, f"{self.number}.kind={self.kind}", "no such kind of item", f"Use {', '.join(KINDS)}")
        known = [one.removeprefix("laptop/") for one in recipes.names()]
        for name in {self.experiment, *(rule.experiment for rule in self.verdict)} - {""} if self.kind not in ("planned", "rows") else ():
            value, fix = f"{self.number}: experiment {name}", f"Name a recipe{nearest(name, known)}"
            require(bool(fnmatch.filter(known, name)), value, "no recipe has that name", fix)

    @property
    def source(self) -> str:
        """Under which name its tables are: that of its experiment, or its number where they are made from rows."""
        return self.number if self.rows else self.experiment

    @property
    def own_size(self) -> str:
        """The size that an item which has not run is shown at."""
        return FULL if self.kind in ("computed", "rows") else LAPTOP

    @property
    def sizes_of_rows(self) -> tuple[str, ...]:
        """The sizes that the table of an item of the kind `rows` is made at."""
        return () if not self.rows else (FULL, LAPTOP) if self.rows in ("finals", "curves") else (FULL,)

    def rules(self, size: str) -> list[Rule]:
        """Returns the rules that fit a size."""
        return [rule for rule in self.verdict if rule.scale in _SCALES[size]]

    def overrides_at(self, size: str) -> tuple[str, ...]:
        """Returns what makes the item at a size, as it is written after `python -m dpx`."""
        laptop, is_computed = f"laptop/{self.experiment}", self.kind == "computed"
        if size == LAPTOP and not (is_computed and self.options):
            return (f"+experiment={laptop if laptop in recipes.names() else self.experiment}", *self.options)
        return (f"+experiment={self.experiment}", *(self.options if is_computed else ()))


@declaration
class Paper:
    """`headline` is the column that a finished training run has; `columns` of the table of runs by point, with their headings.
    `readings` say what recipes take where the paper leaves a setting open, `choices` where the paper's code differs from its text.
    `drops` are patterns of metrics that results.csv does not keep. `first` are the names of the figures that the page begins with. Each
    of `collects` is called with the folder of runs and that of the paper, writes what else its analyses read, and returns a line on
    each run that it left out."""

    title: str
    items: Sequence[Item]
    headline: str
    columns: Mapping[str, str]
    readings: Sequence[Reading] = ()
    choices: Sequence[Choice] = ()
    drops: Sequence[str] = ()
    first: Sequence[str] = ()
    collects: Sequence[Any] = ()

    def __post_init__(self) -> None:
        for key, declared in (("readings", self.readings), ("choices", self.choices)):
            for pattern in {pattern for one in declared for pattern in one.recipes}:
                fix = f"Name a recipe{nearest(pattern, recipes.names())}"
                require(bool(fnmatch.filter(recipes.names(), pattern)), f"{key}: recipes {pattern}", "no recipe has that name", fix)

    @property
    def match(self) -> tuple[str, ...]:
        """Beginnings of the names of the folders whose runs are collected."""
        return tuple(f"{place}{item.experiment}-" for item in self.items for place in ("", "laptop_"))

    @property
    def also(self) -> dict[str, Sequence[str]]:
        """The overrides with which the paper has the points of a recipe too, by recipe."""
        return {item.experiment: item.also for item in self.items if item.also}

    def shown(self, run: Run) -> Run:
        """Returns the run without the metrics that results.csv does not keep."""
        dropped = {metric for pattern in self.drops for metric in fnmatch.filter((*run.finals, *run.curves), pattern)}
        finals, curves = ({key: value for key, value in kept.items() if key not in dropped} for kept in (run.finals, run.curves))
        return dataclasses.replace(run, finals=finals, curves=curves)


def read(home: Path) -> Paper:
    """Returns the paper declared in `home`. Raises `ConfigError` for unknown keys, values of other types, and names that do not exist."""
    path = home / "paper.yaml"
    if not path.is_file():
        there = ", ".join([*sorted(one.parent.name for one in home.parent.glob("*/paper.yaml")), "benchmarks"])
        raise ConfigError(f"report.paper={home.name}", f"{path} does not exist", f"There are {there}; from elsewhere set report.evidence")
    try:
        plain: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (YAMLError, OmegaConfBaseException, OSError) as error:
        raise ConfigError(path, f"is not YAML that can be read ({error})", "Quote texts with a colon, and close brackets") from error
    is_whole = isinstance(plain, dict) and all(isinstance(item, dict) for item in plain.get("items") or ())
    require(is_whole, path, "is not a mapping with a list of items", "Give title, headline, columns and items")
    node = _named(plain, home.name)
    items = [config.make(one, f"{home.name}.{one.get('number', 'items')}") for one in node.pop("items", None) or ()]
    return config.make({"_target_": "dpx_papers.report.paper.Paper", "items": items, **node}, home.name)


def _named(node: Any, path: str, key: str = "") -> Any:
    """`node` with the declaration of each part named, for `config.make`."""
    if isinstance(node, list):
        return [_named(one, path, key) for one in node]
    if not isinstance(node, dict):
        return node
    where = f"{path}.{node.get('number', key)}".rstrip(".")
    inner = {name: _named(value, where, name) for name, value in node.items() if name != "rule"}
    if key == "verdict":
        # dpx's own rules are named in small letters, others in full.
        rule, own = str(node.get("rule")), sorted(one.__name__.lower() for one in Rule.__subclasses__() if one.__module__ == rules.__name__)
        reason, fix = "no such rule", f"Use {', '.join(own)}, or the full name of a class"
        require("." in rule or rule in own, f"{where}.rule={rule}", reason, fix)
        return {"_target_": rule if "." in rule else f"dpx_papers.report.rules.{rule.capitalize()}", **inner}
    if key == "panels":
        return {"_target_": kind_of(node), **inner}
    return {"_target_": _PARTS[key], **inner} if key in _PARTS else inner
