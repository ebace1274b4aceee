"""Analyses of Anil et al. 2021 against the values worked out in its reading."""

import dataclasses

import pytest

from dpx import config
from dpx.config import recipes
from dpx.models.shape import Bert
from dpx.table import Table
from dpx_papers.anil2021 import accounting as anil_accounting
from dpx_papers.anil2021.accounting import AnilAccounting
from dpx_papers.anil2021.scale_invariance import AnilScaleInvariance
from dpx_papers.anil2021.schedule_savings import AnilScheduleSavings, readings


def _rows(table: Table) -> list[dict]:
    return table.as_json()["rows"]


def _accounting() -> AnilAccounting:
    _, job = config.build(recipes.compose(["+experiment=anil_accounting"]))
    return job.analysis  # pyright: ignore[reportFunctionMemberAccess]


# Batch size, noise by Renyi accounting, PLD epsilon at that noise.
PUBLISHED = [(32_768, 0.4941, 4.36), (2_097_152, 1.2151, 5.10)]


@pytest.mark.slow
def test_noise_by_batch_size() -> None:
    # The larger is planned in tests/job/test_plan.py.
    published = PUBLISHED[:1]
    analysis = dataclasses.replace(_accounting(), batch_sizes=[batch for batch, _, _ in published])
    for row, (batch, sigma, epsilon) in zip(_rows(analysis.batches()), published, strict=True):
        assert row["batch size"] == batch
        assert row["sigma (rdp)"] == pytest.approx(sigma, rel=1e-2)
        assert row["epsilon (pld)"] == pytest.approx(epsilon, rel=1e-2)
        assert row["epsilon (rdp)"] == pytest.approx(5.36, rel=1e-3) and row["epsilon (rdp)"] <= 5.36
        assert row["sigma (pld)"] < row["sigma (rdp)"]


def test_noise_of_the_stepped_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anil_accounting, "readings", lambda: readings()[:1])
    (stepped,) = _rows(_accounting().schedules())
    assert stepped["sigma (rdp)"] == pytest.approx(0.789, rel=1e-2)
    assert stepped["epsilon (pld)"] < stepped["epsilon (rdp)"] <= 5.36


@pytest.mark.slow
def test_fixed_size_sampling_costs_more_than_poisson() -> None:
    analysis = dataclasses.replace(_accounting(), batch_sizes=[32_768, 65_536, 1_048_576, 2_097_152])
    rows = _rows(analysis.fixed_size())
    emptied = [row["fixed size, record emptied (C)"] for row in rows]
    assert emptied == pytest.approx([5.91, 6.00, 8.52, 11.57], rel=1e-2)
    assert rows[-1]["fixed size, record replaced (2C)"] == pytest.approx(40, rel=2e-2)
    assert rows[0]["fixed size, record replaced (2C)"] > 3000


def test_epsilon_grows_along_the_curve() -> None:
    analysis = dataclasses.replace(_accounting(), batch_sizes=[2_097_152], curve_steps=[100, 20_000])
    first, last = _rows(analysis.curve())[:2]
    for bound in ("epsilon (rdp)", "epsilon (pld)"):
        assert first[bound] < last[bound] <= 5.36
    assert last["gdp_clt (no bound)"] < last["epsilon (pld)"]


def test_savings_of_each_reading() -> None:
    table, _ = AnilScheduleSavings()()
    assert [row["saved"] for row in _rows(table)] == pytest.approx([0.17578125, 0.10546875, 0.140625, 0.140625], abs=1e-12)


@pytest.mark.parametrize(("option", "schedule"), [(option, schedule) for option, _, schedule in readings() if option])
def test_readings_are_the_config_options(option: str, schedule) -> None:
    declared = config.build(recipes.compose([f"batch_schedule={option}"]))[0].batch_schedule
    assert [declared.at(step) for step in range(0, 9000, 125)] == [schedule.at(step) for step in range(0, 9000, 125)]


@pytest.mark.slow
def test_only_the_three_tables_together_are_invariant() -> None:
    model = config.build(recipes.compose(["model=micro"]))[0].model
    assert isinstance(model, Bert)
    analysis = AnilScaleInvariance(model=model, alphas=[3.0], examples=2, tokens=8, vocabulary_size=32)
    (table,) = analysis()
    for row in _rows(table):
        holds = row["relative change of the loss"] < 1e-5 and abs(row["alpha * gradient norm / unscaled"] - 1) < 1e-3
        assert holds == row["claim holds"], row
