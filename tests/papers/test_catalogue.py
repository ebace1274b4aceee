"""The catalogue is whole: 81 names of four papers, each a recipe that composes and can be planned; each that trains has an analogue."""

import re
from pathlib import Path

import pytest
import yaml

from dpx.config import recipes
from dpx.job.list import Point

ROOT = Path(__file__).parents[2]
# Shared beside a checkout, not part of it.
INDEX = ROOT.parent / "shared" / "papers" / "README.md"
# S single run, M multirun, A analysis.
KINDS = {
    "S": ("anil_nonprivate_baseline anil_table1_best anil_2m_batch mckenna_clip_check legal_best legal_nonprivate_full").split(),
    "M": (
        "anil_tune_32k anil_weight_decay anil_epsilon_sweep anil_batch_sweep anil_batch_schedule anil_schedule_variants anil_throughput "
        "mckenna_grid mckenna_fig5_direct mckenna_fig7_physical_batch mckenna_fig8_batch_lr mckenna_fig9_batch_large "
        "mckenna_fig10_decoder mckenna_table4_throughput mckenna_fig12_lr_curves mckenna_lr_nonprivate legal_table2_baselines "
        "legal_table3_small_base legal_table3_small_sc legal_fig1a_snr_batch legal_fig1b_snr_lr legal_fig2_batch_lr "
        "legal_table5_weight_decay legal_clip_sweep legal_table4_finetune_search legal_fig3_runtime dpfp_table2_nonprivate "
        "dpfp_table2_dpsgd_li dpfp_table2_dpsgd_yu dpfp_table2_rgp_yu dpfp_table2_rgp_li dpfp_table2_eps3 dpfp_table2_eps8 "
        "dpfp_fig1_batch_lr dpfp_fig2_clip dpfp_fig3_microbatch dpfp_table1_complexity dpfp_frozen_encoder"
    ).split(),
    "A": (
        "anil_scale_invariance anil_accounting anil_sgd32x_ref mckenna_fit_semiparametric mckenna_fig1_allocation "
        "mckenna_fig3ab_compute mckenna_fig3c_token_ratio mckenna_fig4_vector_fields mckenna_fig5_baselines mckenna_table2_saturation "
        "mckenna_fig6_full_grid mckenna_table3_trainset mckenna_fig11_nonprivate mckenna_fig13_allocation_by_n mckenna_fig14_smoothing "
        "mckenna_fig15_vulnerability mckenna_fig16_parametric_l1 mckenna_fig17_transform mckenna_fig18_parametric_l2 "
        "mckenna_fig19_parametric_optimum mckenna_table1_models mckenna_billion_claim mckenna_diminishing_batch mckenna_flops_model "
        "mckenna_calibration_profiles legal_table1_corpus legal_accounting legal_tokenizer_leak dpfp_table2_accounting "
        "dpfp_table3_datasets dpfp_prop1_noise_dimension dpfp_prop2_gradient_bias dpfp_prop3_noise_ratio "
        "dpfp_postprocessing_counterexample dpfp_label_leak dpfp_model_size_gap dpfp_headline"
    ).split(),
}
NAMES = [name for names in KINDS.values() for name in names]


def test_the_papers_have_these_names_and_no_others():
    files = sorted((ROOT / "experiments").glob("*/paper.yaml"))
    items = [item["experiment"] for file in files for item in yaml.safe_load(file.read_text())["items"]]
    assert len(NAMES) == len(set(NAMES)) == 81 and [len(names) for names in KINDS.values()] == [6, 38, 37]
    assert sorted(items) == sorted(NAMES)


@pytest.mark.skipif(not INDEX.is_file(), reason="the index of the papers is not there")
def test_the_index_of_the_papers_has_these_names():
    listed = re.findall(r"^\| `(\w+)` \| [^|]* \| ([SMA]) \|", INDEX.read_text(), re.MULTILINE)
    assert {name: kind for name, kind in listed} == {name: kind for kind, names in KINDS.items() for name in names}


def test_each_name_has_a_recipe_and_each_that_trains_an_analogue():
    """`tests/test_config.py` composes and builds every recipe, at its own values and at its last point."""
    known = set(recipes.names())
    assert not set(NAMES) - known
    assert not {name for name in [*KINDS["S"], *KINDS["M"]] if f"laptop/{name}" not in known}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_name_is_planned_at_its_first_and_its_last_point(name):
    points = recipes.points(name)
    for point in (points[0], points[-1]):
        assert Point(name, tuple(point)).plan_row().error is None
