"""`profile=...`: shares of a step's time add up to one and follow what ran; parameters are the same bits; traces are private."""

import threading

import jax
import numpy as np
import pytest

from dpx.config.experiment import Schedule, StepProfile
from dpx.declaration import ConfigError
from dpx.files.run_folder import RunFolder
from dpx.training import session
from dpx.training.metrics import _shown
from dpx.training.profiling import ALL, Span, Timeline, Unprofiled, divided, profiling
from dpx.training.step import Step

from .conftest import declare, opened
from .test_adaptive import synthetic


def test_every_moment_counts_once_and_a_busy_device_comes_first():
    device = [Span("compute", 1.0, 3.0), Span("collectives", 3.0, 4.0)]
    host = [Span("data_wait", 0.0, 2.0), Span("ledger", 4.0, 6.0), Span("checkpoint", 9.0, 12.0)]
    found = divided(0.0, 10.0, device, host)
    expected = {"compute": 0.2, "collectives": 0.1, "data_wait": 0.1, "ledger": 0.2, "checkpoint": 0.1, "other": 0.3}
    assert found == pytest.approx(dict.fromkeys(ALL, 0) | expected) and tuple(found) == ALL


class Clock:
    """A clock that stands still until it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Computing:
    """A result that is ready when it is told."""

    def __init__(self):
        self.is_ready = threading.Event()

    def block_until_ready(self):
        self.is_ready.wait(10)
        return self


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timeline(clock):
    timeline = Timeline(clock)
    yield timeline
    timeline.close()


def test_rows_that_are_read_while_the_device_computes_are_no_wait(timeline, clock):
    program = Computing()
    ready = timeline.device("compute", 0.0, program)
    with timeline.host("data_wait"):
        clock.now = 1.0
        program.is_ready.set()
        ready.result(10)
        clock.now = 4.0
    seconds, shares = timeline.shares()
    assert seconds == 4.0
    assert shares["compute"] == pytest.approx(0.25) and shares["data_wait"] == pytest.approx(0.75)


def test_a_program_that_still_runs_counts_in_both_periods_and_the_one_behind_it_waits(timeline, clock):
    first, second = Computing(), Computing()
    readies = [timeline.device("compute", 0.0, first), timeline.device("collectives", 0.0, second)]
    clock.now = 2.0
    assert timeline.shares()[1]["compute"] == 1.0
    clock.now = 3.0
    first.is_ready.set()
    readies[0].result(10)
    clock.now = 4.0
    second.is_ready.set()
    timeline.drain()
    shares = timeline.shares()[1]
    assert shares["compute"] == pytest.approx(0.5) and shares["collectives"] == pytest.approx(0.5)


def test_an_activity_inside_another_one_is_a_part_of_it(timeline, clock):
    with timeline.host("checkpoint"):
        clock.now = 1.0
        with timeline.host("ledger"):
            clock.now = 2.0
    shares = timeline.shares()[1]
    assert (shares["checkpoint"], shares["ledger"]) == (1.0, 0.0)


def test_the_time_until_each_value_counts_and_not_the_time_that_it_is_used(timeline, clock):
    def values():
        for value in (1, 2):
            clock.now += 1
            yield value

    for _ in timeline.each("data_wait", values()):
        clock.now += 3
    assert timeline.shares() == (8.0, dict.fromkeys(ALL, 0.0) | {"data_wait": 0.25, "other": 0.75})


def run(folder, **changes):
    # Rows that other files of this folder prepare too.
    data = synthetic(str(folder.parents[1] / "data"))
    schedule = Schedule(evaluation_rows=32, evaluate_every=2, checkpoint_every=2)
    experiment = declare(data=data, steps=5, seed=7, schedule=schedule, **changes)
    lines = []
    with opened(experiment, RunFolder(folder)) as run:
        write = run.writer.write
        run.writer.write = lambda step, scalars: (lines.append(scalars), write(step, scalars))
        return session.train(run), lines


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain") / "run")


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiled") / "run"
    with pytest.MonkeyPatch.context() as patch:
        told = []
        patch.setattr("dpx.training.metrics.RunProgress.say", lambda self, text: told.append(text))
        return *run(folder, profile=StepProfile(shares=True, trace_steps=[2, 4, 5])), folder, told


# A run with a profile is slow: two processes train one in tests/several, and shares are divided above.
@pytest.mark.slow
def test_a_profile_changes_no_bit(plain, profiled):
    same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), plain[0].state.params, profiled[0].state.params)
    assert all(jax.tree.leaves(same))
    assert not any(name.startswith("profile/") for line in plain[1] for name in line)


@pytest.mark.slow
def test_every_line_of_metrics_has_shares_that_add_up_to_one(profiled):
    _, lines, _, told = profiled
    assert len(lines) == 5
    for line in lines:
        assert sum(line[f"profile/{name}"] for name in ALL) == pytest.approx(1.0)
        assert line["profile/seconds"] > 0 and line["profile/collectives"] == 0
        assert min(line[f"profile/{name}"] for name in ALL) >= 0
    # On a busy machine the device may be done with a step before it is waited for.
    assert max(line["profile/compute"] for line in lines) > 0
    # A charge may be hidden behind the step before; but not after a checkpoint.
    assert lines[2]["profile/ledger"] > 0 < lines[2]["profile/data_wait"]
    # The checkpoint and the evaluation after step 1 are in the period that ends with step 2.
    assert [line["profile/checkpoint"] > 0 for line in lines[1:]] == [False, True, False, True]
    assert [line["profile/evaluation"] > 0 for line in lines] == [True, False, True, False, True]
    assert told[-1].startswith("time of 4 steps: compute ")


@pytest.mark.slow
def test_neighbouring_steps_share_a_trace_and_it_is_private(profiled):
    folder = profiled[2]
    traces = sorted(folder.rglob("*.xplane.pb"))
    assert len({trace.parent for trace in traces}) == len(traces) == 2
    assert all(folder / "private" in trace.parents for trace in traces)
    assert (folder / "private").stat().st_mode & 0o077 == 0


def test_names_in_tensorboard():
    assert [_shown(f"profile/{name}") for name in ("ledger", "seconds")] == ["3_speed/share_of_ledger", "3_speed/seconds"]


def test_without_a_profile_nothing_is_wrapped(tmp_path):
    step = Step(*[lambda *_: None] * 8, chunk=1, rows=1)
    nothing = profiling(StepProfile(), tmp_path, 1)
    assert type(nothing) is Unprofiled and nothing.watched(step) is step and nothing.metrics() == {}
    values = [1, 2]
    assert nothing.each("data_wait", values) is values


@pytest.mark.parametrize(("steps", "message"), [([0], "numbered from 1"), ([1, 5], "the run has 4 steps")])
def test_a_step_that_the_run_never_reaches_is_refused(steps, message):
    with pytest.raises(ConfigError, match=message):
        declare(profile=StepProfile(trace_steps=steps))
