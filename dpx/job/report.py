"""`job=report`: with `run=<folder>` the page of that run, with `report.runs=[...]` the page of several runs side by side. No jax.

With `report.paper=...` the package of the papers makes the page of a paper (`dpx.packages.supplied`).
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpx.config.experiment import Experiment
from dpx.console import answer, wide_console
from dpx.declaration import ConfigError, declaration, require
from dpx.files.run_folder import RunFolder
from dpx.job.explain import Explain, Explanation
from dpx.packages import require_extra, supplied

# Of a run, in its folder.
PAGE = "private/page.html"


@declaration
class Report:
    """With `collect`, runs under `outputs` replace their own rows in results.csv; rows of runs that are gone stay.

    Runs that are no longer a point of their recipe are left out and named. Writes README.md, page.html and figures/ beside it. A verdict
    that fails or did not run is shown as such and does not raise.

    Attributes:
        paper: Folder below evidence, such as anil2021; all for every paper and the page of all items; benchmarks for the tables of speed.
        collect: Whether finished runs are read first, and get a page each; false only redraws.
        outputs: Folder of the runs.
        evidence: Folder of the papers' tables and pages.
        runs: Runs, by folder or by name, that are compared on one page instead of a paper.
    """

    paper: str
    collect: bool = True
    outputs: str = "outputs"
    evidence: str = "experiments"
    runs: Sequence[str] = ()

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        if folder.has_begun or self.runs:
            for library in ("matplotlib", "jinja2"):
                require_extra("job=report", "plots", library)
        if folder.has_begun:
            _write_page(Explain().said(experiment, folder)[0], folder)
        elif self.runs:
            from dpx import config
            from dpx.pages import run_page

            value, fix = f"report.runs={list(self.runs)}", "Name two or more, or run=<folder> for one"
            require(len(self.runs) > 1, value, "a comparison is of several runs", fix)
            chosen = [config.load(one)[1] for one in self.runs]
            _write_private(run_page.comparison([run_page.read(path) for path in chosen]), folder, {path.name: path for path in chosen})
        else:
            supplied("report_of_papers", f"report.paper={self.paper}")(self)


def missing_page(folder: Path) -> str:
    """Makes the page of a run whose folder is here and has none; returns the reason why it cannot be made."""
    from dpx import config

    try:
        # A chain's folder has no config of its own.
        if RunFolder(folder).has_begun and not (folder / PAGE).exists():
            experiment, run = config.build(config.load(str(folder))[0])[0], RunFolder(folder)
            _write_page(Explain().said(experiment, run)[0], run)
    except ConfigError as error:
        return f"{folder.name}: {error}"
    return ""


def addresses(folders: Mapping[str, Path], beside: Path) -> dict[str, str]:
    """Returns the address of each run's page that exists, for a page in `beside`."""
    return {name: os.path.relpath(folder / PAGE, beside) for name, folder in folders.items() if (folder / PAGE).is_file()}


def _write_page(said: Explanation, folder: RunFolder) -> None:
    """Writes the page of a finished run, with the explanation of its claim."""
    from dpx.pages import run_page

    _write_private(run_page.document(run_page.read(folder.path), said.in_short, said.words, said.tables), folder)


def _write_private(document: Any, folder: RunFolder, linked: Mapping[str, Path] | None = None) -> None:
    from dpx.pages.page_document import html

    place = folder.made_private().parent / PAGE
    place.write_text(html(document, addresses(linked or {}, place.parent)))
    answer({"page": str(place)})
    wide_console().print(f"{place}: {document.title}", highlight=False)
