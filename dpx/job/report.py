"""`job=report`: finished runs into `experiments/<paper>/results.csv`; tables, figures and one page from that file alone. No jax.

`report.paper=all` makes the page of every paper and `experiments/index.html`, one page for all items. A paper's page leads to those of its
runs whose folders are here; a run without a page gets one. With `run=<folder>` it makes the page of that run, with `report.runs=[...]` the
page of several runs side by side.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpx.console import answer, wide_console
from dpx.declaration import ConfigError, declaration, require
from dpx.durable import make_folder
from dpx.experiment import Experiment
from dpx.extras import require_extra
from dpx.run_folder import RunFolder

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
            require_extra("job=report", "plots")
            _of_run(experiment, folder) if folder.has_begun else _of_several(self.runs, folder)
        elif self.paper == "all":
            self._all()
        else:
            self._one(self.paper)

    def _all(self) -> None:
        """Makes the page of every paper, and the page of all their items."""
        from dpx.pages.document import html
        from dpx.report import overview, page, paper

        homes = sorted(path.parent for path in Path(self.evidence).glob("*/paper.yaml"))
        require(bool(homes), f"report.evidence={self.evidence}", "no folder in it has a paper.yaml", "Run the job in a checkout of dpx")
        for home in homes:
            self._one(home.name)
        declared = [(paper.read(home), home) for home in homes]
        papers = [overview.judged(one, page.evidence(one, home)) for one, home in declared]
        place = Path(self.evidence) / "index.html"
        place.write_text(html(overview.document(papers)))
        answer({"page": str(place), "papers": len(papers), "items": sum(len(one.paper.items) for one in papers)})
        wide_console().print(f"{place}: all items of {len(papers)} papers", highlight=False)

    def _one(self, name: str) -> None:
        from dpx.benchmark import tables
        from dpx.pages import run_page
        from dpx.report import analyses, collect, page, paper, rows

        if name == "benchmarks":
            wide_console().print(f"{tables.write(Path(self.evidence) / name)} files into {self.evidence}/benchmarks/README.md")
            return
        home, console = Path(self.evidence) / name, wide_console()
        declared = paper.read(home)
        # Checked first, not after every run was collected.
        require_extra("job=report", "plots")
        rows.read_published(home / "published.csv")
        if self.collect:
            outputs = Path(self.outputs)
            collected, unfinished = collect.collect(outputs, declared.match)
            kept, strays = collect.merged(rows.read(home / "results.csv"), collected)
            rows.write(home / "results.csv", map(declared.shown, kept))
            others = [line for one in declared.collects for line in one(outputs, home)]
            for line in [*unfinished, *strays, *analyses.fill(outputs, home, declared.match), *others]:
                console.print(f"left out: {line}", highlight=False)
        found = page.evidence(declared, home)
        folders = {run.run: Path(self.outputs) / run_page.label(run) for run in found.runs}
        for folder in folders.values() if self.collect else ():
            if problem := _missing(folder):
                console.print(f"no page: {problem}", highlight=False)
        _write(home, page.document(declared, found), _addresses(folders, home))
        answer({"page": str(home / "page.html"), "runs": len(found.runs)})
        console.print(f"{home / 'page.html'} and README.md from {len(found.runs)} runs and the tables in {home}", highlight=False)


def _missing(folder: Path) -> str:
    """Makes the page of a run whose folder is here and has none; returns the reason why it cannot be made."""
    from dpx import config

    try:
        # A chain's folder has no config of its own.
        if RunFolder(folder).has_begun and not (folder / PAGE).exists():
            _of_run(config.build(config.load(str(folder))[0])[0], RunFolder(folder))
    except ConfigError as error:
        return f"{folder.name}: {error}"
    return ""


def _addresses(folders: Mapping[str, Path], beside: Path) -> dict[str, str]:
    """Returns the address of each run's page that exists, for a page in `beside`."""
    return {name: os.path.relpath(folder / PAGE, beside) for name, folder in folders.items() if (folder / PAGE).is_file()}


def _of_run(experiment: Experiment, folder: RunFolder) -> None:
    """Makes the page of a finished run."""
    from dpx.job.explain import Explain
    from dpx.pages import run_page

    run, (said, _) = run_page.read(folder.path), Explain().said(experiment, folder)
    _write_private(run_page.document(run, said.in_short, said.words, said.tables), folder)


def _of_several(named: Sequence[str], folder: RunFolder) -> None:
    """Makes the page of several finished runs."""
    from dpx import config
    from dpx.pages import run_page

    require(len(named) > 1, f"report.runs={list(named)}", "a comparison is of several runs", "Name two or more, or run=<folder> for one")
    chosen = [config.load(one)[1] for one in named]
    _write_private(run_page.comparison([run_page.read(path) for path in chosen]), folder, {path.name: path for path in chosen})


def _write_private(document: Any, folder: RunFolder, linked: Mapping[str, Path] | None = None) -> None:
    from dpx.pages.document import html

    place = folder.made_private().parent / PAGE
    place.write_text(html(document, _addresses(linked or {}, place.parent)))
    answer({"page": str(place)})
    wide_console().print(f"{place}: {document.title}", highlight=False)


def _write(home: Path, document: Any, links: Mapping[str, str]) -> None:
    """Writes page.html with its links, README.md and figures/ of a document, and removes figures that the document does not have."""
    from dpx.pages.document import html, markdown, standalone

    figures = home / "figures"
    make_folder(figures)
    names = {f"{figure.name}.svg" for figure in document.figures}
    for stale in figures.glob("*.svg"):
        if stale.name not in names:
            stale.unlink()
    for figure in document.figures:
        (figures / f"{figure.name}.svg").write_text(standalone(figure.svg))
    (home / "page.html").write_text(html(document, links))
    (home / "README.md").write_text(markdown(document))
