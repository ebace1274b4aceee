"""The table of events: every allowed cell is exact at q = 1, every other one refuses in one line."""

import itertools
import math
from typing import Any

import pytest

from dpx.declaration import ConfigError
from dpx.privacy import accounting, closed_form, events, loss_grid
from dpx.privacy.events import Release

ADJACENCIES = ("zero_out", "zero_out_text", "add_remove", "replace_one")
ACCOUNTANTS = ("pld", "rdp", "deterministic")
KINDS = (
    "poisson",
    "gaussian",
    "truncated_poisson",
    "fixed_size",
    "group",
    "shuffled",
    "deterministic",
    "balls_in_bins",
    "random_allocation",
    "slot_revealed",
)
SIGMA, STEPS, DELTA = 8.0, 10, 1e-6


def arguments(event):
    """A dp-accounting event's fields."""
    return event.to_named_tuple()._asdict()


def full_participation(kind):
    """Everyone takes part in each of these."""
    extra: dict[str, dict[str, Any]] = {
        "truncated_poisson": {"size": 100, "cap": 101},
        "fixed_size": {"size": 100, "sample_size": 100},
        "group": {"rows_per_unit": 3},
    }
    return Release(noise_multiplier=SIGMA, kind=kind, **extra.get(kind, {}))


def closed(kind, adjacency):
    sensitivity = (2 if adjacency == "replace_one" else 1) * (3 if kind == "group" else 1)
    return closed_form.epsilon(sensitivity * STEPS**0.5 / SIGMA, DELTA)


ALLOWED = [cell for cell, build in events.TABLE.items() if not isinstance(build, tuple)]
REFUSED = [cell for cell, build in events.TABLE.items() if isinstance(build, tuple)]


def test_the_table_is_complete():
    assert set(events.TABLE) == set(itertools.product(KINDS, ADJACENCIES, ACCOUNTANTS))


@pytest.mark.parametrize(("kind", "adjacency", "accountant"), ALLOWED)
def test_allowed_cells_are_gaussian_at_full_participation(kind, adjacency, accountant):
    found = accounting.compose([(full_participation(kind), STEPS)], accountant, adjacency).epsilon(DELTA)
    truth = closed(kind, adjacency)
    # Renyi is a bound; PLD is within its grid; the closed form is itself.
    slack = {"pld": 2e-3, "rdp": 0.15, "deterministic": 1e-6}[accountant]
    assert truth * (1 - 1e-4) <= found <= truth * (1 + slack)


@pytest.mark.parametrize(("kind", "adjacency", "accountant"), REFUSED)
def test_refused_cells_say_why_in_one_line(kind, adjacency, accountant):
    with pytest.raises(ConfigError) as refusal:
        events.event(full_participation(kind), adjacency, accountant)
    text = str(refusal.value)
    assert "\n" not in text and "Use " in text and kind in text


def test_replaced_units_cost_twice_the_sensitivity_by_renyi():
    once = events.event(Release(noise_multiplier=2.0, kind="gaussian"), "zero_out", "rdp")
    twice = events.event(Release(noise_multiplier=2.0, kind="gaussian"), "replace_one", "rdp")
    assert arguments(twice)["noise_multiplier"] == arguments(once)["noise_multiplier"] / 2


def test_the_truncated_event_costs_next_to_nothing_above_six_deviations():
    plain = Release(noise_multiplier=1.0, sampling_probability=512 / 60_000)
    epsilon = accounting.compose([(plain, 2000)]).epsilon(1e-5)
    assert epsilon == pytest.approx(2.169, rel=2e-3)
    for cap, expected in ((512, 13.03), (560, 5.366), (620, 2.1722), (660, 2.1695)):
        release = Release(noise_multiplier=1.0, sampling_probability=512 / 60_000, kind="truncated_poisson", size=60_000, cap=cap)
        found = accounting.compose([(release, 2000)], interval=1e-3).epsilon(1e-5)
        assert found == pytest.approx(expected, rel=5e-3)


def test_fixed_size_uses_the_sensitivity_of_a_replaced_row():
    release = Release(noise_multiplier=1.0, sampling_probability=512 / 60_000, kind="fixed_size", size=60_000, sample_size=512)
    assert accounting.compose([(release, 2000)], "rdp", "replace_one").epsilon(1e-5) == pytest.approx(25.97, rel=1e-3)


def test_poisson_under_replaced_units_is_dearer():
    release = Release(noise_multiplier=1.0, sampling_probability=512 / 60_000)
    assert accounting.compose([(release, 2000)], "pld", "replace_one", interval=5e-4).epsilon(1e-5) == pytest.approx(3.503, rel=2e-3)


