"""Batch schedules: the paper's sizes, and the savings they give (anil2021, section (e) 1)."""

import pytest

from dpx.batch_schedule import Constant, Linear, Staged, stages
from dpx.declaration import ConfigError

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


def test_a_batch_of_nothing_is_refused():
    for make in (lambda: Constant(size=0), lambda: Staged(sizes=[], stage_steps=3), lambda: Linear(start=1, end=0, ramp_steps=2)):
        with pytest.raises(ConfigError):
            make()
