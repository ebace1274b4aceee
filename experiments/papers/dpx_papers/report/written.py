"""Makes the pages of papers: finished runs into `experiments/<paper>/results.csv`; tables, figures and a page from that file alone.

`report.paper=all` makes the page of every paper and `experiments/index.html`, one page for all items. A paper's page leads to those of its
runs whose folders are here; a run without a page gets one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpx.console import answer, wide_console
from dpx.declaration import require
from dpx.durable import make_folder
from dpx.job.report import Report, addresses, missing_page
from dpx.pages import pictures, read_runs, run_page
from dpx.pages.page_document import html, markdown
from dpx_papers.benchmark import tables
from dpx_papers.report import all_verdicts, analyses, collect, overview, page, paper, rows


def of_all(asked: Report) -> None:
    """Makes the page of every paper, and the page of all their items."""

    homes = sorted(path.parent for path in Path(asked.evidence).glob("*/paper.yaml"))
    require(bool(homes), f"report.evidence={asked.evidence}", "no folder in it has a paper.yaml", "Run the job in a checkout of dpx")
    for home in homes:
        of_one(asked, home.name)
    declared = [(paper.read(home), home) for home in homes]
    papers = [overview.judged(one, page.evidence(one, home)) for one, home in declared]
    # A folder of other papers has no earlier verdicts.
    if (Path(asked.evidence) / f"{all_verdicts.NAME}.csv").is_file():
        (Path(asked.evidence) / f"{all_verdicts.NAME}.md").write_text(all_verdicts.text(papers, Path(asked.evidence)))
    place = Path(asked.evidence) / "index.html"
    place.write_text(html(overview.document(papers)))
    answer({"page": str(place), "papers": len(papers), "items": sum(len(one.paper.items) for one in papers)})
    wide_console().print(f"{place}: all items of {len(papers)} papers", highlight=False)


def of_one(asked: Report, name: str) -> None:
    """Makes the page of one paper, or the tables of the benchmarks."""

    if name == "benchmarks":
        wide_console().print(f"{tables.write(Path(asked.evidence) / name)} files into {asked.evidence}/benchmarks/README.md")
        return
    home, console = Path(asked.evidence) / name, wide_console()
    declared = paper.read(home)
    rows.read_published(home / "published.csv")
    if asked.collect:
        outputs = Path(asked.outputs)
        collected, unfinished = read_runs.collect(outputs, declared.match)
        kept, strays = collect.merged(rows.read(home / "results.csv"), collected, declared.also)
        rows.write(home / "results.csv", map(declared.shown, kept))
        others = [line for one in declared.collects for line in one(outputs, home)]
        for line in [*unfinished, *strays, *analyses.fill(outputs, home, declared.match), *others]:
            console.print(f"left out: {line}", highlight=False)
    found = page.evidence(declared, home)
    folders = {run.run: Path(asked.outputs) / run_page.label(run) for run in found.runs}
    for folder in folders.values() if asked.collect else ():
        if problem := missing_page(folder):
            console.print(f"no page: {problem}", highlight=False)
    _write(home, page.document(declared, found), addresses(folders, home))
    answer({"page": str(home / "page.html"), "runs": len(found.runs)})
    console.print(f"{home / 'page.html'} and README.md from {len(found.runs)} runs and the tables in {home}", highlight=False)


def _write(home: Path, document: Any, links: Mapping[str, str]) -> None:
    """Writes page.html with its links, README.md and figures/ of a document, and removes figures that the document does not have."""

    figures = home / "figures"
    make_folder(figures)
    names = {f"{figure.name}.{kind}" for figure in document.figures for kind in pictures.KINDS}
    for stale in (path for kind in pictures.KINDS for path in figures.glob(f"*.{kind}")):
        if stale.name not in names:
            stale.unlink()
    pictures.save(document.figures, figures)
    (home / "page.html").write_text(html(document, links))
    (home / "README.md").write_text(markdown(document))