@pytest.mark.parametrize("rows", [1, 2, pytest.param(5, marks=pytest.mark.slow)])
def test_a_unit_of_rows_costs_between_its_rows_apart_and_always_together(rows):
    def spent(release):
        return accounting.compose([(release, 100)]).epsilon(1e-6)

    group = spent(Release(noise_multiplier=2.0, sampling_probability=0.01, kind="group", rows_per_unit=rows))
    one_row = spent(Release(noise_multiplier=2.0, sampling_probability=0.01))
    together = spent(Release(noise_multiplier=2.0 / rows, sampling_probability=1 - 0.99**rows))
    assert one_row * (1 - 1e-3) <= group <= together * (1 + 3e-3)
    if rows == 1:
        assert group == pytest.approx(one_row, rel=3e-3)
    else:
        assert group > 1.2 * one_row


def test_a_large_unit_at_a_small_rate_is_summed_without_loss_of_mass():
    event = events.event(Release(noise_multiplier=2.0, sampling_probability=1e-6, kind="group", rows_per_unit=1000), "zero_out", "pld")
    found = arguments(event)
    assert sum(found["sampling_probs"]) == pytest.approx(1.0, abs=1e-12) and found["sensitivities"][-1] == 1000


@pytest.mark.parametrize("changes", [{"noise_multiplier": 0.0}, {"sampling_probability": 0.0}, {"sampling_probability": 1.5}])
def test_impossible_releases_are_refused(changes):
    with pytest.raises(ConfigError):
        Release(**({"noise_multiplier": 1.0} | changes))


@pytest.mark.parametrize(("noise_multiplier", "steps"), [(1.0, 20_000), (0.5, 20), pytest.param(0.05, 3, marks=pytest.mark.slow)])
def test_large_losses_take_a_coarser_grid_and_not_all_memory(noise_multiplier, steps):
    charges = [(Release(noise_multiplier=noise_multiplier), steps)]
    truth = closed_form.epsilon(steps**0.5 / noise_multiplier, DELTA)
    assert truth * (1 - 1e-6) <= accounting.compose(charges).epsilon(DELTA) <= truth * 1.002


def test_a_delta_that_rounding_swallows_is_not_claimed():
    charges = [(Release(noise_multiplier=1.0, sampling_probability=0.01), 1000)]
    composed, rounding = accounting.compose(charges), loss_grid.rounding(charges)
    assert composed.epsilon(0.9 * rounding) == math.inf and composed.delta(100.0) >= rounding
    assert composed.epsilon(10 * rounding) < 10


def test_tiny_rates_take_a_finer_grid():
    tiny, usual = ([(Release(noise_multiplier=0.5, sampling_probability=q), 1)] for q in (1e-7, 1e-2))
    assert loss_grid.grid(tiny) <= 1e-5 and loss_grid.grid(usual) == 1e-4


def test_a_ramp_takes_a_coarser_grid_than_its_rates_alone():
    ramp = [(Release(noise_multiplier=0.8, sampling_probability=1e-3 + 1e-4 * number), 250) for number in range(30)]
    assert loss_grid.grid(ramp) > 2e-4 and loss_grid.grid(ramp[:1] * 30) == loss_grid.grid(ramp[:6]) == 1e-4


@pytest.mark.slow
def test_a_tiny_rate_is_not_drowned_by_the_grid():
    charges = [(Release(noise_multiplier=0.5, sampling_probability=1e-7), 10**6)]
    assert 0.0148 <= accounting.compose(charges).epsilon(1e-8) <= 0.0148 * 1.015


def test_noise_too_small_for_a_distribution_is_refused_by_pld_and_bounded_by_the_others():
    charges = [(Release(noise_multiplier=2.0**-30, kind="shuffled"), 1)]
    with pytest.raises(ConfigError, match="accountant=pld"):
        accounting.compose(charges, "pld")
    assert accounting.compose(charges, "deterministic").epsilon(DELTA) > 2.0**59


def test_an_epsilon_that_the_grid_cannot_resolve_is_refused_with_the_accountant_that_can():
    stages = [(1e-4, 10_000)]
    by_rdp = accounting.epsilon(stages, noise_multiplier=1.0, delta=1e-13, accountant="rdp")
    assert math.isfinite(by_rdp)
    with pytest.raises(ConfigError, match=rf"accountant=pld: its grid cannot resolve .* epsilon {by_rdp:.4g}. Use accountant=rdp"):
        accounting.epsilon(stages, noise_multiplier=1.0, delta=1e-13)


@pytest.mark.parametrize(
    ("noise", "accountant", "line"),
    [
        (1e300, "rdp", r"noise_multiplier=1e\+300: is larger than the largest number of float32.* Give 3.40282e\+38 or less"),
        (
            1e30,
            "pld",
            "accountant=pld: the noise is so large that float64 rounds its privacy losses to 0. Use less noise, or accountant=rdp",
        ),
    ],
)
def test_noise_beyond_what_numbers_hold_is_refused(noise: float, accountant: str, line: str):
    with pytest.raises(ConfigError, match=line):
        accounting.epsilon([(0.01, 300)], noise_multiplier=noise, delta=DELTA, accountant=accountant)


def test_infinite_noise_is_not_a_release():
    with pytest.raises(ConfigError, match="noise_multiplier=inf"):
        accounting.epsilon([(0.01, 1)], noise_multiplier=math.inf, delta=1e-5)
