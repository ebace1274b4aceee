"""What stands in the lines of a run: epsilon with the step it is of, and time left that counts no compilation."""

import pytest

from dpx.console import figure
from dpx.training import progress
from dpx.training.progress import RunProgress


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_time_left_does_not_count_compilation(clock, capsys):
    shown = RunProgress(0, 40)
    for done, at in ((1, 100.0), (2, 101.0), (4, 103.0)):
        clock[0] = at
        shown.step(done, 10.0, 6.0, 0.5, None)
    first, second, third = lines(capsys)
    assert first == "step 1/40  loss 6.00  accuracy 50.0%"
    assert second.endswith("38 s left") and third.endswith("36 s left")


def test_epsilon_is_named_with_its_step_where_it_is_another(clock, capsys):
    shown = RunProgress(0, 40)
    shown.planned = 8.0
    shown.step(2, 10.0, 6.0, 0.5, 0.01234)
    clock[0] = 1.0
    shown.step(4, 10.0, 6.0, 0.5, None)
    first, second = lines(capsys)
    assert "epsilon 0.012/8.00" in first and " at " not in first
    assert "epsilon 0.012/8.00 at 2" in second


def test_a_line_is_due_twenty_times_and_at_the_first_and_the_last_step():
    shown = RunProgress(30, 250)
    assert [done for done in range(31, 251) if shown.shows(done)] == [31, *range(36, 251, 12), 250]


@pytest.mark.parametrize(
    ("value", "text"),
    [(7.3941, "7.39"), (0.0, "0.00"), (0.1, "0.10"), (0.05, "0.05"), (0.0394, "0.039"), (2.7e-5, "2.7e-05"), (3.69e19, "3.7e+19")],
)
def test_small_and_huge_figures_keep_digits(value, text):
    assert figure(value, 2) == text
