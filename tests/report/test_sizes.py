"""A run belongs to an item by its recipe, whatever its size: runs of a full-scale recipe, those made smaller, and the laptop's."""

import copy
import dataclasses
import functools
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dpx import config
from dpx.config import recipes
from dpx.pages import read_runs
from dpx.pages.page_document import Document, markdown
from dpx.pages.read_runs import Run
from dpx_papers.report import analyses, collect, page, rows
from dpx_papers.report.evidence import Evidence
from dpx_papers.report.paper import Item, Paper
from dpx_papers.report.sizes import FULL, LAPTOP, SMALLER
from tests.report import made

SWEEP = made.sweep({16: ([0.1, 0.11], 1.0), 64: ([0.2, 0.21], 2.0), 256: ([0.3, 0.31], 4.0)})
SMALL = ("model=micro", "data=synthetic", "steps=100", "lr_schedule.warmup_steps=10")


def at_full_scale(runs: list[Run]) -> list[Run]:
    return [dataclasses.replace(run, experiment=run.experiment.removeprefix("laptop_")) for run in runs]


def only(name: str, number: str) -> tuple[Paper, Item]:
    declared = made.declared(name)
    (item,) = [one for one in declared.items if one.number == number]
    return dataclasses.replace(declared, items=[item]), item


def document(paper: Paper, name: str, runs: list[Run], **tables) -> Document:
    printed = [line for line in rows.read_published(made.EXPERIMENTS / name / "published.csv") if line.item == paper.items[0].number]
    return page.document(paper, Evidence(Path(name), runs, printed, tables))


def test_full_scale_runs_are_judged_drawn_listed_and_state_their_privacy() -> None:
    paper, item = only("anil2021", "A7")
    full = [
        dataclasses.replace(run, config=run.config | {"batch_schedule.size": {"16": "32768", "64": "65536", "256": "2097152"}[size]})
        for run in at_full_scale(SWEEP)
        for size in [run.config["batch_schedule.size"]]
    ]
    found = document(paper, "anil2021", full)
    text = markdown(found)
    at = page.verdicts(item, Evidence(Path("anil2021"), full, rows.read_published(made.EXPERIMENTS / "anil2021" / "published.csv")))
    assert list(at) == [FULL] and [part.state for part in at[FULL].parts] == ["pass", "pass", "pass", "fail"]
    assert "10.5 % |" in text and "30.5 % |" in text, "our values stand beside the printed ones"
    assert {figure.name for figure in found.figures} == {"anil-figure-3", "anil-figure-3-ends"}
    assert (
        "Privacy, full scale: **dp**, ε = 5.36 (rdp)" in text
        and "no ε is spent" not in text
        and "full scale runs by point: 6 in all" in text
    )


def test_both_sizes_stand_side_by_side_and_the_full_scale_has_the_verdict() -> None:
    paper, item = only("anil2021", "A6")
    laptop = [
        run
        for epsilon, value in ((1.08, 0.1), (3, 0.2), (10.6, 0.25))
        for run in made.replicates("anil_epsilon_sweep", [value, value + 0.01], noise__epsilon=epsilon)
    ]
    falling = {"1.08": 0.43, "3": 0.4, "10.6": 0.33}
    full = [
        dataclasses.replace(run, finals=run.finals | {made.ACCURACY: falling[run.config["noise.epsilon"]]}) for run in at_full_scale(laptop)
    ]
    assert {size: one.state for size, one in page.verdicts(item, _evidence([*laptop, *full])).items()} == {FULL: "fail", LAPTOP: "pass"}
    text = markdown(document(paper, "anil2021", [*laptop, *full]))
    assert "| ❌ fail | ✅ pass | 2 runs | ❌ fail |" in text
    assert "Privacy, full scale" in text and "Privacy, laptop" in text


def test_values_are_compared_with_printed_ones_at_full_scale_alone() -> None:
    paper, item = only("anil2021", "A8")
    sweep = [run for run in SWEEP if run.config["batch_schedule.size"] != "256"]
    laptop = [*sweep, *made.replicates("anil_2m_batch", [0.61, 0.6])]
    at = page.verdicts(item, _evidence(laptop))
    assert [part.state for part in at[LAPTOP].parts] == ["pass"]
    for accuracy, state in ((0.605, "pass"), (0.5, "fail")):
        full = at_full_scale([*sweep, *made.replicates("anil_2m_batch", [accuracy, accuracy])])
        assert [part.state for part in page.verdicts(item, _evidence(full))[FULL].parts] == ["pass", state]


