"""The ratio that a budget needs: near the exact one between nodes, the smaller branch, and none for no noise."""

import functools
import json
import time
from pathlib import Path

import numpy as np
import pytest

from dpx.config import build, recipes
from dpx.cost import designs
from dpx.cost.designs import Calibration
from dpx.cost.measured_runs import Measurements
from dpx.files.run_folder import RunFolder
from dpx_papers.scaling import published

from .synthetic import form_l2, rows_of

CASES = {case["id"]: case for case in json.loads((Path(__file__).parents[1] / "privacy" / "reference.json").read_text())}


@pytest.mark.slow
def test_between_nodes_it_is_within_one_percent_of_the_exact_ratio(tmp_path, monkeypatch):
    """Nodes are solved to one percent by a sketch of the loss; an exact ratio by as fine a grid as a claim's."""
    solved = {}
    monkeypatch.setattr(designs, "_solved", lambda *_: solved)
    monkeypatch.setenv("DPX_CACHE", str(tmp_path))
    calibration = Calibration(4.0, 1e-6)
    settings = [(2e5, 6000.0, 450), (2e5, 50_000.0, 2000)]
    found, is_fixed = calibration.ratio(*(np.array(values, float) for values in zip(*settings, strict=True)))
    exact = [calibration.exact(*setting) for setting in settings]
    assert found == pytest.approx([one.ratio for one in exact], rel=0.01)
    assert is_fixed.tolist() == [one.chosen == "deterministic" for one in exact]


PAPER = {"tiny": 4.6e6, "mini": 1.1e7, "small": 2.9e7, "medium": 4.1e7, "base": 1.1e8, "large": 3.352e8, "mega": 7.84e8}


@pytest.mark.slow
def test_figure_13_from_nothing_takes_two_minutes_of_two_processors(tmp_path, monkeypatch):
    """Four sizes, five budgets and thirty computes on a made-up surface of the paper's grid, no noise solved before."""

    def truth(parameters, steps, ratio):
        return form_l2(parameters / 200, steps / 10, ratio * 100)

    axes = {"parameters": PAPER, "ratios": 2.0 ** -np.arange(6, 24)[::-1], "steps": 1000.0 * np.arange(1, 129)}
    Measurements.from_rows([row | {"batch_size": 1024.0, "sequence_length": 512} for row in rows_of(truth, **axes)]).write(
        tmp_path / "losses.csv"
    )
    line = ["+experiment=mckenna_fig13_allocation_by_n", f"analysis.lab.measurements={tmp_path / 'losses.csv'}", "hydra.mode=RUN"]
    experiment, job = build(recipes.compose(line))
    monkeypatch.setenv("DPX_CACHE", str(tmp_path))
    monkeypatch.setattr(designs, "_solved", functools.cache(lambda *_: {}))
    began = time.process_time()
    job(experiment, RunFolder(tmp_path / "run", ""))
    assert time.process_time() - began < 240
    assert len(list((tmp_path / "calibration").iterdir())) > 500


def test_a_batch_larger_than_the_data_has_no_ratio_and_no_budget_no_noise():
    assert np.isnan(Calibration(4.0, 1e-6).ratio(np.array([1e3]), np.array([2e3]), np.array([10.0]))[0]).all()
    assert Calibration(float("inf"), 1e-6).ratio(np.array([1e3]), np.array([100.0]), np.array([10.0]))[0] == 0


def test_table_two_is_transcribed_as_its_identities_and_the_reference_have_it():
    """C = 6 M B S T and tokens per parameter = S B T / M hold up to the printed digits: a check of transcription, not a finding."""
    assert len(published.TABLE_2) == 20
    for row in published.TABLE_2:
        assert row.implied_compute == pytest.approx(row.compute, rel=0.08)
        assert row.implied_tokens_per_parameter == pytest.approx(row.tokens_per_parameter, rel=0.09)
    assert published.look_up(1e7, 16).loss == 2.15
