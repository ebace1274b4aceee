"""The page of made-up runs: complete, self-contained, rebuilt from the two CSV files alone, the same each time."""

import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from dpx import config
from dpx.config import recipes
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.job.report import Report
from dpx.pages.page_document import Document, Folded, Section, grid, html, items
from dpx.pages.read_runs import Run
from dpx_papers.report import page, rows
from dpx_papers.report.evidence import Evidence
from dpx_papers.report.sizes import FULL
from tests.report import made

HOME = made.EXPERIMENTS / "anil2021"


RUNS = [
    *made.sweep({16: ([0.1, 0.11], 1.0), 64: ([0.2, 0.21], 2.0), 256: ([0.05, 0.06], 4.0)}),
    *made.schedule([0.28, 0.3, 0.32]),
    *made.replicates("anil_epsilon_sweep", [0.1, 0.12], noise__epsilon=1.08),
    *made.replicates("anil_epsilon_sweep", [0.2, 0.22], noise__epsilon=5.36),
    made.run("anil_nonprivate_baseline", 0.5, mechanism="NoPrivacy"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The evidence folder of a paper after `job=report report.collect=false`."""
    found = tmp_path_factory.mktemp("evidence") / "anil2021"
    found.mkdir()
    for name in ("paper.yaml", "published.csv"):
        shutil.copy(HOME / name, found)
    rows.write(found / "results.csv", RUNS)
    (found / "notes.csv").write_text("item,note\nA7,the largest batch was <stopped> early\n")
    _report(found)
    return found


def _report(home: Path) -> None:
    experiment, job = config.build(recipes.compose(["job=report", "report.collect=false", f"report.evidence={home.parent}"]))
    job(experiment, RunFolder(home / "unused"))


def test_page_asks_the_network_for_nothing(home: Path) -> None:
    text = (home / "page.html").read_text()
    assert not re.search(r"<(script|iframe|img (?!src=\"data:image/svg)|link(?! rel=\"icon\" href=\"data:))", text)
    assert not re.search(r"(src|href)=\"(?!#|data:|(results|published)\.csv)", text) and "@import" not in text
    assert not re.search(r"url\((?!#)", text)


def test_ids_are_unique_and_every_reference_leads_somewhere(home: Path) -> None:
    text = (home / "page.html").read_text()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', text)) | set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)


def test_every_published_number_and_verdict_is_on_both_pages(home: Path) -> None:
    html, markdown = (home / "page.html").read_text(), (home / "README.md").read_text()
    for line in rows.read_published(home / "published.csv"):
        assert line.quantity in markdown and line.quantity.replace("&", "&amp;") in html
    for number in range(1, 14):
        assert f'id="a{number}"' in html and f"## A{number}. " in markdown
    assert all(sign in markdown for sign in ("❌ fail", "✅ pass", "◻️ not run"))
    assert all(sign in html for sign in ("✗</b> fail", "✓</b> pass", "○ not run"))
    assert "the largest batch was &lt;stopped&gt; early" in html


def test_figures_are_svg_without_variables_and_each_is_png_and_pdf_too(home: Path) -> None:
    figures = sorted((home / "figures").glob("*.svg"))
    assert {"anil-figure-2.svg", "anil-figure-3.svg", "anil-figure-4.svg"} <= {path.name for path in figures}
    for path in figures:
        ElementTree.parse(path)
        text = path.read_text()
        assert "var(" not in text and "<metadata" not in text
        assert path.with_suffix(".png").is_file() and path.with_suffix(".pdf").is_file()
        assert f"figures/{path.name}" in (home / "README.md").read_text()


def test_page_rebuilds_to_the_same_bytes(home: Path) -> None:
    before = {path.name: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    _report(home)
    assert {path.name: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before


def _ours(line: rows.Published, runs: list[Run]) -> str:
    (item,) = [item for item in made.declared("anil2021").items if item.number == line.item]
    return page.ours(line, item, Evidence(HOME, runs).at(FULL))


def test_full_scale_is_a_cost_until_it_runs(home: Path) -> None:
    line = next(line for line in rows.read_published(home / "published.csv") if line.experiment == "anil_2m_batch")
    assert _ours(line, RUNS) == "not run (7,616 H200 hours, 1.08e22 FLOPs)"
    laptop = made.run("anil_2m_batch", 0.61)
    assert _ours(line, [laptop]).startswith("not run"), "a laptop run is never shown in the column of full scale"
    full = Run("anil_2m_batch", "0", "-", 0, {}, {}, {"heldout/mlm_accuracy": 0.61}, {})
    assert _ours(line, [full]) == "61 %"


def test_a_cost_is_hours_minutes_or_a_range() -> None:
    costs = [page.not_run(hours) for hours in (0, 0.1, 1, 7616.0, "15-30")]
    assert costs == [
        "not run (no cost)",
        "not run (minutes of one H200)",
        "not run (1 H200 hour)",
        "not run (7,616 H200 hours)",
        "not run (15-30 H200 hours)",
    ]


def test_growth_of_every_matrix_by_weight_decay() -> None:
    curves, finals = {"weights/mlm/transform/kernel": ((1, 2.0),)}, {"weights/mlm/transform/kernel": 3.0}
    runs = made.replicates("anil_weight_decay", [0.1, 0.2], curves=curves, finals=finals, optimizer__weight_decay=0.5)
    (table,) = page._norms(runs, "optimizer.weight_decay")
    assert isinstance(table, Folded) and table.text.splitlines()[0] == "| matrix | optimizer.weight_decay = 0.5 |"
    assert "| `mlm/transform/kernel` | 1.5 |" in table.text
    assert page._norms([], "optimizer.weight_decay") == []


def test_numbers_of_a_point_are_compared_as_numbers(home: Path) -> None:
    line = next(line for line in rows.read_published(home / "published.csv") if line.point == "noise.epsilon=2.0")
    full = Run("anil_epsilon_sweep", "0", "-", 0, {"noise.epsilon": "2"}, {}, {"heldout/mlm_accuracy": 0.4}, {})
    other = Run("anil_epsilon_sweep", "1", "-", 0, {"noise.epsilon": "3"}, {}, {"heldout/mlm_accuracy": 0.9}, {})
    assert _ours(line, [full, other]) == "40 %"


def test_published_numbers_are_marked(home: Path) -> None:
    lines = rows.read_published(home / "published.csv")
    assert {line.mark for line in lines} == {"text", "picture", "computed", "claim"}
    assert all(not line.value for line in lines if line.mark == "picture"), "nothing was digitised"
    assert {f"A{number}" for number in range(1, 14)} == {line.item for line in lines}
    with pytest.raises(ValueError, match="without a value"):
        rows.Published("A1", "x", "y", "", "%", "text", "", "", "", "0", "", "")
    with pytest.raises(ValueError, match="mark"):
        rows.Published("A1", "x", "y", "1", "%", "guess", "", "", "", "0", "", "")


def test_an_unknown_paper_is_refused(tmp_path: Path) -> None:
    experiment, _ = config.build(recipes.compose([]))
    with pytest.raises(ConfigError, match="There are anil2021, du2021, mckenna2025, yin2022, benchmarks"):
        Report(paper="nobody2020")(experiment, RunFolder(tmp_path))
    with pytest.raises(ConfigError, match="paper.yaml does not exist"):
        Report(paper="anil2021", evidence=str(tmp_path))(experiment, RunFolder(tmp_path))


def test_text_is_escaped() -> None:
    section = Section("a < b", [items(["`x<y>` **strong**"], "s"), grid(("c",), [("<b>",), ("pass",)])], "a")
    text = html(Document("t", ["l & m"], [section]))
    assert "<code>x&lt;y&gt;</code> <strong>strong</strong>" in text and '<td data-column="c">&lt;b&gt;</td>' in text
    assert "l &amp; m" in text and '<h2 id="a">a &lt; b</h2>' in text


def test_a_narrow_page_names_every_cell_by_its_column(home: Path) -> None:
    text = (home / "page.html").read_text()
    assert "@media (max-width: 40rem)" in text and "content: attr(data-column)" in text
    for table in re.findall(r"<table>.*?</table>", text, flags=re.S):
        columns = [re.sub(r"<[^>]+>", "", column) for column in re.findall(r"<th>(.*?)</th>", table)]
        for row in re.findall(r"<tr><td.*?</tr>", table, flags=re.S):
            assert re.findall(r'<td[^>]* data-column="([^"]*)"', row) == columns


def test_how_a_number_is_known_is_stated(home: Path) -> None:
    text = (home / "README.md").read_text()
    assert "| quantity | published | how we know |" in text and "| claim | what is found |" in text
    assert "printed in the text" in text and "stated without a number" in text and not re.search(r"\| mark \|", text)


def test_a_page_begins_with_the_papers_figure_and_every_item_is_folded_and_says_where_its_figures_are_from(home: Path) -> None:
    text, shown = (home / "README.md").read_text(), (home / "page.html").read_text()
    first = text.index("(figures/anil-figure-3-ends.svg)")
    assert first < text.index("## How to read this page") and text.index("(figures/anil-figure-3-ends.svg)", first + 1)
    made = (
        "[A7](#a7); `python -m dpx +experiment=laptop/anil_batch_sweep`; rows: [published.csv](published.csv), [results.csv](results.csv)."
    )
    assert made in text
    assert shown.count('<details class="section">') == 1 + len(re.findall(r"^## A\d+\. ", text, re.MULTILINE)) == 14
    (item,) = re.findall(r'<h2>A7\. [^<]*</h2>\n<details class="section"><summary>([^<]*)</summary>\s*<div id="a7">', shown)
    assert item == "❌ fail, laptop: 3 claims, 2 figures"
