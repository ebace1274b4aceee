"""What the committed evidence of each paper shows: every item's verdict, and what its page must not lose."""

import functools
import re

import pytest

from dpx_papers.report import all_verdicts, overview, page, paper
from dpx_papers.report.evidence import Evidence
from tests.report.made import EXPERIMENTS, declared

# Items that do not pass; every other item passes.
OTHERS = {
    "anil2021": dict.fromkeys(("A3", "A4", "A9", "A10"), "fail") | dict.fromkeys(("A11", "A13"), "arithmetic"),
    "mckenna2025": dict.fromkeys(("M4", "M7", "M9", "M10", "M11", "M12", "M13", "M14", "M15", "M17", "M18", "M19", "M24", "M27"), "fail")
    | dict.fromkeys(("M2", "M16", "M21", "M29"), "arithmetic"),
    "du2021": dict.fromkeys(("F3", "F4", "F5", "F6", "F8", "F9", "F12", "F13", "F14", "F15", "F20"), "fail"),
    "yin2022": dict.fromkeys(("L1", "L2", "L7", "L9", "L12", "L13"), "fail") | {"L11": "arithmetic"},
}
# Of the claims of an item that fails, these fail.
CLAIMS = {"A4": [3, 4], "A9": [1]}


@functools.cache
def found(name: str) -> Evidence:
    return page.evidence(declared(name), EXPERIMENTS / name)


@pytest.mark.parametrize(("name", "count"), [("anil2021", 13), ("mckenna2025", 32), ("du2021", 21), ("yin2022", 15)])
def test_every_item_has_the_verdict_of_its_evidence(name: str, count: int) -> None:
    states = {item.number: page.verdict(item, found(name)).state for item in declared(name).items}
    assert len(states) == count and list(states) == sorted(states, key=lambda number: int(number[1:]))
    assert {number: state for number, state in states.items() if state != "pass"} == OTHERS[name]


@pytest.mark.parametrize("name", OTHERS)
def test_the_committed_page_has_every_verdict_published_number_note_and_figure(name: str) -> None:
    home = EXPERIMENTS / name
    text = (home / "README.md").read_text()
    signs = {"pass": "✅ pass", "fail": "❌ fail", "not run": "◻️ not run", "arithmetic": "arithmetic"}
    for item in declared(name).items:
        (line,) = re.findall(rf"^\| \[{item.number}\].*$", text, re.MULTILINE)
        assert line.endswith(f"| {signs[page.verdict(item, found(name)).state]} |") and f"## {item.number}. {item.title}" in text
    for line in found(name).published:
        assert line.quantity in text and line.note in text and (line.value in text or f"{int(line.value):,}" in text)
    assert all(note in text for notes in found(name).notes.values() for note in notes)
    drawn = {path.name for path in (home / "figures").glob("*.svg")}
    assert drawn and drawn == set(re.findall(r"figures/([\w-]+\.svg)", text))


@pytest.mark.parametrize("name", OTHERS)
def test_every_claim_is_in_published_csv_with_its_place_or_is_ours(name: str) -> None:
    for item in declared(name).items:
        for size, judged in page.verdicts(item, found(name)).items():
            assert all(part.says == "ours" or part.says.endswith(")") for part in judged.parts), (item.number, size)
        for rule in item.verdict:
            assert rule.says or rule.scale == "full" or rule.__class__.__name__ == "Agrees", item.number


@pytest.mark.parametrize("name", OTHERS)
def test_a_verdict_says_on_how_many_runs_it_rests(name: str) -> None:
    text = (EXPERIMENTS / name / "README.md").read_text()
    for item in declared(name).items:
        (line,) = re.findall(rf"^\| \[{item.number}\].*$", text, re.MULTILINE)
        assert f"| {page.in_runs(page.verdict(item, found(name)).repeats)} |" in line


def test_which_claims_of_an_item_fail() -> None:
    for number, failing in CLAIMS.items():
        (item,) = [item for item in declared("anil2021").items if item.number == number]
        states = [part.state for part in page.verdict(item, found("anil2021")).parts]
        assert [place for place, state in enumerate(states) if state == "fail"] == failing


@pytest.mark.parametrize("name", OTHERS)
def test_results_hold_no_metric_that_the_paper_drops(name: str) -> None:
    assert all(declared(name).shown(run) == run for run in found(name).runs)


def test_every_paper_that_has_a_page_is_declared() -> None:
    homes = [path.parent for path in EXPERIMENTS.glob("*/paper.yaml")]
    assert {home.name for home in homes} >= set(OTHERS)
    numbers = [(home.name, item.experiment) for home in homes for item in paper.read(home).items]
    assert len(numbers) == len(set(numbers)), "one item for each experiment"


def test_the_table_of_all_items_is_that_of_their_verdicts() -> None:
    names = sorted(path.parent.name for path in EXPERIMENTS.glob("*/paper.yaml"))
    papers = [overview.judged(declared(name), found(name)) for name in names]
    text = all_verdicts.text(papers, EXPERIMENTS)
    assert (EXPERIMENTS / "verdicts.md").read_text() == text
    assert len(re.findall(r"^\| \[[AMFL]\d+\]", text, re.MULTILINE)) == 81 and "Before: 52 pass, 29 fail." in text
