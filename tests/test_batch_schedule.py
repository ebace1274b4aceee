"""Batch schedules: the paper's sizes, and the savings they give (anil2021, section (e) 1)."""

import itertools

import pytest

from dpx.declaration import ConfigError
from dpx.sampler.batch_schedule import Constant, Linear, Staged, stages

LITERAL = Staged(sizes=[262144, 458752, 655360, 851968, 1048576], stage_steps=1875)
FIVE_STAGES = Staged(sizes=[262144, 458752, 655360, 851968, 1048576], stage_steps=1500)
RAMP = Linear(start=262144, end=1048576, ramp_steps=7500)


@pytest.mark.parametrize(("schedule", "saved"), [(LITERAL, 0.17578), (FIVE_STAGES, 0.140625), (RAMP, 0.140625)])
def test_examples_saved_against_a_constant_million(schedule, saved):
    examples = sum(size * count for size, count in stages(schedule, 20_000))
    assert 1 - examples / (1048576 * 20_000) == pytest.approx(saved, abs=2e-5)


def test_stages_merge_equal_neighbours_and_cover_every_step():
    assert stages(LITERAL, 20_000) == ((262144, 1875), (458752, 1875), (655360, 1875), (851968, 1875), (1048576, 12500))
    assert stages(Constant(size=5), 3) == ((5, 3),)
    assert stages(LITERAL, 2000) == ((262144, 1875), (458752, 125))


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 5, 6, 9])
@pytest.mark.parametrize("schedule", [Constant(size=5), Staged(sizes=[2, 2, 7], stage_steps=2), Linear(start=1, end=6, ramp_steps=5)])
def test_stages_are_the_sizes_of_all_steps(schedule, steps):
    assert [size for size, count in stages(schedule, steps) for _ in range(count)] == [schedule.at(step) for step in range(steps)]
    assert all(before[0] != after[0] for before, after in itertools.pairwise(stages(schedule, steps)))


def test_a_batch_of_nothing_is_refused():
    for make in (lambda: Constant(size=0), lambda: Staged(sizes=[], stage_steps=3), lambda: Linear(start=1, end=0, ramp_steps=2)):
        with pytest.raises(ConfigError):
            make()
