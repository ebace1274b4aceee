"""Pictures show columns of tables, in both themes and in pixels; the committed accounting tables draw what their analyses declare."""

import csv
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.style
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from dpx import config
from dpx.config import recipes
from dpx.job.report import Analyse
from dpx.pages import pictures
from dpx.pages.analysis_tables import Arrows, Cells, Lines, Picture, Table

EVIDENCE = Path(__file__).resolve().parents[2] / "experiments"
COMMITTED = sorted({path.parent for path in EVIDENCE.glob("*/accounting/*/*.svg")})
# One of each page with pictures of more than one kind.
QUICK = ("anil_accounting", "mckenna_fig4_vector_fields", "dpfp_prop1_noise_dimension")
# Its arithmetic is an analysis beside the recipe that trains.
OVERRIDES = {"anil_schedule_variants": ["job=analyse", "analysis=anil_schedule_savings"]}
GAINS = Table("gains", ("n", "m", "right", "up"), tuple((n, m, 0.5, 1.0) for n in (1, 2) for m in (1024, 2048)))
LINES = Table("lines", ("task", "x", "y", "published"), (("a", 1, 0.5, None), ("a", 2, 1.5, 2.0), ("b", 1, 0.25, 3.0), ("b", 2, 0.1, 1.0)))
PANELS = (
    Lines(table="lines", x="x", y=("y",), marks=("published",), by="task", x_scale="log", y_scale="log", names=(("y", "ours"),)),
    Lines(table="lines", x=("task", "x"), marks=("y",), x_scale="category", where={"task": "a"}),
    Arrows(table="gains", x="n", y="m", right="right", up="up"),
    Cells(table="gains", x="n", y="m", value="right"),
)


def test_every_kind_of_panel_is_drawn_as_svg_in_pixels_and_as_pdf() -> None:
    (figure,), (again,) = (pictures.draw([Picture("all", "All kinds.", PANELS)], [GAINS, LINES]) for _ in range(2))
    svg = figure.drawn("svg").decode()
    assert all(text in svg for text in ("ours, a", "published, b", "2K", "#0060a0"))
    assert figure.drawn("png").startswith(b"\x89PNG") and figure.drawn("pdf").startswith(b"%PDF")
    assert all(figure.drawn(kind) == again.drawn(kind) for kind in pictures.KINDS), "a file is a function of what it shows"


def _axes(panel: Lines | Cells, table: Table) -> Any:
    with matplotlib.style.context(pictures._STYLE):
        figure = Figure()
        pictures._draw(panel, table.as_json()["rows"], axes := figure.subplots())
        figure.draw_without_rendering()
    return axes


def _labels(axis: Any) -> list[str]:
    return [text.get_text() for text in (*axis.get_ticklabels(), *axis.get_ticklabels(minor=True)) if text.get_text()]


def test_a_rule_that_is_the_same_for_every_value_is_drawn_once_and_a_mark_has_the_colour_of_its_line() -> None:
    rows = tuple((task, x, y, y + 1.0, 10.0 * x) for task, y in (("a", 1.0), ("b", 2.0)) for x in (1, 2))
    table = Table("lines", ("task", "x", "fitted", "measured", "rule"), rows)
    axes = _axes(Lines(table="lines", x="x", y=("fitted",), marks=("measured", "rule"), by="task"), table)
    handles, labels = axes.get_legend_handles_labels()
    assert sorted(labels) == ["fitted, a", "fitted, b", "measured, a", "measured, b", "rule"]
    assert [line.get_label() for line in axes.lines] == ["fitted, a", "fitted, b", "rule"], "the rule is told after the series"
    by_label = dict(zip(labels, handles, strict=True))
    for task in "ab":
        assert to_hex(by_label[f"measured, {task}"].get_edgecolor()[0]) == to_hex(by_label[f"fitted, {task}"].get_color())


def test_labels_of_axes_and_series_are_those_of_numbers_and_keys() -> None:
    table = Table("lines", ("lr_schedule.rate", "batch_size", "y"), ((1.0, 80_000.0, 4.0), (3.0, 8_000_000.0, 7.5)))
    axes = _axes(Lines(table="lines", x="lr_schedule.rate", y=("y",), by="batch_size", x_scale="category", y_scale="log"), table)
    assert axes.get_xlabel() == "lr_schedule.rate" and axes.get_legend().get_title().get_text() == "batch size"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["80,000", "8,000,000"]
    assert _labels(axes.xaxis) == ["1", "3"] and {"4", "5", "6", "7"} <= set(_labels(axes.yaxis))


def test_a_legend_has_numbers_in_their_order_and_more_than_five_are_on_a_scale_of_colours() -> None:
    for count, is_scale in ((3, False), (6, True)):
        rows = tuple((x, float(by), x + 1.0) for by in (2, 0.5, 8, 4, 1, 6)[:count] for x in (1, 2))
        axes = _axes(Lines(table="t", x="x", y=("y",), by="by"), Table("t", ("x", "by", "y"), rows))
        labels = [float(text.get_text()) for text in axes.get_legend().get_texts()]
        assert labels == sorted(labels) and len(labels) == count
        assert pictures.in_order(["[256, 448]", "[1024]", "[256]"]) == ["[256]", "[256, 448]", "[1024]"]
        assert (axes.lines[0].get_color() == "#0060a0") is not is_scale and len({line.get_color() for line in axes.lines}) == count


