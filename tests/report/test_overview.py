"""The page of all items, the page of a run, and runs side by side."""

import base64
import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from dpx.declaration import ConfigError
from dpx.pages import run_page
from dpx.pages.analysis_tables import Table
from dpx.pages.page_document import Document, Figure, Panels, Section, html
from dpx_papers.report import overview, page, rows
from tests.report import made

PAPERS = sorted(path.parent.name for path in made.EXPERIMENTS.glob("*/paper.yaml"))
RUNS = [
    *made.replicates("anil_epsilon_sweep", [0.1, 0.12], noise__epsilon=1.08),
    *made.replicates("anil_epsilon_sweep", [0.2, 0.22], noise__epsilon=5.36),
]


def _drawn(page: str) -> str:
    """The figures in a page, as SVG."""
    return "".join(base64.b64decode(one).decode() for one in re.findall('src="data:image/svg\\+xml;base64,(.*?)"', page))


def test_every_item_of_every_paper_is_on_one_page(tmp_path: Path) -> None:
    papers = []
    for name in PAPERS:
        (tmp_path / name).mkdir()
        shutil.copy(made.EXPERIMENTS / name / "published.csv", tmp_path / name)
        rows.write(tmp_path / name / "results.csv", RUNS if name == "anil2021" else [])
        papers.append(overview.judged(made.declared(name), page.evidence(made.declared(name), tmp_path / name)))
    text = html(overview.document(papers))
    numbers = [(name, item.number) for name in PAPERS for item in made.declared(name).items]
    links = [f"{name}/page.html#{number.lower()}" for name, number in numbers]
    assert [link for link in links if f'href="{link}"' not in text] == []
    assert 'href="anil2021/page.html#runs">4 runs</a>' in text
    assert f"{len(numbers)} items of {len(PAPERS)} papers" in text and len(numbers) >= 81
    assert "<script" not in text and "http" not in text.replace("http://www.w3.org", "").replace("http-equiv", "")


def test_epsilon_is_that_of_the_runs_own_accountant() -> None:
    first, second = RUNS[0], RUNS[-1]
    with_pld = dataclasses.replace(first, facts=first.facts | {"epsilon/pld": "0.5", "epsilon/rdp": "1.08"})
    assert run_page.privacy([with_pld, second]) == "dp; ε 1.08 to 5.36 (rdp); unit row; delta 1e-06"
    assert run_page.privacy([]) == "nothing is spent"
    plain = made.run("anil_nonprivate_baseline", 0.5, mechanism="NoPrivacy")
    assert run_page.privacy([dataclasses.replace(plain, facts={"guarantee": "not_private"})]) == "not_private"


CURVES = {"grad/snr": ((1, 0.5), (2, 0.25)), "heldout/loss": ((1, 6.0), (2, 5.0))}


def test_the_page_of_a_run_has_words_epsilon_curves_and_config() -> None:
    run = made.run("anil_epsilon_sweep", 0.2, curves=CURVES, noise__epsilon=5.36)
    words = ["How well: a factor,", "  except rarely.", "What is assumed:", "  - the key stays <secret>"]
    by_step = Table(run_page.AS_STEPS_GO, ("steps", "rdp", "gdp"), ((1, 0.5, None), (2, 0.75, None)), "epsilon by step")
    document = run_page.document(run, "Guarantee: epsilon 5.36. It is <small>.", words, [by_step])
    assert [figure.name for figure in document.figures] == ["heldout_loss", "grad_snr", "epsilon"]
    assert document.lead[0] == "Guarantee: epsilon 5.36. It is &lt;small&gt;."
    text = html(document)
    assert "How well: a factor, except rarely." in text and "the key stays &lt;secret&gt;" in text
    assert "0.75" in text and "<code>noise.epsilon</code>" in text and "<script" not in text


def test_runs_side_by_side_show_what_differs() -> None:
    runs = [made.run("anil_epsilon_sweep", 0.2, curves=CURVES, noise__epsilon=epsilon) for epsilon in (1.08, 5.36)]
    runs = [dataclasses.replace(run, run=f"run{number}") for number, run in enumerate(runs)]
    results, curves, settings, numbers = run_page.comparison(runs).sections
    assert "| run | `noise.epsilon` |" in str(settings.blocks[0]) and "| laptop_anil_epsilon_sweep-run0 | `1.08` |" in str(
        settings.blocks[0]
    )
    assert "| `laptop_anil_epsilon_sweep-run1` | epsilon=5.36 |" in str(results.blocks[0]) and len(numbers.blocks) == 1
    (panels,) = curves.blocks
    assert isinstance(panels, Panels) and [one.name for one in panels.figures] == ["heldout_loss", "grad_snr"]
    text = html(run_page.comparison(runs), {"laptop_anil_epsilon_sweep-run0": "../a&b/page.html"})
    assert text.count('<a href="../a&amp;b/page.html"><code>laptop_anil_epsilon_sweep-run0</code></a>') == 1


