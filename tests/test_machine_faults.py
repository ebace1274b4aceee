"""Locks, fsync, open files or a folder that the system refuses midway end a run in one line with value, reason and fix, and exit code 2."""

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tensorstore

from dpx.launch.refused import log_uncaught
from tests.processes import Answer, answers, environment, head_run, micro_run

LINE = [*micro_run(4), "seed=1", "schedule.checkpoint_every=2"]
HEAD = [*head_run(4), "seed=1", "schedule.checkpoint_every=2"]

_FAULTS = """
import contextlib, errno, fcntl, itertools, os, resource, stat, sys
from dpx.__main__ import main

@contextlib.contextmanager
def refused(module, name, number, calls, only=lambda *_: True):
    real, count = getattr(module, name), itertools.count()
    def wrapped(*given, **named):
        if only(*given) and next(count) in calls:
            raise OSError(number, os.strerror(number))
        return real(*given, **named)
    setattr(module, name, wrapped)
    try:
        yield
    finally:
        setattr(module, name, real)

@contextlib.contextmanager
def few_handles(more):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = os.dup(0)
    os.close(first)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

def is_folder(handle):
    return stat.S_ISDIR(os.fstat(handle).st_mode)

sys.argv = ["dpx", *%r]
with %s:
    main()
"""


def meeting(folder: Path, faults: list[str], line: list[str] = LINE, **more: str) -> list[Answer]:
    """What a run came to under each fault, each in its own folder, on data that was prepared before."""
    line = [*line, f"data.directory={folder}/data"]
    codes = [_FAULTS % (line, one) for one in ["contextlib.nullcontext()", *faults]]
    folders = [folder / str(number) for number in range(len(codes))]
    for one in folders:
        one.mkdir()
    whole, *told = answers(list(zip(folders, codes, strict=True)), trains_alike=True, **more)
    assert whole.returncode == 0, whole
    return told


# All of a run's calls, or one of them.
FSYNC = {calls: f"refused(os, 'fsync', errno.EINVAL, {calls}, is_folder)" for calls in ("range(99)", "[9]")}
FLOCK = {calls: f"refused(fcntl, 'flock', errno.ENOLCK, {calls})" for calls in ("range(99)",)}
NO_HANDLES = {more: f"few_handles({more})" for more in (0, 14)}


def test_a_file_system_without_fsync_of_folders_or_without_locks_and_too_few_handles_are_one_line(tmp_path: Path) -> None:
    told = meeting(tmp_path, [*FSYNC.values(), *FLOCK.values(), *NO_HANDLES.values()], HEAD)
    refusals = [one.refusal() for one in told]
    ends = [
        *["Its file system cannot put it on disk safely (fsync); name a folder on another one."] * len(FSYNC),
        *["no locks available. Name a folder on a file system that has locks."] * len(FLOCK),
        *["too many open files. Raise the limit of open files, as with ulimit -n 4096, and run the same command."] * len(NO_HANDLES),
    ]
    assert all(line.endswith(end) for line, end in zip(refusals, ends, strict=True)), refusals
    assert all(str(tmp_path) in line or "outputs" in line for line in refusals[: len(FSYNC) + len(FLOCK)]), refusals
    assert not any("Traceback" in one.stderr for one in told)


# The calls of one kind in a run, a part of them in each process, which has eight minutes.
EACH = {
    **{
        f"fsync {number} {first}": [f"refused(os, 'fsync', errno.{number}, [{call}])" for call in range(first, 60, 6)]
        for number, first in itertools.product(("EINVAL", "EIO"), (0, 3))
    },
    "flock": [f"refused(fcntl, 'flock', errno.ENOLCK, [{call}])" for call in range(8)],
    "handles": [f"few_handles({more})" for more in range(1, 60, 4)],
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", EACH)
def test_every_call_of_a_run_may_be_refused(tmp_path: Path, part: str) -> None:
    for one, fault in zip(meeting(tmp_path, EACH[part]), EACH[part], strict=True):
        # Of the last calls there are none, or what they were for can be done without.
        assert one.returncode == 0 or one.refusal().count(". ") >= 1, (fault, one)
        assert "Traceback" not in one.stderr, (fault, one)


def _without_roots_rights() -> list[str] | None:
    """A command that takes away root's right to open any file; nothing for another user, `None` where it is missing."""
    if os.getuid() != 0:
        return []
    rights = "-dac_override,-dac_read_search"
    return [found, "--bounding-set", rights, "--inh-caps", rights] if (found := shutil.which("setpriv")) else None


def _late_result() -> None:
    """A result of tensorstore for a coroutine that has ended, in a loop that is closed: Orbax leaves these where another write failed."""
    promise, future = tensorstore.Promise.new()
    loop = asyncio.new_event_loop()

    async def wait() -> None:
        raise OSError

    async def both() -> None:
        await asyncio.gather(future, wait())

    with pytest.raises(OSError):
        loop.run_until_complete(both())
    loop.close()
    promise.set_result(1)


class _Fails:
    def __del__(self) -> None:
        raise ValueError("as it is deleted")


def _raise() -> None:
    raise ValueError("in a thread")


def test_what_no_caller_can_catch_is_logged_and_not_printed(monkeypatch: pytest.MonkeyPatch, capfd: Any, caplog: Any) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    log_uncaught()
    late = threading.Thread(target=_late_result)
    late.start()
    late.join()
    assert not [record for record in caplog.records if record.name == "dpx"]
    _Fails()
    thread = threading.Thread(target=_raise)
    thread.start()
    thread.join()
    assert [str(record.exc_info[1]) for record in caplog.records if record.name == "dpx"] == ["as it is deleted", "in a thread"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("place", [".", "private", "private/checkpoints", "release"])
def test_a_folder_that_is_closed_midway_is_one_line(tmp_path: Path, place: str) -> None:
    before = _without_roots_rights()
    if before is None:
        pytest.skip("needs setpriv, or another user than root")
    line = [*micro_run(2000), "seed=1", "schedule.checkpoint_every=5"]
    command = [*before, sys.executable, "-m", "dpx", *line]
    run = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (checkpoints := [*tmp_path.glob("outputs/main-*/private/checkpoints/[0-9]*[05]")]) and run.poll() is None:
        time.sleep(0.05)
    assert checkpoints, run.communicate()
    closed = checkpoints[0].parents[2] / place
    mode = closed.stat().st_mode
    closed.chmod(0)
    try:
        done = Answer(0, *run.communicate(timeout=500))._replace(returncode=run.returncode)
    finally:
        closed.chmod(mode)
    assert done.refusal().endswith(": permission denied. Name a folder that can be made and written to.")
    assert "Traceback" not in done.stderr and str(closed) in done.refusal(), done.stderr
    again = [sys.executable, "-m", "dpx", "job=explain", f"run={checkpoints[0].parents[2]}"]
    assert subprocess.run(again, cwd=tmp_path, env=environment(), capture_output=True, check=False).returncode == 0
