"""Recipes of Du and Mi 2021 that train: every name of the paper composes, and sweeps, steps and targets are the paper's."""

import functools
from pathlib import Path

import pytest
import yaml

from dpx.config import build, recipes
from dpx.job.list import Point
from dpx.mechanism.declared_mechanism import TargetClt
from dpx.sampler.batch_schedule import Constant
from dpx.task.declared_task import Classification

ITEMS = yaml.safe_load((Path(__file__).parents[2] / "experiments" / "du2021" / "paper.yaml").read_text())["items"]
ROWS = {"glue_sst2": 67_349, "glue_qnli": 104_743, "glue_qqp": 363_846, "glue_mnli": 392_702}
POINTS = {
    "dpfp_table2_nonprivate": 3 * 4,
    "dpfp_table2_eps3": 3 * 4,
    "dpfp_table2_eps8": 3 * 4,
    "dpfp_frozen_encoder": 3 * 4 * 2,
    "dpfp_fig1_batch_lr": 6 * 5,
    "dpfp_fig2_clip": 6 * 5,
    "dpfp_fig3_microbatch": 6,
}
LAPTOP = {
    "dpfp_table2_dpsgd_li": 2,
    "dpfp_table2_dpsgd_yu": 1,
    "dpfp_table2_rgp_yu": 1,
    "dpfp_table2_nonprivate": 2,
    "dpfp_table2_eps3": 2,
    "dpfp_table2_eps8": 2,
    "dpfp_frozen_encoder": 2,
    "dpfp_fig1_batch_lr": 3 * 3,
    "dpfp_fig2_clip": 3 * 3,
    "dpfp_fig3_microbatch": 3,
}
CENTRAL_LIMIT = {
    "dpfp_table2_eps3": {"glue_sst2": 1.73, "glue_qnli": 2.00, "glue_qqp": 2.52, "glue_mnli": 2.52},
    "dpfp_table2_eps8": {"glue_sst2": 4.33, "glue_qnli": 4.75, "glue_qqp": 5.85, "glue_mnli": 5.83},
}


points_of = functools.cache(recipes.points)


@functools.cache
def experiments(name):
    return [build(recipes.plan_config(name, point))[0] for point in points_of(name)]


def test_the_paper_has_twenty_one_names_and_each_is_a_recipe():
    names = {item["experiment"] for item in ITEMS}
    assert len(ITEMS) == len(names) == 21
    assert names == set(recipes.names("dpfp_*"))


# Of the same mechanism, task and sweep as one that stays.
SAME = {"dpfp_table2_eps8", "dpfp_fig2_clip", "dpfp_table2_dpsgd_yu", "dpfp_table2_rgp_yu"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SAME)) for name in sorted(item["experiment"] for item in ITEMS)]
)
def test_a_name_of_the_paper_is_planned_at_its_first_point(name):
    assert Point(name, tuple(points_of(name)[0])).plan_row().error is None


@pytest.mark.parametrize(("name", "runs"), [*POINTS.items(), *((f"laptop/{name}", runs) for name, runs in LAPTOP.items())])
def test_a_sweep_has_the_runs_of_its_item(name, runs):
    assert len(points_of(name)) == runs


@pytest.mark.parametrize("name", CENTRAL_LIMIT)
def test_dp_fp_takes_three_epochs_at_the_printed_central_limit(name):
    found = experiments(name)
    assert [one.model.name for one in found[::4]] == ["base", "roberta_base", "roberta_large"]
    assert [one.data.name for one in found[:4]] == list(ROWS)
    for one in found:
        rows = ROWS[one.data.name]
        assert one.noise == TargetClt(epsilon=CENTRAL_LIMIT[name][one.data.name])
        assert isinstance(one.batch_schedule, Constant) and one.batch_schedule.size == 32
        assert (one.data.declared_size, one.steps) == (rows, round(3 * rows / 32))
        assert one.privacy.delta == pytest.approx(1 / (2 * rows), rel=1e-4) and one.privacy.delta <= 1 / (2 * rows)
        assert isinstance(one.task, Classification) and one.task.classes == (3 if one.data.name == "glue_mnli" else 2)
        assert one.data.vocabulary.size == (30_522 if one.model.name == "base" else 50_265)


def test_training_without_privacy_takes_five_epochs_and_evaluates_after_each():
    for one in experiments("dpfp_table2_nonprivate"):
        assert one.steps == round(5 * ROWS[one.data.name] / 32)
        assert one.schedule.evaluate_every == round(ROWS[one.data.name] / 32)
        assert one.mechanism.name == "none"


def test_figure_1_has_three_epochs_at_each_batch():
    for one in experiments("dpfp_fig1_batch_lr"):
        assert isinstance(one.batch_schedule, Constant)
        assert one.steps == round(3 * ROWS["glue_sst2"] / one.batch_schedule.size)
