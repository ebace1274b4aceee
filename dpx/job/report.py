"""`job=report`: finished runs into `experiments/<paper>/results.csv`; tables, figures and one page from that file alone. No jax."""

from pathlib import Path

from dpx.console import wide_console
from dpx.declaration import declaration, require
from dpx.experiment import Experiment
from dpx.extras import require_extra
from dpx.run_folder import RunFolder


@declaration
class Report:
    """With `collect`, runs under `outputs` replace their own rows in results.csv; rows of runs that are gone stay.

    Runs that are no longer a point of their recipe are left out and named. Writes README.md, page.html and figures/ beside it. A verdict
    that fails or did not run is shown as such and does not raise.
    """

    paper: str
    collect: bool = True
    outputs: str = "outputs"
    evidence: str = "experiments"

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        del experiment, folder
        from dpx.report import benchmarks, collect, pages, rows

        if self.paper == "benchmarks":
            wide_console().print(f"{benchmarks.write(Path(self.evidence) / self.paper)} files into {self.evidence}/benchmarks/README.md")
            return
        page, home = pages.page(self.paper), Path(self.evidence) / self.paper
        # Checked first, not after every run was collected.
        require_extra("job=report", "plots")
        published = home / "published.csv"
        require(published.is_file(), published, "the published values are not there", "Run from the checkout, or set report.evidence")
        kept, console = rows.read(home / "results.csv"), wide_console()
        if self.collect:
            collected, unfinished = collect.collect(Path(self.outputs), page.match)
            kept, strays = collect.merged(kept, [*collected, *page.computed()])
            rows.write(home / "results.csv", (row for row in kept if page.shows(row.metric)))
            for line in [*unfinished, *strays, *page.fill(Path(self.outputs), home)]:
                console.print(f"left out: {line}", highlight=False)
        runs = self.rebuild(home)
        console.print(f"{home / 'page.html'} and {home / 'README.md'} from {runs} runs in {home / 'results.csv'}", highlight=False)

    def rebuild(self, home: Path) -> int:
        """The page, README and figures from the two CSV files; the number of runs in them."""
        from dpx.report import html, pages, published, rows
        from dpx.report.markdown import markdown
        from dpx.report.theme import standalone

        runs = rows.runs_of(rows.read(home / "results.csv"))
        document = pages.page(self.paper).document(runs, published.read(home / "published.csv"), home / "notes.csv")
        figures = home / "figures"
        figures.mkdir(exist_ok=True)
        names = {f"{figure.name}.svg" for figure in document.figures}
        for stale in figures.glob("*.svg"):
            if stale.name not in names:
                stale.unlink()
        for figure in document.figures:
            (figures / f"{figure.name}.svg").write_text(standalone(figure.svg))
        (home / "page.html").write_text(html.page(document))
        (home / "README.md").write_text(markdown(document))
        return len(runs)
