"""Jobs that make pages and tables of what there is. They train no model.

`job=report`: with `run=<folder>` the page of that run, with `report.runs=[...]` the page of several runs side by side; with
`report.paper=...` the package of the papers makes the page of a paper (`dpx.packages.supplied`).

`job=analyse`: one analysis into tables; jax starts only in an analysis that computes gradients.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpx.config.experiment import Experiment
from dpx.console import answer, wide_console
from dpx.declaration import ConfigError, declaration, require
from dpx.files.run_folder import RunFolder, write_json
from dpx.job.explain import Explain, Explanation
from dpx.packages import require_extra, supplied, without_papers
from dpx.pages import pictures
from dpx.pages.analysis_tables import Table

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


@declaration
class Analyse:
    """Computes the tables of an analysis, prints them, and writes `release/analysis.json` and a CSV of each.

    An analysis is a declaration that is called without arguments and returns a list of `dpx.pages.analysis_tables.Table`. It may have two
    more methods: `inputs() -> list[Path]`, the files that it reads, which must exist; and `pictures(tables) -> list[Picture]` of its tables
    (`dpx.pages.analysis_tables`), which are drawn if matplotlib (extra `plots`) is installed.

    Attributes:
        analysis: The analysis, chosen by analysis=<name>.
    """

    analysis: Any = None

    def __post_init__(self) -> None:
        require_analysis(self.analysis)

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        require(
            self.analysis is not None, "analysis", "no analysis is chosen", "Add analysis=<name>, or choose an experiment that sets one"
        )
        absent = [str(entry["path"]) for entry in inputs(self.analysis) if not entry["exists"]]
        require(not absent, ", ".join(absent), "the analysis reads this file, but the file is missing", "Run the job that writes it first")
        tables: list[Table] = self.analysis()
        folder.made_release()
        document = {"name": experiment.name, "tables": [table.as_json() for table in tables]}
        write_json(folder.release / "analysis.json", document)
        answer(document)
        console = wide_console()
        for table in tables:
            table.write_csv(folder.release)
            console.print(table.shown())
            for note in table.notes:
                console.print(f"  {note}", highlight=False)
        shown = self.analysis.pictures(tables) if hasattr(self.analysis, "pictures") else []
        drawn = pictures.write(shown, tables, folder.release)
        if drawn:
            console.print(drawn, highlight=False, soft_wrap=True)


def require_analysis(analysis: Any) -> None:
    """Raises `ConfigError` for a value other than an analysis; `None` says that no analysis is chosen."""
    # Without a package that has analyses, this group of options does not exist, and a name stays a text.
    if isinstance(analysis, str):
        raise without_papers(f"analysis={analysis}")
    known = analysis is None or callable(analysis)
    require(known, f"analysis={analysis}", "is not an analysis", "Choose one by its name: analysis=<name>, listed by --help")


def inputs(analysis: Any) -> list[dict[str, Any]]:
    """Returns the path of each input and whether it exists."""
    return [{"path": str(path), "exists": path.exists()} for path in getattr(analysis, "inputs", list)()]
