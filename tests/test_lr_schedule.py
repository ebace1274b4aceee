"""Learning-rate schedules against closed forms."""

import pytest

from dpx.declaration import ConfigError
from dpx.lr_schedule import WarmUpThen


def test_a_warm_up_longer_than_the_run_does_not_fit():
    schedule = WarmUpThen(learning_rate=1.0, warmup_steps=300, decay="linear")
    schedule.require_fits(300)
    fix = "Set lr_schedule.warmup_steps=250 or less, or raise steps"
    with pytest.raises(ConfigError, match=f"^lr_schedule.warmup_steps=300: the run of 250 steps would end before its warm-up. {fix}"):
        schedule.require_fits(250)


def test_quadratic_is_the_papers_formula():
    schedule = WarmUpThen(learning_rate=6.0902e-4, warmup_steps=7500, decay="quadratic")
    for t in (1, 3750, 7499):
        assert schedule.at(t - 1, 20_000) == pytest.approx(6.0902e-4 * t / 7500)
    for t in (7500, 12_000, 19_999, 20_000):
        assert schedule.at(t - 1, 20_000) == pytest.approx(6.0902e-4 * ((20_000 - t) / 12_500) ** 2, abs=1e-18)


def test_the_sum_of_rates_is_the_papers_shrinkage():
    schedule = WarmUpThen(learning_rate=6.0902e-4, warmup_steps=7500, decay="quadratic")
    assert sum(schedule.at(step, 20_000) for step in range(20_000)) == pytest.approx(4.82, abs=0.005)


@pytest.mark.parametrize(("decay", "middle", "last"), [("linear", 0.5, 0.0), ("constant", 1.0, 1.0)])
def test_other_decays(decay, middle, last):
    schedule = WarmUpThen(learning_rate=2.0, warmup_steps=0, decay=decay)
    assert schedule.at(49, 100) == pytest.approx(2.0 * middle)
    assert schedule.at(99, 100) == pytest.approx(2.0 * last)


def test_exponential_reaches_its_final_fraction():
    schedule = WarmUpThen(learning_rate=1.0, warmup_steps=10, decay="exponential", final_fraction=0.01)
    assert schedule.at(109, 110) == pytest.approx(0.01)
    assert schedule.at(59, 110) == pytest.approx(0.1)
    with pytest.raises(ConfigError):
        WarmUpThen(learning_rate=1.0, warmup_steps=10, decay="exponential")
