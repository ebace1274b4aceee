"""One table of all items: the claim, the rule that judges it, the verdict before the rules spoke of the papers' own claims, and after."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dpx.declaration import require
from dpx.pages.page_document import escaped, grid
from dpx_papers.report import page, rows, rules, shape
from dpx_papers.report.overview import Judged
from dpx_papers.report.paper import Item
from dpx_papers.report.shape import Verdict

NAME = "verdicts"
_HEAD = """# Every item, what it claims and how it was judged

Written by `python -m dpx job=report report.paper=all` from `paper.yaml` of each paper and `verdicts.csv`. Before: the verdict of
26 November 2026, when a rule could ask for less than the paper claims, and “match” had no margin. After: by the rules of today, of which
each names the paper's own claim and its place, its margins in the paper's units, and the runs that it rests on. What cannot be false is
arithmetic, and is not counted.
"""


def text(papers: Sequence[Judged], evidence: Path) -> str:
    """Returns the page. Raises `ConfigError` for an item that verdicts.csv does not have."""
    lines = [line for _, line in rows.lines(evidence / f"{NAME}.csv", ("item", "before", "why"))]
    before = {line["item"]: line for line in lines}
    table, states = [], {"before": Counter[str](), "after": Counter[str]()}
    for one in papers:
        for item in one.paper.items:
            fix = f"Give its earlier verdict and the reason in {NAME}.csv"
            require(item.number in before, f"{one.found.home.name}.{item.number}", f"{NAME}.csv has no such item", fix)
            known, verdict = before[item.number], one.verdicts[item.number]
            states["before"][known["before"]] += 1
            states["after"][verdict.state] += 1
            title = f"[{item.number}]({one.found.home.name}/README.md) {escaped(item.title)}"
            cells = (_claims(verdict), _rules(item), known["before"], verdict.state, page.in_runs(verdict.repeats), escaped(known["why"]))
            table.append((title, *cells))
    counts = ". ".join(f"{name.capitalize()}: {_counted(count)}" for name, count in states.items())
    return f"{_HEAD}\n{counts}.\n\n{grid(('item', 'claims', 'rules', 'before', 'after', 'runs', 'why'), table)}\n"


def _counted(states: Counter[str]) -> str:
    return ", ".join(f"{states[state]} {state}" for state in (shape.PASS, shape.FAIL, shape.NOT_RUN, shape.ARITHMETIC) if states[state])


def _claims(verdict: Verdict) -> str:
    """Returns the claims that are counted, with the place of each in the paper; an item without such a claim has its others."""
    counted = [part for part in verdict.parts if part.state != shape.ARITHMETIC] or verdict.parts
    return "; ".join(f"{escaped(part.claim)} ({escaped(part.says or rules.OURS)}): {part.state}" for part in counted)


def _rules(item: Item) -> str:
    names = (type(rule).__name__.lower() for rule in item.verdict)
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))
