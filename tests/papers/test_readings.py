"""Readings of a recipe: data of paper.yaml, on the page of the paper, printed by job=explain, and what the recipes really take."""

import shutil
import tomllib
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dpx.config import recipes
from dpx.declaration import ConfigError
from dpx.job.explain import readings_of
from dpx.packages import conf_directory
from dpx_papers.report import paper
from dpx_papers.report.readings import of_recipe
from dpx_papers.supplied import homes
from tests.report import made

PAPERS = ("anil2021", "mckenna2025", "du2021", "yin2022")


def test_explain_prints_the_readings_of_a_recipe_and_of_no_other() -> None:
    head, *lines = readings_of("anil_nonprivate_baseline")
    assert head == "How the recipe reads its paper:" and all(line.startswith("  - ") for line in lines)
    text = "\n".join(lines)
    assert "warm-up: the paper says 7.5K steps “for all experiments”; taken: 7,500 of 14,063 steps, because the text is plain" in text
    assert "noise in the trials" not in text and "noise in the trials" in "\n".join(readings_of("anil_tune_32k"))
    assert readings_of("two_stages") == () and readings_of("main") == ()


def test_a_wheel_has_the_readings_of_every_paper(tmp_path: Path) -> None:
    """`tests/test_package.py` asks a real wheel."""
    checkout, package = made.EXPERIMENTS.parent, tmp_path / "dpx_papers"
    included = tomllib.loads((checkout / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for source, place in included.items():
        if place.startswith("dpx_papers/"):
            (tmp_path / place).parent.mkdir(parents=True)
            shutil.copy(checkout / source, tmp_path / place)
    in_wheel, beside = homes(package), homes(made.EXPERIMENTS / "papers" / "dpx_papers")
    assert [one.name for one in in_wheel] == [one.name for one in beside] == sorted(PAPERS)
    assert of_recipe("anil_2m_batch", in_wheel) == of_recipe("anil_2m_batch", beside) != []


@pytest.mark.parametrize("name", PAPERS)
def test_every_reading_is_on_the_page_of_its_paper(name: str) -> None:
    text = (made.EXPERIMENTS / name / "README.md").read_text()
    declared = made.declared(name).readings
    assert declared and "## How the recipes read the paper" in text
    assert all(reading.setting in text for reading in declared)


def test_a_reading_of_a_recipe_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    reading = "readings: [{recipes: [anil_nowhere], setting: s, paper: p, taken: t, why: w}]\n"
    (tmp_path / "paper.yaml").write_text(f"title: T\nheadline: heldout/loss\ncolumns: {{heldout/loss: loss}}\n{reading}items: []\n")
    with pytest.raises(ConfigError, match="readings: recipes anil_nowhere: no recipe has that name"):
        paper.read(tmp_path)
    assert [one.setting for one in of_recipe("anil_nowhere", [tmp_path, tmp_path / "none"])] == ["s"]


def test_recipes_take_what_their_readings_say() -> None:
    plain = recipes.compose(["+experiment=anil_nonprivate_baseline"])
    assert round(plain.lr_schedule.warmup_steps * plain.steps) == 7500
    private = recipes.compose(["+experiment=anil_2m_batch"])
    assert (private.optimizer.decay_mask, private.privacy.adjacency, private.model.get("dropout", 0.0)) == ("none", "add_remove", 0.0)
    assert (private.data.vocabulary.size, private.task.masking, private.data.pairs, private.data.repeats) == (
        30522,
        "bert",
        "cross_document",
        10,
    )
    for name in ("dpfp_table2_eps3", "dpfp_table2_dpsgd_li", "dpfp_table2_rgp_yu", "dpfp_fig1_batch_lr", "dpfp_frozen_encoder"):
        assert recipes.compose([f"+experiment={name}", "hydra/sweeper=basic"]).schedule.evaluation_rows >= 40_430, "QQP's dev set"
    assert OmegaConf.load(conf_directory() / "base" / "legal_task.yaml").schedule.evaluation_rows >= 4_238, "CaseHOLD's dev rows"
