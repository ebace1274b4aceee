"""Cost analyses on the smallest models: what is compiled or traced has the published order."""

import json

import pytest

from dpx.declaration import ConfigError
from dpx_papers.du2021 import table1_measured
from dpx_papers.du2021.table1_complexity import dpfp_table1_complexity
from dpx_papers.mckenna2025.flops_model import mckenna_flops_model


def rows_of(table):
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


@pytest.mark.slow
def test_dp_sgd_holds_a_gradient_for_each_example_and_book_keeping_does_not():
    subject = dpfp_table1_complexity(
        models=["micro"], batches=[2, 8], sequence_length=8, vocabulary_size=4096, rank=1, power_iterations=1, micro_batches=32
    )
    memory, time, noise = map(rows_of, subject())
    held = {row["method"]: row["over_d"] for row in memory}
    assert held["DP-SGD"] >= 1 > held["DP-SGD, book-keeping"]
    assert held["SGD"] < 0.5 and held["RGP"] < 0.1
    assert {row["method"]: row["over_SGD"] for row in time}["SGD"] == 1
    assert [row["coordinates"] for row in noise][1] == 32


@pytest.mark.slow
def test_a_step_that_runs_holds_what_its_method_says(monkeypatch):
    given = {"batches": [2, 6], "sequence_length": 8, "vocabulary_size": 64, "rank": 1, "power_iterations": 1, "micro_batches": 4}
    every = table1_measured.methods(rank=1, power_iterations=1, micro_batches=4)
    kept = {name: every[name] for name in ("SGD", "DP-SGD", "DP-FP")}
    monkeypatch.setattr(table1_measured, "methods", lambda *_: kept)
    subject = table1_measured.dpfp_table1_measured(models=["micro"], rounds=1, **given)
    step, slopes = map(rows_of, subject())
    more = {row["method"]: row["beyond_SGD_over_d"] for row in slopes}
    assert more["SGD"] == 0 and more["DP-SGD"] >= 0.9 and abs(more["DP-FP"]) <= 0.01
    assert all(row["seconds"] > 0 for row in step)
    for method in kept:
        small, large = (row["flops"] for row in step if row["method"] == method)
        assert large == 3 * small


def test_a_slope_needs_two_sizes():
    with pytest.raises(ConfigError, match="a slope needs two sizes"):
        dpfp_table1_complexity(
            models=["micro"], batches=[4], sequence_length=8, vocabulary_size=64, rank=1, power_iterations=1, micro_batches=1
        )


@pytest.mark.slow
def test_clipping_of_instantiated_gradients_falls_with_length_and_measured_shares_are_read(tmp_path):
    row = {"clipping": "book_keeping", "examples_per_s": 64.0, "update_seconds": 1.0, "ratio_to_plain": 0.9, "model_flops_per_s": 1e9}
    (tmp_path / "a.json").write_text(json.dumps({"rows": [row | {"model": "micro", "sequence_length": 16, "physical_batch": 4}]}))
    (tmp_path / "noise.json").write_text(json.dumps({"kind": "noise", "rows": [{"generator": "exact", "ns": 1.0}]}))
    subject = mckenna_flops_model(
        published_parameters={"micro": 2e4},
        sequence_lengths=[8, 32],
        physical_batch=2,
        batch_size=64,
        vocabulary_size=64,
        evidence=str(tmp_path),
    )
    products, shares, measured, judged = map(rows_of, subject())
    assert products[0]["6MS"] == 6 * products[0]["M"] * 8 and products[0]["products"] > 0
    assert shares[0]["clip_instantiated"] > shares[1]["clip_instantiated"]
    assert shares[0]["book_keeping_grams"] < shares[1]["book_keeping_grams"]
    assert [row["state"] for row in judged] == ["pass"]
    assert measured[0]["clipping_share"] == pytest.approx(0.1) and measured[0]["update_share"] == pytest.approx(0.5)
