"""The page of all papers: each item with its verdict, its cost at full scale, what a laptop shows and its privacy, with a link."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dpx.pages.page_document import Document, Section, escaped, grid
from dpx.pages.run_page import privacy
from dpx_papers.report import page, shape
from dpx_papers.report.evidence import Evidence
from dpx_papers.report.paper import KINDS, Item, Paper
from dpx_papers.report.shape import Verdict
from dpx_papers.report.sizes import FULL, recipe_of

# A cell that is longer is cut; the paper's page has all of it.
LONGEST = 160


class Judged(NamedTuple):
    """A paper, its evidence, and the verdict of each item by its number."""

    paper: Paper
    found: Evidence
    verdicts: Mapping[str, Verdict]


def judged(paper: Paper, found: Evidence) -> Judged:
    """Returns the paper with every item judged."""
    return Judged(paper, found, {item.number: page.verdict(item, found) for item in paper.items})


def document(papers: Sequence[Judged]) -> Document:
    """Returns the page; its links lead to `<paper>/page.html` beside it."""
    states = Counter(verdict.state for one in papers for verdict in one.verdicts.values())
    total = sum(len(one.paper.items) for one in papers)
    counts = ", ".join(f"{states[state]} {state}" for state in (shape.PASS, shape.FAIL, shape.NOT_RUN, shape.ARITHMETIC))
    lead = [
        f"{total} items of {len(papers)} papers: {counts}.",
        "A verdict is that of the largest size that is judged: at laptop size it compares the order of our values with the paper's. What "
        "cannot be false is arithmetic, and is not counted. Cost is that of one H200 at half of 790 TFLOP/s. Made by "
        "`python -m dpx job=report report.paper=all`.",
        "The table of all runs at the end of a paper's page leads to the page of each run whose folder is here. "
        "`python -m dpx job=report 'report.runs=[first,second]'` sets runs side by side.",
    ]
    return Document("Every experiment of every paper", lead, [_section(one) for one in papers])


def _section(one: Judged) -> Section:
    columns = ("item", "recipe", "verdict", "runs", "full scale", "what is found", "privacy")
    lines = [_line(item, one) for item in one.paper.items]
    blocks = [
        f"[The page of this paper]({one.found.home.name}/page.html) has figures, published values and every run.",
        grid(columns, lines),
    ]
    return Section(one.paper.title, blocks, one.found.home.name)


def _line(item: Item, one: Judged) -> tuple[str, ...]:
    title = f"[{item.number}]({one.found.home.name}/page.html#{item.number.lower()}) {item.title}"
    verdict = one.verdicts[item.number]
    runs = [run for run in one.found.runs if recipe_of(run.experiment) == item.experiment]
    full = page.verdicts(item, one.found).get(FULL)
    cost = full.state if full is not None else page.not_run(item.hours) if item.kind == "trains" else KINDS[item.kind]
    shown = "; ".join(part.statistic for part in verdict.parts)
    counted = f"[{len(runs)} runs]({one.found.home.name}/page.html#runs): " if runs else ""
    repeats = page.in_runs(verdict.repeats)
    return (title, f"`{item.experiment}`", verdict.state, repeats, cost, counted + escaped(_cut(shown)), escaped(privacy(runs)))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1].rpartition(" ")[0] + " …"