def test_a_band_is_shaded_around_its_line_in_the_colour_of_the_line() -> None:
    rows = tuple((x, "a", y, y - 1, y + 2) for x, y in ((1, 5.0), (2, 6.0)))
    table = Table("t", ("x", "by", "y", "low", "high"), rows)
    axes = _axes(Lines(table="t", x="x", y=("y",), by="by", band=("low", "high")), table)
    (shade,) = axes.collections
    assert to_hex(shade.get_facecolor()[0]) == axes.lines[0].get_color()
    assert {tuple(corner) for corner in shade.get_paths()[0].vertices.tolist()} == {(1, 4), (2, 5), (2, 8), (1, 7)}


def test_a_map_shows_the_mean_of_each_pair_and_nothing_where_there_is_none() -> None:
    rows = ((1, 0.1, 70.0, "a"), (1, 0.1, 80.0, "a"), (2, 0.2, 50.0, "a"), (2, 0.1, 99.0, "b"))
    axes = _axes(Cells(table="t", x="x", y="y", value="value", where={"task": "a"}), Table("t", ("x", "y", "value", "task"), rows))
    assert {(text.xy, text.get_text()) for text in axes.texts} == {((0, 0), "75"), ((1, 1), "50")}
    first, second = (patch.get_alpha() for patch in axes.patches)
    assert first > second


def test_panels_stand_in_rows_with_one_legend_for_equal_series_and_labels_that_do_not_overlap() -> None:
    rows = tuple((10.0 ** (x / 8), by, 1.0 + x) for by in ("a", "b") for x in range(9))
    wide = tuple((f"a category with a long name {x}", "a", float(x)) for x in range(6))
    panels = (*[Lines(table="t", x="x", y=("y",), by="by", x_scale="log")] * 3, Lines(table="w", x="x", y=("y",)))
    canvas: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        keep_apart = pictures.keep_apart
        patch.setattr(pictures, "keep_apart", lambda one: canvas.append(one) or keep_apart(one))
        tables = [Table("t", ("x", "by", "y"), rows), Table("w", ("x", "by", "y"), wide)]
        (figure,) = pictures.draw([Picture("four", "Four.", panels)], tables)
    assert figure.drawn("png")
    ((one),) = canvas
    places = [axes.get_subplotspec().rowspan.start for axes in one.axes]
    assert places == [0, 0, 1, 1] and [axes.get_legend() is not None for axes in one.axes] == [False, True, False, False]
    one.draw_without_rendering()
    assert not any(pictures._overlaps(axis) for axes in one.axes for axis in (axes.xaxis, axes.yaxis))
    assert one.axes[3].get_xticklabels()[0].get_rotation() == 30


def test_the_highest_mark_of_categories_is_below_the_edge() -> None:
    axes = _axes(Lines(table="lines", x="task", marks=("y",), x_scale="category"), Table("lines", ("task", "y"), (("a", 0.7), ("b", 0.75))))
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 0.75 * 1.05


def test_the_files_of_a_picture_need_nothing_beside_them(tmp_path: Path) -> None:
    said = pictures.write([Picture("one", "One.", PANELS[:1])], [LINES], tmp_path)
    assert "one.svg" in said and {path.name for path in tmp_path.iterdir()} == {"one.svg", "one.png", "one.pdf"}
    text = (tmp_path / "one.svg").read_text()
    assert "var(" not in text and "<metadata" not in text and ElementTree.fromstring(text.split("\n", 1)[1]).tag.endswith("svg")


def test_a_style_sheet_alone_says_how_figures_look() -> None:
    """Colours are named nowhere else."""
    assert not re.findall(r"#[0-9a-f]{6}|rcParams\[.*\] =", Path(pictures.__file__).read_text())


def test_without_matplotlib_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    said = pictures.write([Picture("one", "One.", PANELS[:1])], [LINES], tmp_path)
    assert "matplotlib" in said and "\n" not in said and not list(tmp_path.iterdir())


def test_nothing_to_draw_says_nothing(tmp_path: Path) -> None:
    assert pictures.write([], [LINES], tmp_path) == ""


def _committed(folder: Path) -> tuple[Any, list[Table]]:
    """The analysis that made `folder`, and its tables as they were written."""
    tables = []
    for path in sorted(folder.glob("*.csv")):
        with open(path, newline="") as file:
            columns, *rows = csv.reader(file)
        tables.append(Table(path.stem, tuple(columns), tuple(tuple(_value(cell) for cell in row) for row in rows)))
    job = config.build(recipes.compose([f"+experiment={folder.name}", *OVERRIDES.get(folder.name, [])]))[1]
    assert isinstance(job, Analyse)
    return job.analysis, tables


def _value(cell: str) -> Any:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell or None


@pytest.mark.parametrize(
    "folder", [pytest.param(path, id=path.name, marks=[pytest.mark.slow] * (path.name not in QUICK)) for path in COMMITTED]
)
def test_what_an_analysis_draws_is_in_its_tables(folder: Path) -> None:
    analysis, tables = _committed(folder)
    drawn = pictures.draw(analysis.pictures(tables), tables)
    assert drawn and all((folder / f"{figure.name}.svg").is_file() for figure in drawn)
