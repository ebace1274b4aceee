"""The lines that a run prints: epsilon with its step, and time left without compilation."""

import errno
import io
import os
import shlex
import subprocess
import sys

import pytest

from dpx.console import figure, stage, tell
from dpx.training import metrics
from dpx.training.metrics import RunProgress

from ..processes import environment


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
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


class Gone(io.StringIO):
    """A stream whose reader is gone, or whose disk is full; it counts what was tried."""

    def __init__(self, number: int):
        super().__init__()
        self.number, self.tried = number, 0

    def write(self, text: str) -> int:
        self.tried += 1
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_no_run_ends_because_nobody_reads_how_it_goes_on(monkeypatch, number):
    gone = Gone(number)
    monkeypatch.setattr(sys, "stderr", gone)
    with RunProgress(0, 4) as shown:
        shown.say("a line")
        shown.step(1, 10.0, 6.0, 0.5, None)
    stage("another line")
    tell("the last line")
    assert gone.tried >= 4


def test_a_process_whose_standard_error_is_closed_gives_its_number_to_no_other_file(tmp_path):
    program = (
        "import os, sys; from dpx.console import require_standard_streams, stage\n"
        "require_standard_streams(); file = open('ledger', 'w')\n"
        "stage('nobody reads this'); os.write(2, b'nor this'); assert file.fileno() > 2; file.write('whole')\n"
        "print('seen')"
    )
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(program)} 2>&-"
    ended = subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    assert ended.stdout == "seen\n" and (tmp_path / "ledger").read_text() == "whole"


def test_a_reader_that_left_changes_no_exit_code(tmp_path):
    """The interpreter would end with code 120: it writes once more what was not written before."""
    program = "from dpx.console import stage\nfor number in range(9): stage('nobody reads this')"
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment(), stderr=writer, check=False)
    os.close(writer)
    assert ended.returncode == 0
