"""Every unit takes part in one step of each epoch, at a place that its number, the epoch and the secret decide, and nothing else."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpx import sampler
from dpx.claim.calibration import as_drawn_by
from dpx.claim.spent import under_assumed_sampler
from dpx.declaration import ConfigError
from dpx.privacy import ledger
from dpx.privacy.declared_privacy import Pld, Privacy
from dpx.privacy.segments import ALLOCATION, Segment
from dpx.processes.place import Part
from dpx.randomness import RootSecret
from dpx.sampler import batch_schedule
from dpx.sampler.random_allocation import RandomAllocation, places_of

SECRET, KIND = RootSecret.from_seed(1), RandomAllocation()


def generator_for(*place):
    return SECRET.generator("sample", *place)


def independent(pairs: np.ndarray) -> bool:
    # It has no declared type.
    found: Any = stats.chi2_contingency(pairs)
    return found.pvalue > 1e-4


def drawn(size: int, steps: int, step: int, stretch: int = 0, secret: RootSecret = SECRET, part: Part | None = None) -> np.ndarray:
    of_part = {} if part is None else {"part": part}
    return sampler.draw(KIND, size, 1 / steps, lambda *place: secret.generator("sample", *place), step, stretch=stretch, **of_part)


def places(size: int, steps: int, epoch: int = 0, secret: RootSecret = SECRET) -> np.ndarray:
    found = np.full(size, -1)
    for step in range(steps):
        units = drawn(size, steps, epoch * steps + step, secret=secret)
        # Without replacement: no unit has two places.
        assert (found[units] == -1).all()
        found[units] = step
    return found


def test_every_unit_has_one_uniform_place_in_each_epoch_independent_of_other_units_and_epochs() -> None:
    first, second = places(70_000, 5), places(70_000, 5, epoch=1)
    assert first.min() == 0 and stats.chisquare(np.bincount(first)).pvalue > 1e-4
    for one, other in ((first, second), (first[:-1], first[1:]), (first[:4_000], first[65_536:69_536])):
        pairs = np.bincount(5 * one + other, minlength=25).reshape(5, 5)
        assert independent(pairs)
    # A further unit moves no other, and the last place has the number of the epoch's steps.
    assert np.array_equal(places(66_000, 5), first[:66_000])


def test_places_are_the_high_words_and_never_reach_the_number_of_steps() -> None:
    for steps in (1, 2, 3, 1000, 2**31):
        words = generator_for("allocation", 0, 0).bit_generator.random_raw(50).tolist()
        found = places_of(50, steps, generator_for("allocation", 0, 0)).tolist()
        assert found == [word * steps >> 64 for word in words] and max(found) < steps


def test_places_repeat_with_their_key_and_only_with_it() -> None:
    again = places(2_000, 4)
    assert np.array_equal(again, places(2_000, 4))
    others = [places(2_000, 4, epoch=1), places(2_000, 4, secret=RootSecret.from_seed(2))]
    # Counted from another step, epoch 0 is another epoch, although its number is the same.
    others.append(from_stretch(2_000, 4, 8))
    for other in others:
        assert abs((again == other).mean() - 0.25) < 0.06


def from_stretch(size: int, steps: int, stretch: int) -> np.ndarray:
    found = np.full(size, -1)
    for step in range(steps):
        found[drawn(size, steps, stretch + step, stretch)] = step
    assert found.min() == 0
    return found


def test_epochs_of_another_length_have_places_of_their_own() -> None:
    # Of 4 steps from step 0 and of 5 from step 4: both have the number 0.
    pairs = np.bincount(5 * places(20_000, 4) + from_stretch(20_000, 5, 4), minlength=20).reshape(4, 5)
    assert independent(pairs) and pairs.sum() == 20_000


def test_processes_share_a_draw() -> None:
    for size in (1_000, 9 * 65_536):
        parts = [drawn(size, 3, 4, part=Part(index, 2)) for index in range(2)]
        assert np.array_equal(np.sort(np.concatenate(parts)), drawn(size, 3, 4)) and min(map(len, parts)) > 0


def test_a_stretch_begins_where_the_batch_size_changes() -> None:
    staged = batch_schedule.Staged(sizes=[4, 4, 8], stage_steps=3)
    assert [batch_schedule.stretch_of(staged, step) for step in (0, 2, 3, 5, 6, 7, 100)] == [0, 0, 0, 0, 6, 6, 6]
    linear = batch_schedule.Linear(start=10, end=20, ramp_steps=20)
    changes = [step for step in range(1, 30) if linear.at(step) != linear.at(step - 1)]
    assert [batch_schedule.stretch_of(linear, step) for step in range(30)] == [max([0, *(c for c in changes if c <= s)]) for s in range(30)]
    assert batch_schedule.stretch_of(batch_schedule.Constant(size=3), 10**9) == 0


SEGMENT = Segment(
    noise_multiplier=1.0,
    sampler="random_allocation",
    size=1_000,
    epoch=0,
    epoch_name="one",
    q=0.1,
    expected_batch_size=100,
    clipping_norm=1.0,
    allocation=ALLOCATION,
    allocation_steps=10,
    allocation_from=0,
    origin="ledger",
    steps=((0, 25),),
)


def charged(*segments: Segment) -> list[tuple[str, float, float, int]]:
    return [(one.kind, one.noise_multiplier, one.sampling_probability, count) for one, count in ledger.releases(list(segments))]


def test_an_epoch_that_began_is_charged_whole_and_once() -> None:
    assert charged(SEGMENT) == [("random_allocation", 1.0, 0.1, 3)]
    # The same steps in two records, at two noises: one charge an epoch, at the smaller noise.
    louder = dataclasses.replace(SEGMENT, noise_multiplier=2.0, steps=((15, 10),))
    assert charged(SEGMENT, louder) == [("random_allocation", 1.0, 0.1, 3)]
    # Another key, or another length or first step of the epochs, is another allocation.
    for change in ({"epoch": 1}, {"epoch_name": "two"}, {"origin": "other"}, {"allocation_from": 20}):
        again = dataclasses.replace(SEGMENT, steps=((20, 5),), **change)
        assert charged(SEGMENT, again) == [("random_allocation", 1.0, 0.1, 4)]
    assert charged(SEGMENT, dataclasses.replace(SEGMENT, q=0.2, allocation_steps=5, steps=((20, 5),)))[1][3] == 1
    # A record of another sampler in the same places is charged too, in either order: the amplified charge does not replace it.
    shuffled = dataclasses.replace(SEGMENT, sampler="shuffled")
    for segments in ((SEGMENT, shuffled), (shuffled, SEGMENT)):
        assert charged(*segments) == [("random_allocation", 1.0, 0.1, 3), ("shuffled", 1.0, 1.0, 3)]


def test_steps_as_if_allocated_are_counted_in_epochs_from_the_first_step() -> None:
    """Also where a new noise epoch began within an epoch."""
    shuffled = dataclasses.replace(SEGMENT, sampler="shuffled", allocation=None, allocation_steps=None, allocation_from=None)
    later = dataclasses.replace(shuffled, steps=((5, 10),))
    assert charged(*as_drawn_by("random_allocation", [later])) == [("random_allocation", 1.0, 0.1, 2)]
    # Steps that were allocated keep their epochs.
    own = dataclasses.replace(SEGMENT, steps=((5, 10),))
    assert as_drawn_by("random_allocation", [own]) == [own]


def test_an_earlier_run_whose_steps_cannot_be_allocated_ends_no_statement() -> None:
    of_several = dataclasses.replace(SEGMENT, sampler="poisson", rows_per_unit=2, origin="earlier")
    assumed = sampler.Shuffled(assumed="random_allocation")
    assert under_assumed_sampler(assumed, Pld(), 1e-6, [of_several]) == []


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"allocation": None}, "another function"),
        ({"allocation": "philox4x64/0"}, "another function"),
        ({"allocation_steps": None}, "number of steps"),
        ({"allocation_steps": 100}, "q=0.1 gives epochs of 10 steps"),
        ({"allocation_from": None}, "first step"),
        ({"allocation_from": 5}, "comes after one of its steps"),
        ({"rows_per_unit": 2}, "allocated apart"),
    ],
)
def test_a_record_that_does_not_say_how_units_were_allocated_has_no_bound(change: dict, refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        charged(dataclasses.replace(SEGMENT, **change))


def test_a_record_of_balls_in_bins_stays_without_amplification_whatever_else_it_says() -> None:
    assert charged(dataclasses.replace(SEGMENT, sampler="balls_in_bins")) == [("balls_in_bins", 1.0, 1.0, 3)]


def test_rows_of_a_unit_are_not_allocated_apart() -> None:
    def check(**of: object) -> None:
        KIND.check(Privacy(delta=1e-6, unit="document", rows_per_unit_max=3, **of), Pld())  # pyright: ignore[reportArgumentType]

    check(unit_mode="sample_units")
    check(unit_mode="one_row")
    with pytest.raises(ConfigError, match="in several steps"):
        check()
