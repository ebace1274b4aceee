"""`job=report`: finished runs into `experiments/<paper>/results.csv`; tables, figures and one page from that file alone. No jax."""

from pathlib import Path
from typing import Any

from dpx.console import answer, wide_console
from dpx.declaration import declaration
from dpx.experiment import Experiment
from dpx.extras import require_extra
from dpx.run_folder import RunFolder


@declaration
class Report:
    """With `collect`, runs under `outputs` replace their own rows in results.csv; rows of runs that are gone stay.

    Runs that are no longer a point of their recipe are left out and named. Writes README.md, page.html and figures/ beside it. A verdict
    that fails or did not run is shown as such and does not raise.

    Attributes:
        paper: Folder below evidence, such as anil2021; benchmarks for the tables of speed.
        collect: Whether finished runs are read first; false only redraws.
        outputs: Folder of the runs.
        evidence: Folder of the papers' tables and pages.
    """

    paper: str
    collect: bool = True
    outputs: str = "outputs"
    evidence: str = "experiments"

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        del experiment, folder
        from dpx.benchmark import tables
        from dpx.report import analyses, collect, page, paper, rows

        if self.paper == "benchmarks":
            wide_console().print(f"{tables.write(Path(self.evidence) / self.paper)} files into {self.evidence}/benchmarks/README.md")
            return
        home, console = Path(self.evidence) / self.paper, wide_console()
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
        _write(home, page.document(declared, found))
        answer({"page": str(home / "page.html"), "runs": len(found.runs)})
        console.print(f"{home / 'page.html'} and README.md from {len(found.runs)} runs and the tables in {home}", highlight=False)


def _write(home: Path, document: Any) -> None:
    """Writes page.html, README.md and figures/ of a document, and removes figures that the document does not have."""
    from dpx.report.document import html, markdown, standalone

    figures = home / "figures"
    figures.mkdir(exist_ok=True)
    names = {f"{figure.name}.svg" for figure in document.figures}
    for stale in figures.glob("*.svg"):
        if stale.name not in names:
            stale.unlink()
    for figure in document.figures:
        (figures / f"{figure.name}.svg").write_text(standalone(figure.svg))
    (home / "page.html").write_text(html(document))
    (home / "README.md").write_text(markdown(document))
