"""The pages of `job=report`: one YAML file each in `conf/paper/`, or in that folder of an installed package."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpx import config, packages
from dpx.declaration import ConfigError
from dpx.report.document import Document
from dpx.report.published import Published
from dpx.report.rows import Row, Run


class Page:
    """What a page answers: whose runs it takes, what it adds by arithmetic, and how it is made. `experiments/<paper>/published.csv` has to
    hold what the paper published."""

    @property
    def match(self) -> tuple[str, ...]:
        """Beginnings of the names of the experiments whose runs are collected."""
        raise NotImplementedError

    def shows(self, metric: str) -> bool:
        """Whether the page is drawn from this metric of a run; `results.csv` holds no other."""
        del metric
        return True

    def computed(self) -> list[Row]:
        """Rows for results.csv that follow by arithmetic, from no run."""
        return []

    def fill(self, outputs: Path, home: Path) -> list[str]:
        """Writes what else the page is drawn from, out of runs under `outputs` into `home`; a line on each that could not be read."""
        del outputs, home
        return []

    def document(self, runs: Sequence[Run], published: Sequence[Published], notes: Path) -> Document:
        """The page as a document, made from runs and published numbers alone; `notes` is a CSV file beside them, which need not exist."""
        raise NotImplementedError


def names() -> list[str]:
    """The papers that have a page."""
    return packages.names_in("paper")


def page(paper: str) -> Page:
    """The page of `paper`; raises `ConfigError` if it does not exist."""
    path = packages.yaml_of("paper", paper)
    if path is None:
        raise ConfigError(f"report.paper={paper}", "no page is made of that paper", f"There are {', '.join(names())}, benchmarks")
    declared: Any = config.declare(path, f"paper={paper}")
    if not isinstance(declared, Page):
        raise ConfigError(f"paper={paper}", f"{type(declared).__name__} is not a page", "Name a dpx.report.pages.Page")
    return declared
