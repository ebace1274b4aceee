"""Recipes of the baselines in Du and Mi's Table 2: their sweeps are its cells, and their steps follow from rows, epochs and batches."""

import pytest

from dpx.config import build, recipes
from dpx.mechanism.declared_mechanism import TargetEpsilon
from dpx.sampler.batch_schedule import Constant

ROWS = {"glue_sst2": 67_349, "glue_qnli": 104_743, "glue_qqp": 363_846, "glue_mnli": 392_702}
# Of Li et al.: batches and epochs grow with the task.
FACTORS = {"glue_sst2": 1, "glue_qnli": 2, "glue_qqp": 6, "glue_mnli": 6}


def points(name):
    return [build(recipes.plan_config(name, point))[0] for point in recipes.points(name)]


def test_dp_sgd_of_li_takes_as_many_epochs_and_rows_as_its_task_is_large():
    found = points("dpfp_table2_dpsgd_li")
    assert [(one.data.name, one.noise) for one in found] == [
        (task, TargetEpsilon(epsilon=epsilon)) for task in ROWS for epsilon in (3.0, 8.0)
    ]
    for one in found:
        factor, rows = FACTORS[one.data.name], ROWS[one.data.name]
        assert isinstance(one.batch_schedule, Constant) and one.batch_schedule.size == 1000 * factor
        assert one.steps == round(3 * factor * rows / (1000 * factor))
        assert one.privacy.delta == pytest.approx(1 / (2 * rows), rel=1e-4) and one.privacy.delta <= 1 / (2 * rows)


@pytest.mark.parametrize(
    ("name", "batch", "mechanism"),
    [("dpfp_table2_rgp_li", 2000, "rgp"), ("dpfp_table2_rgp_yu", 1000, "rgp"), ("dpfp_table2_dpsgd_yu", 1000, "dp_sgd")],
)
def test_rows_of_yu_take_fifty_epochs_of_whole_batches(name, batch, mechanism):
    found = points(name)
    assert [one.data.name for one in found] == list(ROWS)
    for one in found:
        assert isinstance(one.batch_schedule, Constant) and one.batch_schedule.size == batch
        assert one.steps == 50 * (ROWS[one.data.name] // batch)
        assert (one.mechanism.name, one.noise, one.privacy.delta) == (mechanism, TargetEpsilon(epsilon=8.0), 1e-5)