def _evidence(runs: list[Run]) -> Evidence:
    return Evidence(Path("anil2021"), runs, rows.read_published(made.EXPERIMENTS / "anil2021" / "published.csv"))


@functools.cache
def _composed(*overrides: str) -> dict:
    return config.resolved(recipes.compose(["+experiment=anil_batch_sweep", "hydra/sweeper=basic", *overrides]))


def _folder(outputs: Path, size: int, accuracy: float, *overrides: str) -> None:
    plain = copy.deepcopy(_composed(f"batch_schedule.size={size}", *overrides))
    made.folder(outputs, "anil_batch_sweep", plain, accuracy)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Run], list[str]]:
    """Folders of runs under the full-scale name on the micro model, and what is kept of them."""
    outputs = tmp_path_factory.mktemp("outputs")
    for size, accuracy in ((16, 0.1), (64, 0.2), (256, 0.3), (1024, 0.4)):
        _folder(outputs, size, accuracy, *SMALL)
    _folder(outputs, 16, 0.9, *SMALL, "optimizer.beta1=0.5")
    found, unfinished = read_runs.collect(outputs, made.declared("anil2021").match)
    assert unfinished == [] and len(found) == 5
    return collect.merged([], found)


def test_a_full_scale_recipe_on_the_micro_model_is_judged_drawn_and_states_its_privacy(smaller: tuple[list[Run], list[str]]) -> None:
    runs, strays = smaller
    assert len(runs) == 4 and len(strays) == 1 and "optimizer.beta1=0.5, not 0.75" in strays[0]
    assert all("model.name=micro" in run.facts["smaller"] and "steps=100" in run.facts["smaller"] for run in runs)
    paper, item = only("anil2021", "A7")
    at = page.verdicts(item, _evidence(runs))
    assert list(at) == [SMALLER] and [part.state for part in at[SMALLER].parts] == ["fail", "pass", "pass"]
    found = document(paper, "anil2021", runs)
    text = markdown(found)
    assert {figure.name for figure in found.figures} == {"anil-figure-3", "anil-figure-3-ends"}
    assert "Privacy, made smaller: **dp**, ε = 5.36 (rdp)" in text and "Runs made smaller by their command: " in text
    assert "not run (15,113 H200 hours); made smaller: fail" in text, "it is not the paper's size"
    assert not _evidence(runs).at(FULL).runs


def test_runs_that_were_made_smaller_in_another_way_are_left_out(smaller: tuple[list[Run], list[str]]) -> None:
    runs = [dataclasses.replace(run, facts=run.facts | {"at": "2026-01-01"}) for run in smaller[0]]
    later = dataclasses.replace(runs[0], run="later", config=runs[0].config | {"steps": "50"}, facts=runs[0].facts | {"at": "2026-01-02"})
    kept, strays = collect.merged([], [*runs, later])
    assert [run.run for run in kept] == ["later"] and all("not by" in line and "steps=50" in line for line in strays) and len(strays) == 4


def test_points_that_the_paper_has_beside_those_of_the_recipe_are_at_full_scale() -> None:
    """Table 2 of Du and Mi has two models under the settings of Li et al.; the recipe sweeps one."""
    also = made.declared("du2021").also
    assert also == {name: ["model=roberta_large"] for name in ("dpfp_table2_dpsgd_li", "dpfp_table2_rgp_li")}
    plain = ["+experiment=dpfp_table2_dpsgd_li", "hydra/sweeper=basic", "noise.epsilon=3.0"]

    def run(*overrides: str) -> Run:
        knobs = read_runs.knobs_of(config.resolved(recipes.compose([*plain, *overrides])))
        return made.run("dpfp_table2_dpsgd_li", 0.9, 0, **knobs)

    large, small = at_full_scale([run("model=roberta_large"), run("model=roberta_large", "steps=10")])
    kept, strays = collect.merged([], [large], also)
    assert [one.facts.get("smaller") for one in kept] == [None] and not strays
    assert "model.name=roberta_large" in collect.merged([], [large])[0][0].facts["smaller"], "without it, it is another size"
    assert "model.name=roberta_large" in collect.merged([], [small], also)[0][0].facts["smaller"]
    paper, item = only("du2021", "F2")
    assert "with `model=roberta_large`" in markdown(document(paper, "du2021", []))


