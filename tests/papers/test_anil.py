"""Analyses of Anil et al. 2021 against the values worked out in its reading."""

import dataclasses

import pytest

from dpx import config
from dpx.config import recipes
from dpx.models.shape import Bert
from dpx_papers.anil2021 import accounting
from dpx_papers.anil2021.scale_invariance import anil_scale_invariance
from dpx_papers.anil2021.schedule_savings import anil_schedule_savings, readings
from tests.report.made import rows_by_table


@pytest.fixture
def of_few(monkeypatch: pytest.MonkeyPatch):
    """Rows of the accounting, by table, of some of its settings; the curve is left out, and so are readings beyond `readings`."""
    _, job = config.build(recipes.compose(["+experiment=anil_accounting"]))

    def made(schedules: int = 0, **changed: object) -> dict[str, list[dict]]:
        monkeypatch.setattr(accounting, "readings", lambda: readings()[:schedules])
        return rows_by_table(dataclasses.replace(job.analysis, **({"curve_steps": []} | changed)))  # pyright: ignore

    return made


# Batch size, noise by Renyi accounting, PLD epsilon at that noise.
PUBLISHED = [(32_768, 0.4941, 4.36), (2_097_152, 1.2151, 5.10)]


@pytest.mark.slow
def test_noise_by_batch_size(of_few) -> None:
    # The larger is planned in tests/job/test_plan.py.
    published = PUBLISHED[:1]
    found = of_few(batch_sizes=[batch for batch, _, _ in published])["sigma_by_batch"]
    for row, (batch, sigma, epsilon) in zip(found, published, strict=True):
        assert row["batch size"] == batch
        assert row["sigma (rdp)"] == pytest.approx(sigma, rel=1e-2)
        assert row["epsilon (pld)"] == pytest.approx(epsilon, rel=1e-2)
        assert row["epsilon (rdp)"] == pytest.approx(5.36, rel=1e-3) and row["epsilon (rdp)"] <= 5.36
        assert row["sigma (pld)"] < row["sigma (rdp)"]


def test_noise_of_the_stepped_schedule(of_few) -> None:
    (stepped,) = of_few(1, batch_sizes=[])["sigma_by_schedule"]
    assert stepped["sigma (rdp)"] == pytest.approx(0.789, rel=1e-2)
    assert stepped["epsilon (pld)"] < stepped["epsilon (rdp)"] <= 5.36


@pytest.mark.slow
def test_fixed_size_sampling_costs_more_than_poisson(of_few) -> None:
    rows = of_few(batch_sizes=[32_768, 65_536, 1_048_576, 2_097_152])["fixed_size_sampling"]
    emptied = [row["fixed size, record emptied (C)"] for row in rows]
    assert emptied == pytest.approx([5.91, 6.00, 8.52, 11.57], rel=1e-2)
    assert rows[-1]["fixed size, record replaced (2C)"] == pytest.approx(40, rel=2e-2)
    assert rows[0]["fixed size, record replaced (2C)"] > 3000


def test_epsilon_grows_along_the_curve(of_few) -> None:
    first, last = of_few(batch_sizes=[2_097_152], curve_steps=[100, 20_000])["epsilon_by_step"]
    for bound in ("epsilon (rdp)", "epsilon (pld)"):
        assert first[bound] < last[bound] <= 5.36
    assert last["gdp_clt (no bound)"] < last["epsilon (pld)"]


def test_savings_of_each_reading() -> None:
    assert [row["saved"] for row in rows_by_table(anil_schedule_savings())["schedule_savings"]] == pytest.approx(
        [0.17578125, 0.10546875, 0.140625, 0.140625], abs=1e-12
    )


@pytest.mark.parametrize(("option", "schedule"), [(option, schedule) for option, _, schedule in readings() if option])
def test_readings_are_the_config_options(option: str, schedule) -> None:
    declared = config.build(recipes.compose([f"batch_schedule={option}"]))[0].batch_schedule
    assert [declared.at(step) for step in range(0, 9000, 125)] == [schedule.at(step) for step in range(0, 9000, 125)]


@pytest.mark.slow
def test_only_the_three_tables_together_are_invariant() -> None:
    model = config.build(recipes.compose(["model=micro"]))[0].model
    assert isinstance(model, Bert)
    analysis = anil_scale_invariance(model=model, alphas=[3.0], examples=2, tokens=8, vocabulary_size=32)
    for row in rows_by_table(analysis)["scale_invariance"]:
        holds = row["relative change of the loss"] < 1e-5 and abs(row["alpha * gradient norm / unscaled"] - 1) < 1e-3
        assert holds == row["claim holds"], row
