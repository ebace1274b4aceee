"""Pictures show columns of tables, in both themes and in pixels; the committed accounting tables draw what their analyses declare."""

import csv
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from dpx import config
from dpx.config import recipes
from dpx.job.analyse import Analyse
from dpx.pages import pictures
from dpx.picture import Arrows, Cells, Lines, Picture
from dpx.table import Table

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
    Lines(table="lines", x=("task", "x"), marks=("y",), x_scale="category", where=("task", "a")),
    Arrows(table="gains", x="n", y="m", right="right", up="up"),
    Cells(table="gains", x="n", y="m", value="right"),
)


def test_every_kind_of_panel_is_drawn_in_variables_of_the_theme_and_in_pixels() -> None:
    (figure,) = pictures.draw([Picture("all", "All kinds.", PANELS)], [GAINS, LINES])
    assert "var(--s1)" in figure.svg and "ours, a" in figure.svg and "published, b" in figure.svg and "2K" in figure.svg
    assert figure.png.startswith(b"\x89PNG")


def test_files_carry_both_themes(tmp_path: Path) -> None:
    caption = 'Loss at "epsilon" < 1 & delta.'
    said = pictures.write([Picture("one", caption, PANELS[:1])], [LINES], tmp_path)
    assert ElementTree.parse(tmp_path / "one.svg").getroot().get("aria-label") == caption
    assert "one.svg" in said and "prefers-color-scheme: dark" in (tmp_path / "one.svg").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"one.svg", "one.png"}


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
    drawn = pictures.draw(analysis.pictures(), tables)
    assert drawn and all((folder / f"{figure.name}.svg").is_file() for figure in drawn)
