"""What is kept of one step's cost changes no bit of a composition: it is what dp-accounting comes to by itself."""

import dp_accounting
import pytest
from dp_accounting import pld, rdp

from dpx.privacy import accounting, events, loss_grid
from dpx.privacy.events import Release

SAMPLED = {
    "poisson": (Release(noise_multiplier=1.1, sampling_probability=0.02), "zero_out"),
    "replaced": (Release(noise_multiplier=1.5, sampling_probability=0.02), "replace_one"),
    "truncated": (Release(noise_multiplier=1.1, sampling_probability=0.05, kind="truncated_poisson", size=900, cap=60), "zero_out"),
    "group": (Release(noise_multiplier=2.0, sampling_probability=0.02, kind="group", rows_per_unit=3), "zero_out"),
    "everyone": (Release(noise_multiplier=9.0, kind="shuffled"), "zero_out"),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_losses_are_dp_accountings_own(name):
    release, adjacency = SAMPLED[name]
    interval = loss_grid.multiple([(release, 40)], adjacency)
    for count in (40, 7):
        event = events.composed([(release, count)], adjacency, "pld")
        theirs = pld.PLDAccountant(events.RELATION[adjacency], interval).compose(event)
        ours = accounting.compose([(release, count)], "pld", adjacency, interval=interval)
        assert ours.epsilon(1e-5) == theirs.get_epsilon(1e-5)


@pytest.mark.parametrize(
    ("release", "adjacency"),
    [
        (Release(noise_multiplier=1.1, sampling_probability=0.02), "zero_out"),
        (Release(noise_multiplier=4.0, sampling_probability=0.02, kind="fixed_size", size=1000, sample_size=20), "replace_one"),
    ],
)
def test_divergences_are_dp_accountings_own(release, adjacency):
    for count in (40, 7):
        event = events.composed([(release, count)], adjacency, "rdp")
        with accounting.quiet():
            theirs = rdp.RdpAccountant(neighboring_relation=events.RELATION[adjacency]).compose(event)
        # dpx adds a margin for float64's rounding to Poisson sampling.
        assert accounting.compose([(release, count)], "rdp", adjacency).epsilon(1e-5) == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-9)


def test_one_steps_losses_are_found_once():
    accounting._losses_of_one.cache_clear()
    release = Release(noise_multiplier=1.3, sampling_probability=0.013)
    found = [accounting.compose([(release, count)], interval=1e-3).epsilon(1e-6) for count in range(1, 9)]
    assert found == sorted(found)
    assert accounting._losses_of_one.cache_info().misses == 1


def test_events_can_be_kept():
    assert len({events.event(release, adjacency, "pld") for release, adjacency in SAMPLED.values()}) > 1
    assert isinstance(events.event(SAMPLED["group"][0], "zero_out", "pld"), dp_accounting.dp_event.MixtureOfGaussiansDpEvent)


def test_what_is_shown_does_not_drive_out_what_statements_ask_for_again():
    accounting._composed_losses.cache_clear()
    release = Release(noise_multiplier=3.0, sampling_probability=0.1)
    stated = accounting.compose([(release, 30)])
    for count in range(1, 12):
        accounting.compose([(release, count)], interval=5e-3)
    assert accounting.compose([(release, 30)]) is stated