BEST = ["+experiment=legal_best", "hydra/sweeper=basic", "job=plan"]
SMALLER_CHAIN = (
    "+chain.common.options.model=micro",
    "+chain.common.options.data=embedded",
    "+chain.common.values.steps=20",
    "point.batch=32",
)


def _chain(*overrides: str, replicate: int = 0, accuracy: float = 0.6) -> Run:
    knobs = read_runs.knobs(OmegaConf.to_container(recipes.compose([*BEST, *overrides]), resolve=False))  # pyright: ignore[reportArgumentType]
    finals = {"pretrain/heldout/mlm_accuracy": accuracy, "pretrain/before": 0.5}
    facts = {"kind": read_runs.KIND, "guarantee": "none", "pretrain/metric": "mlm_accuracy", "at": f"2026-01-0{replicate + 1}"}
    return Run("legal_best", f"{len(overrides)}-{replicate}", "-", replicate, knobs, facts, finals, {})


def test_a_chain_that_its_command_made_smaller_is_judged_and_listed_as_such() -> None:
    runs = [_chain(*SMALLER_CHAIN, replicate=replicate, accuracy=0.6 + 0.01 * replicate) for replicate in range(3)]
    kept, strays = collect.merged([], runs)
    assert not strays
    for text in ("chain.common.options.model=micro", "chain.common.values.steps=20", "point.batch=32"):
        assert all(text in run.facts["smaller"] for run in kept)
    paper, item = only("yin2022", "L8")
    at = page.verdicts(item, Evidence(Path("yin2022"), kept, rows.read_published(made.EXPERIMENTS / "yin2022" / "published.csv")))
    assert list(at) == [SMALLER] and at[SMALLER].state == "pass"
    text = markdown(document(paper, "yin2022", kept))
    assert "made smaller: 3 runs" in text or "Runs made smaller by their command: " in text


def test_a_chain_with_its_recipe_s_settings_is_at_full_scale_and_one_with_others_is_left_out() -> None:
    weights = ("chain.stages.pretrain.options.init=hf", "+chain.stages.pretrain.values.init={path: folder, provenance: public}")
    declared = ("chain.stages.casehold.disjoint_from=[pretrain]", "+chain.stages.overruling.values.data.source.select=test")
    how = ("+chain.common.options.mesh=h200", "+chain.common.values.microbatch=8", "+chain.common.values.schedule.evaluate_every=9")
    kept, strays = collect.merged([], [_chain(), _chain(*weights, *declared, *how)])
    assert [run.facts.get("smaller") for run in kept] == [None, None] and not strays
    others = (
        "+chain.common.values.optimizer.weight_decay=0.3",
        "point.learning_rate=0.5",
        "chain.stages.casehold.options.base=legal_private",
    )
    for other in others:
        kept, (stray,) = collect.merged([], [_chain(*SMALLER_CHAIN, other)])
        assert not kept and other.split("=")[0].lstrip("+") in stray, "whatever else it changes"
        assert not collect.merged([], [_chain(other)])[0]


def test_an_analysis_of_the_laptop_s_runs_is_not_one_of_full_scale(tmp_path: Path) -> None:
    for number, match in enumerate(("laptop_mckenna_grid-", "mckenna_grid-")):
        folder = tmp_path / "outputs" / f"mckenna_fig1_allocation-{number}"
        (folder / "release").mkdir(parents=True)
        (folder / "private" / "hydra").mkdir(parents=True)
        (folder / "private" / "hydra" / "config.yaml").write_text(
            f"analysis:\n  lab:\n    match: {match}\njob:\n  analysis: ${{analysis}}\n"
        )
        table = {"name": "t", "title": "", "rows": [{"x": number}], "notes": []}
        (folder / "release" / "analysis.json").write_text(json.dumps({"name": "mckenna_fig1_allocation", "tables": [table]}))
    assert analyses.fill(tmp_path / "outputs", tmp_path, ("mckenna_",)) == []
    found = Evidence(tmp_path, tables=analyses.read(tmp_path))
    assert [found.at(size).analysis("mckenna_fig1_allocation")["t"].rows for size in (LAPTOP, FULL)] == [((0,),), ((1,),)]
    assert found.at(SMALLER).analysis("mckenna_fig1_allocation") == {}
