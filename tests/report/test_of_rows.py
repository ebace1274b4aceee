"""A throwaway paper whose items are each a declaration and at most one function from rows to rows; and what an item may not name."""

import dataclasses
import shutil
from collections import Counter
from pathlib import Path

import pytest

from dpx.declaration import ConfigError
from dpx.job.report import Report
from dpx.pages.page_document import html, markdown
from dpx_papers.report import of_rows, page, paper, rows
from dpx_papers.supplied import report_of_papers
from tests.outside.made_up import on_path, record
from tests.report import made

PUDDLE = Path(__file__).parent / "dpx_puddle"
ITEM = "title: T\nheadline: heldout/loss\ncolumns: {heldout/loss: loss}\nitems:\n  - {number: D1, experiment: D1, title: T, %s}\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder of the paper, with runs; its package is installed for this module."""
    root = tmp_path_factory.mktemp("puddle")
    (root / "site").mkdir()
    (root / "site" / "dpx_puddle").symlink_to(PUDDLE)
    record(root / "site", "dpx_puddle", "0.1")
    home = root / "evidence" / "puddle"
    shutil.copytree(PUDDLE, home, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    lengths = [(steps, replicate) for steps in (10, 20, 40) for replicate in range(2)]
    runs = [made.run("puddle_runs", n / 100 + again / 1000, again, snr=lambda step: 1 / step, steps=n) for n, again in lengths]
    runs = [dataclasses.replace(run, run=f"run{number}") for number, run in enumerate(runs)]
    rows.write(home / "results.csv", runs)
    with on_path(root / "site"):
        yield home


def test_fifteen_made_up_items_take_under_two_hundred_lines(home):
    assert sum(len(path.read_text().splitlines()) for path in PUDDLE.glob("*.py")) < 200
    declared = paper.read(home)
    states = {item.number: page.verdict(item, page.evidence(declared, home)).state for item in declared.items}
    assert len(states) == 15 and Counter(states.values()) == {"pass": 13, "fail": 1, "not run": 1}, states
    assert states["D6"] == "fail" and states["D15"] == "not run"
    report_of_papers(Report(paper="puddle", collect=False, evidence=str(home.parent)))
    written = (home / "README.md").read_text()
    assert all(f"## {item.number}. {item.title}" in written for item in declared.items) and "ours (published): 0.085 (0.085)" in written
    assert {path.name for path in (home / "figures").glob("puddle-noise.*")} == {f"puddle-noise.{kind}" for kind in ("svg", "png", "pdf")}


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("kind: rows", ["D1.kind=rows: an item of this kind is made from rows", "rows: <file>.csv"]),
        ("kind: computed, rows: measured.csv", ["D1.kind=computed: no item of this kind"]),
        ("kind: planned, function: dpx_puddle.means", ["D1.function=dpx_puddle.means: no item of this kind"]),
        ("kind: rows, rows: nowhere.csv", ["D1.rows=nowhere.csv: there are no such rows", "finals, curves, published"]),
        ("kind: rows, rows: ../puddle/measured.csv", ["there are no such rows"]),
        ("kind: rows, rows: measured.csv, function: os.system", ["D1.function=os.system: os is not an installed package"]),
        ("kind: rows, rows: measured.csv, function: dpx.durable.make_folder", ["is not a function of rows"]),
        ("kind: rows, rows: measured.csv, function: dpx_puddle.np.load", ["cannot be loaded"]),
        ("kind: rows, rows: measured.csv, function: dpx_puddle.mean", ["cannot be loaded", "mean"]),
        ("kind: rows, rows: measured.csv, function: means", ["is not the name of a function"]),
        ("kind: rows, rows: empty.csv", ["D1.rows=empty.csv: is no table"]),
        ("kind: rows, rows: letters.csv", ["D1.rows=letters.csv: is no table"]),
        ("kind: rows, rows: ragged.csv", ["D1.rows=ragged.csv: is no table", "line 3"]),
        ("kind: rows, rows: noise.csv, function: dpx_puddle.means", ["D1.rows=noise.csv: dpx_puddle.means failed", "KeyError"]),
    ],
)
def test_what_is_wrong_with_an_item_is_one_line(home, tmp_path, item, words):
    shutil.copytree(home, tmp_path / "puddle", dirs_exist_ok=True)
    for name, content in {"empty": b"", "letters": b"a,b\n\xff,1\n", "ragged": b"a,b\n1,2\n1,2,3\n"}.items():
        (tmp_path / "puddle" / f"{name}.csv").write_bytes(content)
    (tmp_path / "puddle" / "paper.yaml").write_text(ITEM % item)
    with pytest.raises(ConfigError) as refused:
        page.evidence(paper.read(tmp_path / "puddle"), tmp_path / "puddle")
    line = str(refused.value)
    assert "\n" not in line and [word for word in words if word not in line] == []


def test_a_gap_of_a_table_is_nothing_and_no_number(home):
    table = of_rows.table(paper.read(home).items[0], page.evidence(paper.read(home), home))
    assert table is not None and table.rows[0] == ("a", "plain", None, 0.9)


def test_hostile_cells_of_a_table_are_text_on_the_page(home, tmp_path):
    shutil.copytree(home, tmp_path / "puddle", dirs_exist_ok=True)
    (tmp_path / "puddle" / "bad.csv").write_text('a,<b>x</b>|\n"<script>alert(1)</script>",1\n"| x |","[a](http://example.org)"\n')
    (tmp_path / "puddle" / "paper.yaml").write_text(ITEM % "kind: rows, rows: bad.csv")
    declared = paper.read(tmp_path / "puddle")
    document = page.document(declared, page.evidence(declared, tmp_path / "puddle"))
    for text in (html(document), markdown(document)):
        assert "<script" not in text and "<b>x" not in text and 'href="http' not in text and "alert(1)" in text
    assert "](http" not in markdown(document)
