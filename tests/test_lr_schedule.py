"""Learning-rate schedules against closed forms."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpx import config
from dpx.config import recipes
from dpx.declaration import ConfigError
from dpx.optimizer.lr_schedule import Cosine, OneCycle, Polynomial, WarmUpStableDecay, WarmUpThen


def test_a_warm_up_longer_than_the_run_does_not_fit():
    schedule = WarmUpThen(learning_rate=1.0, warmup_steps=300, decay="linear")
    schedule.require_fits(300)
    fix = "Set lr_schedule.warmup_steps=25, or a fraction such as 0.1, or raise steps"
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


def rates(schedule, steps: int) -> list[float]:
    schedule.require_fits(steps)
    return [schedule.at(step, steps) for step in range(steps)]


# Each with optax's function of the same 200 steps, 20 of them warm-up.
OF_OPTAX = [
    (
        Cosine(learning_rate=2e-3, warmup_steps=0.1, final_fraction=0.1, exponent=2.0),
        optax.warmup_cosine_decay_schedule(0.0, 2e-3, 20, 200, 2e-4, 2.0),
    ),
    (
        WarmUpStableDecay(learning_rate=2e-3, warmup_steps=20, decay_steps=0.25, final_fraction=0.5),
        optax.join_schedules(
            [optax.linear_schedule(0.0, 2e-3, 20), optax.constant_schedule(2e-3), optax.linear_schedule(2e-3, 1e-3, 50)], [20, 150]
        ),
    ),
    (OneCycle(learning_rate=2e-3, warmup_steps=0.1, div_factor=10.0), optax.cosine_onecycle_schedule(200, 2e-3, 0.1, 10.0, 1e4)),
    (
        Polynomial(learning_rate=2e-3, warmup_steps=20, power=0.5),
        optax.join_schedules([optax.linear_schedule(0.0, 2e-3, 20), optax.polynomial_schedule(2e-3, 0.0, 0.5, 180)], [20]),
    ),
]


@pytest.mark.parametrize(("schedule", "curve"), OF_OPTAX, ids=[schedule.kind for schedule, _ in OF_OPTAX])
def test_a_schedule_of_optax_has_its_values_from_count_one_on(schedule, curve):
    found = rates(schedule, 200)
    # One at a time, as optax is called in a loop: a last bit may differ from all at once.
    np.testing.assert_allclose(found, [curve(jnp.asarray(count)) for count in range(1, 201)], rtol=1e-6, atol=2e-9)
    assert found[19] == pytest.approx(2e-3) == max(found) and found[0] > 0


@pytest.mark.parametrize("option", ["cosine", "warm_up_stable_decay", "one_cycle", "polynomial"])
@pytest.mark.parametrize("steps", [2, 97])
def test_an_option_gives_a_rate_to_every_step_of_every_run(option, steps):
    schedule = config.build(recipes.compose([f"lr_schedule={option}", f"steps={steps}"]))[0].lr_schedule
    found = np.asarray(rates(schedule, steps))
    assert np.isfinite(found).all() and (found[:-1] > 0).all() and found[-1] >= 0
    # Without a step of warm-up, the first update is already one step into the decay.
    assert found.max() <= 2e-3 * (1 + 1e-6) and (steps < 10 or found.max() == pytest.approx(2e-3, rel=1e-2))


def test_a_warm_up_is_a_number_of_steps_or_a_fraction_of_them():
    for duration in (30, 0.15):
        schedule = WarmUpThen(learning_rate=2.0, warmup_steps=duration, decay="quadratic")
        assert rates(schedule, 200)[29] == 2.0 == max(rates(schedule, 200))
    whole, fraction = (WarmUpThen(learning_rate=2.0, warmup_steps=one, decay="quadratic") for one in (30, 0.15))
    assert rates(whole, 200) == rates(fraction, 200)
    assert config.build(recipes.compose(["lr_schedule=linear", "lr_schedule.warmup_steps=0.25"]))[0].lr_schedule.warmup_steps == 0.25


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda: Cosine(learning_rate=1.0, warmup_steps=1.5),
            "lr_schedule.warmup_steps=1.5: a fraction of the run is below 1. Use a fraction",
        ),
        (lambda: Cosine(learning_rate=1.0, warmup_steps=-1), "lr_schedule.warmup_steps=-1: warm-up cannot be negative. Use 0 for none."),
        (lambda: Cosine(learning_rate=0.0, warmup_steps=1), "lr_schedule.learning_rate=0.0: the peak rate must be positive."),
        (lambda: Polynomial(learning_rate=1.0, warmup_steps=1, power=0.0), "lr_schedule.power=0.0: the rate would not decay."),
        (
            lambda: OneCycle(learning_rate=1.0, warmup_steps=1, div_factor=0.5),
            "lr_schedule.div_factor=0.5: the rate would end or begin above its peak.",
        ),
        (
            lambda: WarmUpStableDecay(learning_rate=1.0, warmup_steps=0.5, decay_steps=0.6).require_fits(100),
            "lr_schedule.warmup_steps=0.5, lr_schedule.decay_steps=0.6: together they are longer than the run of 100 steps.",
        ),
        (
            lambda: Cosine(learning_rate=1.0, warmup_steps=100).require_fits(100),
            "lr_schedule.warmup_steps=100: the run of 100 steps would end before its decay. Use fewer than 100",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(make, line):
    with pytest.raises(ConfigError) as refused:
        make()
    assert str(refused.value).startswith(line)
