"""Real signals to real processes: the step is finished and saved, one line says how to go on, and a second signal ends at once."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpx.files.run_folder import Status
from dpx.privacy.ledger import Ledger
from tests.processes import MAIN, environment, head_run

# Of no more work than the process itself: a signal comes long before the last step.
STEPS = 20_000
RUN = [*head_run(STEPS), f"schedule.checkpoint_every={2 * STEPS}", f"schedule.evaluate_every={2 * STEPS}"]


def _start(folder: Path, *arguments: str, program: str = f"{MAIN}; main()") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wait(process: subprocess.Popen[str], is_there) -> None:
    while process.poll() is None and not is_there():
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()[1]


def _interrupted(folder: Path, number: signal.Signals, beyond: int) -> tuple[int, str]:
    """Starts the run, ends it once more than `beyond` steps are measured; its exit code and what it wrote to standard error."""

    def measured() -> int:
        return max((path.read_text().count("\n") for path in folder.glob("outputs/*/private/metrics.jsonl")), default=0)

    process = _start(folder, *RUN)
    _wait(process, lambda: measured() > beyond)
    process.send_signal(number)
    errors = process.communicate(timeout=120)[1]
    return process.returncode, errors


def _saved(folder: Path) -> int:
    """The step after which a run was ended by Ctrl-C, once everything it said and left is looked at."""
    code, errors = _interrupted(folder, signal.SIGINT, 3)
    (run,) = folder.glob("outputs/main-*")
    *_, line = errors.splitlines()
    pattern = r"interrupted after step (\d+): the same command resumes from there, and so does python -m dpx job=resume run=outputs/\S+"
    found = re.fullmatch(pattern, line)
    assert code == 130 and found and "Traceback" not in errors
    done = int(found[1])
    status = Status(run, "train").read()
    assert (status["state"], status["steps"]) == ("interrupted", done)
    assert Ledger(run / "private" / "ledger").segments()[0].steps == ((0, done),)
    assert (run / "private" / "checkpoints" / str(done)).is_dir()
    assert json.loads((run / "release" / "privacy.json").read_text())["spent"]["steps"] == done
    return done


def test_a_run_is_saved_where_it_was_ended(tmp_path: Path) -> None:
    _saved(tmp_path)


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    done = _saved(tmp_path)
    (run,) = tmp_path.glob("outputs/main-*")
    code, errors = _interrupted(tmp_path, signal.SIGTERM, done + 3)
    assert code == 143 and f"resuming from step {done}" in errors and "Traceback" not in errors
    assert Status(run, "train").read()["steps"] > done


@pytest.mark.slow
def test_a_second_signal_ends_at_once_also_in_the_middle_of_a_step(tmp_path: Path) -> None:
    program = (
        "import pathlib, time; from dpx.training import loop; import dpx.__main__ as m\n"
        "loop.one_step = lambda *_: (pathlib.Path('begun').touch(), time.sleep(600))\n"
        "m.main()"
    )
    process = _start(tmp_path, *RUN, program=program)
    _wait(process, (tmp_path / "begun").exists)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130
    assert "Traceback" not in process.communicate()[1]


def test_a_job_that_only_computes_ends_where_it_is_and_leaves_no_folder(tmp_path: Path) -> None:
    program = (
        "import pathlib, time; from dpx.job.plan import Plan; import dpx.__main__ as m\n"
        "Plan.__call__ = lambda *_: (pathlib.Path('begun').touch(), time.sleep(600))\n"
        "m.main()"
    )
    process = _start(tmp_path, "job=plan", program=program)
    _wait(process, (tmp_path / "begun").exists)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[1] == "interrupted: the same command starts again\n"
    assert process.returncode == 143
    assert not (tmp_path / "outputs").exists()


# A lock that is taken twice: compiled code that waits for ever, with the interpreter's lock (PyDLL) or without it (CDLL).
_HANG = """
import ctypes
library, lock = ctypes.{kind}(None), ctypes.create_string_buffer(256)
library.pthread_mutex_init(lock, None)
library.pthread_mutex_lock(lock)
print("begun", flush=True)
library.pthread_mutex_lock(lock)
"""
_INSTALLED = (
    "from dpx.processes import interruption\ninterruption.GRACE_SECONDS = 0.2\ninterruption.install()\ninterruption._is_deferred = True\n"
)
# A terminal that was stopped (Ctrl-S) takes no line.
_STOPPED = """
import sys, threading
class Stopped:
    isatty, write, flush = lambda self: True, lambda *_: threading.Event().wait(), lambda self: None
sys.stderr = Stopped()
"""


@contextlib.contextmanager
def _hanging(folder: Path, program: str) -> Iterator[subprocess.Popen[str]]:
    """The process of a program that prints "begun" and then hangs; it writes nothing to standard error, and has ended afterwards."""
    process = _start(folder, program=program)
    try:
        assert process.stdout is not None and "begun\n" in iter(process.stdout.readline, "")
        yield process
    finally:
        process.kill()
        errors = process.communicate()[1]
    assert errors == ""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("program", "ends"),
    [
        pytest.param(_INSTALLED + _HANG.format(kind="CDLL"), [128 + signal.SIGINT, 128 + signal.SIGTERM], id="compiled code"),
        pytest.param(_INSTALLED + _HANG.format(kind="PyDLL"), [-signal.SIGKILL], id="compiled code with the interpreter's lock"),
        pytest.param(
            _STOPPED + _INSTALLED + _HANG.format(kind="CDLL"), [128 + signal.SIGINT, 128 + signal.SIGTERM], id="a stopped terminal"
        ),
    ],
)
def test_a_second_signal_of_either_kind_ends_whatever_waits(tmp_path: Path, program: str, ends: list[int], first: signal.Signals) -> None:
    with _hanging(tmp_path, program) as process:
        for number in (first, *{signal.SIGINT, signal.SIGTERM} - {first}):
            process.send_signal(number)
        assert process.wait(timeout=60) in ends


# The first module that `main` imports hangs.
_BEFORE = """
import ctypes, sys, dpx.__main__ as m
class Hangs:
    find_spec = lambda *_: exec({hang!r})
sys.meta_path.insert(0, Hangs())
m.main()
"""
_AFTER = "import atexit, sys, dpx.__main__ as m\natexit.register(lambda: exec({hang!r}))\nsys.argv = ['dpx', '--hydra-help']\nm.main()\n"


@pytest.mark.parametrize("program", [part.format(hang=_HANG.format(kind="PyDLL")) for part in (_BEFORE, _AFTER)], ids=["before", "after"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_the_interpreter_starts_and_ends_the_first_signal_ends_it(tmp_path: Path, program: str, number: signal.Signals) -> None:
    with _hanging(tmp_path, program) as process:
        process.send_signal(number)
        assert process.wait(timeout=60) == -number


def test_a_guard_that_was_killed_is_done_without(tmp_path: Path) -> None:
    program = _INSTALLED + "interruption._guards[0].kill(); interruption._guards[0].wait()\n" + _HANG.format(kind="CDLL")
    with _hanging(tmp_path, program) as process:
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        assert process.wait(timeout=60) in (128 + signal.SIGINT, 128 + signal.SIGTERM)
