"""What the figures of the papers declare is drawn of any runs that there are: by step, at the end, at full scale and on a laptop."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dpx.declaration import ConfigError
from dpx.pages import pictures
from dpx.pages.analysis_tables import Cells, Picture, Table
from dpx.pages.page_document import Figure as Drawn
from dpx.pages.read_runs import Run
from dpx_papers.report import figures
from dpx_papers.report.evidence import Evidence
from dpx_papers.report.paper import Item
from dpx_papers.report.sizes import FULL, LAPTOP, SIZES
from tests.report import made

BATCH, RATIO, RATE, MODEL = "batch_schedule__size", "noise__noise_batch_ratio", "lr_schedule__learning_rate", "model__name"
FIGURES = {"M11": "mckenna-figure-7", "M12": "mckenna-figure-8", "M14": "mckenna-figure-9", "M15": "mckenna-figure-10"}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Picture, dict[str, Table]]]:
    """The pictures that would be drawn, each with the tables that it reads."""
    asked: list[tuple[Picture, dict[str, Table]]] = []
    tables_of = lambda tables: {table.name: table for table in tables}  # noqa: E731

    def draw(asks: Sequence[Picture], tables: Sequence[Table]) -> list[Drawn]:
        asked.extend((one, tables_of(tables)) for one in asks)
        return [Drawn(one.name, one.caption, lambda _: b"") for one in asks]

    monkeypatch.setattr(pictures, "draw", draw)
    return asked


def item_of(name: str, number: str) -> Item:
    (item,) = [one for one in made.declared(name).items if one.number == number]
    return item


def draw(name: str, number: str, runs: Sequence[Run], size: str = LAPTOP, **tables: list[dict[str, Any]]) -> None:
    item = item_of(name, number)
    kept = {item.experiment: {key: Table.from_rows(key, rows) for key, rows in tables.items()}} if tables else {}
    runs = [dataclasses.replace(run, experiment=item.experiment, run=f"r{place}") for place, run in enumerate(runs)]
    at = {one: Evidence(Path("nowhere")) for one in SIZES} | {size: Evidence(Path("nowhere"), runs, (), kept)}
    figures.of_item(made.declared(name), item, at, {one: {} for one in SIZES})


def trained(with_steps: bool, **knobs: Any) -> Run:
    curve = {"train/loss": tuple((step, 9.0 - step / 100 + knobs.get(RATE, 0)) for step in (50, 100))} if with_steps else {}
    return made.run("any", 0.5, curves=curve, finals={"heldout/loss": 6.0 + knobs.get(RATE, 0)}, **knobs)


@pytest.mark.parametrize(("number", "size"), list(zip(FIGURES, (LAPTOP, FULL, FULL, LAPTOP), strict=True)))
def test_physical_batches_are_drawn_by_step_at_each_ratio_and_at_the_end(number: str, size: str, drawn: Any) -> None:
    ratios = (2.0**-10,) if number == "M12" else (2.0**-10, 2.0**-20)
    knobs = [{BATCH: batch, RATIO: ratio, RATE: rate} for batch in (128, 512) for ratio in ratios for rate in (0.5, 0.25)]
    draw("mckenna2025", number, [trained(True, **one) for one in knobs], size)
    ((picture, tables),) = drawn
    assert picture.name == FIGURES[number]
    *by_step, at_end = picture.panels
    assert [(panel.x, panel.y, panel.by) for panel in by_step] == [("step", ["train/loss"], "batch_schedule.size")] * len(ratios)
    assert at_end.x == "batch_schedule.size" and at_end.y == ["heldout/loss"]
    if number == "M12":
        rows = tables[by_step[0].table].as_json()["rows"]
        assert sorted(row["train/loss"] for row in rows) == [8.25, 8.25, 8.75, 8.75], "each batch at its best rate, at every step"
        assert [row["heldout/loss"] for row in tables[at_end.table].as_json()["rows"]] == [6.25, 6.25]
    else:
        assert [panel.title.partition("; ")[2] for panel in by_step] == ["ratio 9.54e-07", "ratio 0.000977"]


def test_runs_that_kept_no_loss_of_their_steps_are_drawn_at_the_end_alone(drawn: Any) -> None:
    draw("mckenna2025", "M11", [trained(False, **{BATCH: batch, RATIO: 0.5}) for batch in (128, 512)])
    ((picture, _),) = drawn
    assert [panel.x for panel in picture.panels] == ["batch_schedule.size"]


def test_learning_rates_are_drawn_for_each_model_and_ratio(drawn: Any) -> None:
    knobs = [{MODEL: model, RATIO: ratio, RATE: rate} for model in ("tiny", "medium") for ratio in (0.5, 0.03) for rate in (0.1, 0.2)]
    draw("mckenna2025", "M18", [trained(True, **one) for one in knobs], FULL)
    ((picture, _),) = drawn
    titles = ["medium, ratio 0.03", "medium, ratio 0.5", "tiny, ratio 0.03", "tiny, ratio 0.5"]
    assert [panel.title.partition("; ")[2] for panel in picture.panels] == [*titles, "medium", "tiny"]


@pytest.mark.parametrize(
    ("paper", "number", "places", "values"),
    [
        ("du2021", "F9", (RATE, BATCH), ["heldout/accuracy"]),
        ("du2021", "F10", (RATE, "clip__clipping_norm"), ["heldout/accuracy"]),
        ("yin2022", "L7", ("point__batch", "point__learning_rate"), ["overruling/test/macro_f1", "casehold/test/macro_f1"]),
    ],
)
def test_maps_are_drawn_as_maps(paper: str, number: str, places: tuple[str, str], values: list[str], drawn: Any) -> None:
    finals = dict.fromkeys(values, 0.5)
    draw(paper, number, [made.run("any", 0.5, finals=finals, **{places[0]: x, places[1]: y}) for x in (1, 2) for y in (3, 4)])
    ((picture, _),) = drawn
    assert [(type(panel), panel.value) for panel in picture.panels] == [(Cells, value) for value in values]
    assert {(panel.x, panel.y) for panel in picture.panels} == {tuple(place.replace("__", ".") for place in places)}


def test_every_searched_value_of_a_trial_is_drawn_and_seconds_of_an_epoch(drawn: Any) -> None:
    searched = {RATE: 0.1, "optimizer__weight_decay": 0.5, "clip__clipping_norm": 1.0, "optimizer__beta1": 0.9, "optimizer__beta2": 0.75}
    draw("anil2021", "A2", [made.run("any", 0.5, 0, **searched)])
    draw("yin2022", "L12", [], benchmark=[{"clipping": "vmap", "physical_batch": 4, "examples_per_s": 960.0}])
    (trials, tables), (epoch, rows) = drawn
    assert len(trials.panels) == 5 and tables[trials.panels[0].table].as_json()["rows"][0]["1 - β2"] == 0.25
    assert rows[epoch.panels[0].table].as_json()["rows"][0]["seconds of an epoch"] == 2.0


def test_a_figure_names_no_function_that_is_not_of_rows() -> None:
    item = item_of("anil2021", "A2")
    (figure,) = item.figures
    wrong = dataclasses.replace(item, figures=[dataclasses.replace(figure, function="dpx.durable.make_folder")])
    runs = [dataclasses.replace(made.run("any", 0.5), experiment=item.experiment)]
    at = {one: Evidence(Path("nowhere"), runs) for one in SIZES}
    with pytest.raises(ConfigError, match=r"anil-figure-1\.function=dpx\.durable\.make_folder.*is not a function of rows"):
        figures.of_item(made.declared("anil2021"), wrong, at, {one: {} for one in SIZES})
