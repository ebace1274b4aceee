"""Pages are data: every value of a record that they show is text there, and changes no tag, attribute or link."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table as RichTable

from dpx import console
from dpx.pages import pictures, run_page
from dpx.pages.analysis_tables import Arrows, Cells, Lines, Picture, Table
from dpx.pages.page_document import Document, Section, code, escaped, grid, html, items, markdown
from dpx.pages.read_runs import KIND, Run
from dpx_papers.report import overview, page, stages
from dpx_papers.report.evidence import Evidence
from tests.report import made

HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)><a b='",
    "' onmouseover='alert(1)' x=\"y",
    "![i](http://example.org/x.png) [a](http://example.org) [b](javascript:alert(1)) <http://example.org>",
    "[a]: http://example.org 'x'",
    "`code` ``two`` **strong** _word_ *word* ~~gone~~ a_b_c",
    "| a | b |\n| --- | --- |\n| c | d |",
    "</details></td></table></body><h1>",
    "\n\n# heading\n\n<div onclick='x'>\n\n<!--",
    "&lt;script&gt; &amp; &#60; &",
    "$\\frac{1}{0}$ \\",
    "✅ <b> ❌",
    "1. first",
    "- item",
    "    code",
    "url(http://example.org) import 'x' </style></title>",
    "a\u202eb\x00c",
)


class _Seen(HTMLParser):
    """The tags with their attributes, in order, and the text between them."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[Any] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # What an attribute of the closed list says is text; which attributes there are is not.
        shown = {"data-column", "aria-label", "href", "id"}
        self.tags.append((tag, tuple(name if name in shown else (name, value) for name, value in attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        self.words += data


def _without_figures(text: str) -> str:
    return re.sub(r"<img[^>]*>", "", text)


def _shown(text: str) -> str:
    """The text as a page shows it: one line."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _run(text: str, number: int = 0) -> Run:
    """A run with `text` in every field that is text."""
    listed = json.dumps([f"vocabulary {text}"])
    facts = dict.fromkeys(("guarantee", "unit", "adjacency", "seconds", "commit", "corpus", "noise_multiplier", "declared_size"), text)
    facts |= {"noise_multiplier": "1.5", "delta": "1e-6", "accountant": f"rdp{text}", f"epsilon/rdp{text}": "2.0"}
    facts |= {"protects": listed, "reasons": listed, "assumptions": listed}
    facts["unsupported"] = json.dumps([{"name": text, "value": 1.0, "reason": text}])
    config = {
        f"key {text}": text,
        "sampler": text,
        "sampler.assumed": text,
        "optimizer.weight_decay": str(number),
        "mechanism": "DpSgd",
        "steps": "100",
    }
    falling = tuple((step, 1 / step) for step in range(1, 101))
    finals, curves = {"heldout/mlm_accuracy": 0.25, f"heldout/{text}": 0.5}, {"heldout/loss": falling, "grad/snr": falling}
    # The name of a parameter, with its norm before and after.
    finals[f"weights/{text}/kernel"], curves[f"weights/{text}/kernel"] = 0.5, ((1, 0.25),)
    return Run("laptop_anil_weight_decay", f"{number}{text}", text, number, config, facts, finals, curves)


def _chain(text: str) -> Run:
    """A chain with `text` in every field that is text."""
    facts = {"kind": KIND, "guarantee": text, "protects": json.dumps([text]), f"epsilon/{text}": "200.0"}
    stage = f"one{text}"
    facts |= {f"{stage}/metric": f"f1{text}", f"{stage}/guarantee": text, f"{stage}/before": text, f"{stage}/chosen": text}
    facts |= {f"{stage} (a{text})/metric": f"f1{text}", f"{stage} (a{text})/guarantee": text, f"{stage} (a{text})/before": text}
    finals = {f"{label}/heldout/f1{text}": 0.5 for label in (stage, f"{stage} (a{text})")}
    finals |= {f"{label}/before": 0.5 for label in (stage, f"{stage} (a{text})")}
    return Run("laptop_legal_best", text, text, 0, {}, facts, finals, {})


def _tables(text: str) -> list[Table]:
    by_step = Table(run_page.AS_STEPS_GO, ("steps", "rdp"), ((1, 0.5), (2, 0.75)), f"by step {text}")
    return [by_step, Table(f"other {text}", ("number", f"more {text}", "words"), ((1, None, text), (2, 0.75, text)), text)]


def _documents(text: str, evidence: Path) -> list[Document]:
    """Every page, with `text` wherever a record has text."""
    runs, tables = [_run(text, number) for number in range(2)], _tables(text)
    declared = made.declared("anil2021")
    (item,) = [item for item in declared.items if item.experiment == "anil_weight_decay"]
    rule: Any = dataclasses.replace(item.verdict[0], value="heldout/mlm_accuracy", where={}, by=f"key {text}")
    declared = dataclasses.replace(declared, items=(dataclasses.replace(item, verdict=(rule,)),))
    found = Evidence(evidence, runs, [], {"anil_weight_decay": {"other": tables[1]}}, {})
    words = [f"What is protected: {text}", f"  except {text}", f"  - {text}", f"said: {text}"]
    chains = Document(text, [], [Section(text, stages.tables([_chain(text)]), "chains"), Section("p", [_told(text)], "p")])
    whole = Document(
        text, [escaped(text), code(text)], [Section(text, [items([escaped(text)], text), grid((escaped(text),), [], text)], "a")]
    )
    return [
        run_page.document(runs[0], f"said: {text}", words, tables),
        run_page.comparison(runs),
        page.document(declared, found),
        overview.document([overview.judged(declared, found)]),
        chains,
        whole,
    ]


def _told(text: str) -> Any:
    from dpx_papers.report import privacy

    return items(privacy.lines([_chain(text), _run(text)]))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [html(one, {}) for one in _documents("word", tmp_path_factory.mktemp("evidence"))]


# Of the same kind as one that stays: a tag that ends, a tag, an item of a list, and the end of a style.
SAME = (7, 11, 13, 15)


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.slow] * (n in SAME)) for n in range(len(HOSTILE))])
def test_hostile_text_in_every_field_of_every_record_is_text(plain: list[str], number: int, tmp_path: Path) -> None:
    text = HOSTILE[number]
    documents = _documents(text, tmp_path)
    pages = [html(one, {f"laptop_anil_weight_decay-0{text}": f"../{text}/page.html"}) for one in documents]
    for document, made_page, expected in zip(documents, pages, plain, strict=True):
        seen, same = _Seen(_without_figures(made_page)), _Seen(_without_figures(expected))
        own = [tag for tag in seen.tags if tag not in (("a", ("href",)), "/a")]
        assert own == [tag for tag in same.tags if tag not in (("a", ("href",)), "/a")], document.title
        assert _shown(text) in " ".join(seen.words.split())
        assert "http-equiv" in made_page and "\u202e" not in made_page


# Tags, an entity, a formula, letters that no font has, and what IN_PICTURES adds. Others are slow, since a figure takes half a second.
DRAWN = (0, 9, 10, 16, 17, 18, 19)


def drawn_of(texts: tuple[str, ...]) -> Any:
    """One parameter `text` for each of `texts`, by its number."""
    given = [pytest.param(text, marks=() if n in DRAWN else pytest.mark.slow) for n, text in enumerate(texts)]
    return pytest.mark.parametrize("text", given, ids=range(len(texts)))


# A legend of such a name leaves no room, and has letters that few fonts have.
@pytest.mark.filterwarnings("ignore:constrained_layout not applied", "ignore:Glyph")
@drawn_of(HOSTILE)
def test_hostile_text_in_figures_is_text(text: str, tmp_path: Path) -> None:
    figures = [figure for document in _documents(text, tmp_path) for figure in document.figures]
    assert figures
    for figure in figures:
        drawn = ElementTree.fromstring(figure.drawn("svg").decode().split("\n", 1)[1])
        assert not {one.tag.rpartition("}")[2] for one in drawn.iter()} & {"script", "image", "a", "foreignObject"}


IN_PICTURES = (*HOSTILE, "$\\bad{$ and $x^2$", "_hidden", "a" * 100_000)


@pytest.mark.filterwarnings("ignore:constrained_layout not applied", "ignore:Glyph")
@drawn_of(IN_PICTURES)
def test_hostile_text_in_every_place_of_a_picture_is_text(text: str) -> None:
    """Titles, labels of axes, categories, names of columns, and values in a legend."""
    rows = tuple((step, value, f"{value}{text}", step / 10, 0.1) for step in (1, 2) for value in (text, f"{text} 2"))
    table = Table("t", ("step", f"by {text}", text, f"loss {text}", "gain"), rows)
    words: Any = {"title": text, "x_label": text, "y_label": text, "table": "t"}
    panels = (
        Lines(x=text, by=f"by {text}", y=(f"loss {text}",), x_scale="category", **words),
        Lines(x=("step", text), marks=(f"loss {text}",), y=("gain",), names=((f"loss {text}", text),), x_scale="category", **words),
        Cells(x="step", y=text, value="gain", **words),
        Arrows(x=f"by {text}", y="step", right="gain", up="gain", **words),
    )
    (figure,) = pictures.draw([Picture("p", text, panels)], [table])
    for drawn in (figure, pictures.legend("l", text, [text, f"{text} 2"])):
        written = drawn.drawn("svg").decode()
        root = ElementTree.fromstring(written.split("\n", 1)[1])
        assert not {one.tag.rpartition("}")[2] for one in root.iter()} & {"script", "image", "a", "foreignObject"}
        assert not [name for one in root.iter() for name in one.attrib if name.startswith("on")]
        assert len(written) < 500_000
    words_of = "".join(ElementTree.fromstring(figure.drawn("svg").decode().split("\n", 1)[1]).itertext())
    assert _shown(text)[:20].split()[0] in words_of


def test_text_of_a_record_moves_no_cursor_of_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\x1b]0;owned\x07\x1b[2Ja\r\x9bb\u202ec\ud800d\n"
    table = RichTable(text, "column")
    table.add_row(text)
    console.tell(text)
    console.stage(text)
    for shown in (text, table):
        console.Console(width=400).print(shown)
    out, err = capsys.readouterr()
    for written in (out, err):
        assert written.count("\\x1b]0;owned\\x07\\x1b[2Ja\\r\\x9bb\\u202ec\\ud800d") == 2 + (written == out)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800]", written)


def test_a_page_may_do_nothing_and_links_lead_to_files_beside_it() -> None:
    blocks = ["[near](../main-1/page.html#curves) [here](#a) [far](http://example.org) [far](//example.org) [run](javascript:x) [f](/etc)"]
    text = html(Document("t", [], [Section("s", blocks, "a")]))
    assert re.findall(r'href="([^"]*)"', text) == ["data:,", "#a", "../main-1/page.html#curves", "#a"]
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    assert text.index(f'<meta http-equiv="Content-Security-Policy" content="{policy}">') < text.index("<style>")


@pytest.mark.parametrize("text", ["plain words, 0.5 % (n = 3) [1.0 to 2.0; 5 rows]", "alpha * gradient", "zero_out", "a & b's"])
def test_usual_words_are_written_as_they_are(text: str) -> None:
    assert escaped(text).replace("&amp;", "&") == text
    assert code(text) == f"`{text}`"


def test_the_readme_of_a_page_has_the_same_text() -> None:
    for text in HOSTILE:
        document = Document(text, [escaped(text)], [Section(text, [items([code(text)], text)], "a")])
        written = markdown(document)
        assert "<script" not in written.replace(code(text), "") and "](http" not in written.replace(code(text), "")