def test_all_pictures_of_several_runs_share_one_legend_that_names_what_differs() -> None:
    runs = [made.run("anil_epsilon_sweep", 0.2, curves=CURVES, noise__epsilon=epsilon) for epsilon in (1.08, 5.36)]
    runs = [dataclasses.replace(run, run=f"run{number}") for number, run in enumerate(runs)]
    text = html(run_page.comparison(runs))
    drawn = _drawn(text)
    assert [drawn.count(f">epsilon={epsilon}</text>") for epsilon in ("1.08", "5.36")] == [1, 1] and "run0" not in drawn
    # The second run alone has a loss, and keeps the colour of the legend.
    first = dataclasses.replace(runs[0], curves={"grad/snr": CURVES["grad/snr"]})
    panels = run_page.comparison([first, runs[1]]).sections[1].blocks[0]
    assert isinstance(panels, Panels)
    assert b"stroke: #c44e00" in panels.figures[0].drawn("svg") and b"stroke: #0060a0" not in panels.figures[0].drawn("svg")


def test_runs_of_several_experiments_are_named_by_them_and_many_settings_are_rows() -> None:
    keys: dict[str, Any] = {f"data__key_{number}": "a value that is far too long for a legend" for number in range(8)}
    first = made.run("anil_epsilon_sweep", 0.2, curves=CURVES, noise__epsilon=5.36)
    second = made.run("anil_batch_sweep", 0.2, curves=CURVES, noise__epsilon=1.08, **keys)
    runs = [
        first,
        *(dataclasses.replace(second, run=f"run{epsilon}", config={**second.config, "noise.epsilon": epsilon}) for epsilon in "12"),
    ]
    text = html(run_page.comparison(runs))
    for name in ("laptop_anil_epsilon_sweep", "laptop_anil_batch_sweep, epsilon=1", "laptop_anil_batch_sweep, epsilon=2"):
        assert f">{name}</text>" in _drawn(text)
    assert "<th>setting</th>" in text and '<td data-column="setting"><code>noise.epsilon</code></td>' in text


def test_a_figure_of_several_plots_is_scrolled_and_one_of_a_single_plot_is_not() -> None:
    drawn = [f'<svg viewBox="0 0 {width} 237.6"></svg>'.encode() for width in ("352.8", "705.6")]
    figures = [Figure("one", "words", {"svg": one}.__getitem__) for one in drawn]
    text = html(Document("Title", [], [Section("S", figures, "s")]))
    scrolled = re.findall(r'<div class="wide several" tabindex="0"><img src="data:image/svg\+xml;base64,(.*?)"', text)
    assert [base64.b64decode(one) for one in scrolled] == drawn[1:] and text.count('class="wide several"') == 1


def test_a_page_says_what_was_learnt_beside_what_needs_no_learning_and_rounds() -> None:
    run = made.run("anil_epsilon_sweep", 0.2)
    finals = {"heldout/accuracy": 0.75, "heldout/rows": 64.0, "baseline/most_frequent_class": 0.5}
    facts = run.facts | {"epsilon/rdp": "5.3599998765432109", "noise_multiplier": "0.61234567890123456"}
    curves = {"heldout/accuracy": ((1, 0.5), (2, 0.75)), "train/loss": ((1, 0.7), (2, 0.6))}
    document = run_page.document(dataclasses.replace(run, finals=finals, facts=facts, curves=curves), "Guarantee: dp.", [], [])
    assert (
        document.lead[1] == "Accuracy on held-out rows: 75.00% (63.2% to 84.0%, 64 rows); without learning 50.00% "
        "(always answering the most frequent class)."
    )
    assert [(one.name, one.caption) for one in document.figures] == [
        ("heldout_accuracy", "Accuracy on held-out rows; dotted: always answering the most frequent class."),
        ("train_loss", "Loss of the rows that a step drew."),
    ]
    text = re.sub("<img.*?>", "", html(document))
    assert "5.360" in text and "0.612" in text and not re.search(r"\d\.\d{6}", text)


def test_a_run_that_has_not_finished_has_no_page(tmp_path: Path) -> None:
    (tmp_path / "main-1").mkdir()
    with pytest.raises(ConfigError, match="main-1: not finished, or not readable"):
        run_page.read(tmp_path / "main-1")
