"""Random SIGKILLs of runs in one and in two processes, each started again in either number and on either mesh: nothing is lost and no key
meets two sums.

It ends after 60 kills and ten resumes elsewhere, or after DPX_SOAK_SECONDS, one hour by default. DPX_SOAK_SEED sets the draws of the
moments; `pytest -s` shows after each kill what was done so far.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpx.privacy.hash_chain import Chain

from .test_two_processes import FSDP, TWO, children, ended, one_sum_a_key, outcome, several, worker_of

STEPS, KILLS, CHANGES = 300, 60, 10
PLACES = [(count, mesh) for count in (1, 2) for mesh in ("data", "fsdp")]
SECONDS = float(os.environ.get("DPX_SOAK_SECONDS", "3600"))
# A run that hangs fails the test.
LONGEST_SECONDS = 1200


def lines(folder: Path) -> list:
    """The lines of the run's ledger, which was read and checked whole."""
    found = list(folder.glob("outputs/main-*/private/ledger"))
    return Chain(found[0]).lines if found else []


def pids(run: "subprocess.Popen[str]", count: int) -> list[int]:
    """The working processes."""
    return children(run.pid) if count == 1 else [found for index in range(count) if (found := worker_of(run.pid, index))]


def kill(run: "subprocess.Popen[str]", count: int, draw: random.Random) -> bool:
    """Kills a working process or all of them, unless the run ends first; returns whether it did."""
    has_killed = False
    # A supervising process takes seconds to start its worker.
    while run.poll() is None and not has_killed:
        with contextlib.suppress(OSError):
            found = pids(run, count)
            for victim in draw.choice([found, [draw.choice(found)]]) if found else ():
                os.kill(victim, signal.SIGKILL)
                has_killed = True
        time.sleep(0.3)
    return has_killed


def started(folder: Path, place: tuple[int, str]) -> "subprocess.Popen[str]":
    count, mesh = place
    return several(folder, count, *(TWO if mesh == "data" else FSDP), "schedule.checkpoint_every=10", steps=STEPS)


def disturbed(folder: Path, place: tuple[int, str], draw: random.Random) -> tuple[bool, bool]:
    """Starts or resumes the run and kills it at a random moment; returns whether it was killed before it ended, and whether it resumed."""
    began, before = time.monotonic(), len(lines(folder))
    run = started(folder, place)
    if draw.random() < 0.8:
        while run.poll() is None and len(lines(folder)) < before + 5:
            assert time.monotonic() - began < LONGEST_SECONDS
            time.sleep(0.3)
        time.sleep(6 * draw.random())
    else:
        time.sleep(20 * draw.random())
    was_killed = kill(run, place[0], draw)
    out, errors = run.communicate(timeout=LONGEST_SECONDS)
    assert run.returncode == 0 or was_killed, out[-2000:] + errors[-3000:]
    assert "Traceback" not in errors, errors[-3000:]
    return was_killed, "resuming from step" in out + errors


def require_whole(folder: Path) -> int:
    """A finished run was charged for every step of every key; returns the number of keys."""
    _, stated, ledger, run = outcome(folder)
    charged = [(entry.epoch, step) for step, entry in ledger.entries()]
    assert len(charged) == len(set(charged)) == stated["spent"]["charged_steps"] and {step for _, step in charged} == set(range(STEPS))
    assert len({epoch.secret_tag for epoch in ledger.noise_epochs}) == len(ledger.noise_epochs)
    return one_sum_a_key(run)


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 3 * LONGEST_SECONDS)
def test_nothing_is_lost_and_no_key_meets_two_sums(tmp_path):
    draw, began = random.Random(int(os.environ.get("DPX_SOAK_SEED", "0"))), time.monotonic()
    kills = changes = keys = runs = 0
    before = None
    while (kills < KILLS or changes < CHANGES) and time.monotonic() < began + SECONDS:
        folder, was, place = tmp_path / str(runs), lines(tmp_path / str(runs)), draw.choice(PLACES)
        was_killed, has_resumed = disturbed(folder, place, draw)
        changes += has_resumed and place != before
        kills += was_killed
        # What did not begin to resume leaves the run where it was.
        before = place if has_resumed or not was else before
        now = lines(folder)
        assert now[: len(was)] == was, "a line of the ledger was lost"
        if not was_killed:
            keys, runs, before = keys + require_whole(folder), runs + 1, None
        minutes = (time.monotonic() - began) / 60
        did = f"{kills} kills, {changes} resumes in another number of processes or on another mesh, {runs} runs ended, {keys} keys in these"
        print(f"{minutes:.0f} min: {did}; {place[0]} processes, mesh {place[1]}: {len(now)} lines", flush=True)
    if (tmp_path / str(runs)).exists():
        ended(started(tmp_path / str(runs), (1, "data")), within_s=LONGEST_SECONDS)
        keys += require_whole(tmp_path / str(runs))
    print(f"in all: {kills} kills, {changes} such resumes, {keys} keys of noise, none on two sums")


PEER_STEPS, PEER_KILLS = int(os.environ.get("DPX_PEER_STEPS", "40")), int(os.environ.get("DPX_PEER_KILLS", "20"))
# One row for each kill, so that a soak that was interrupted goes on after the last of them.
PEER_ROWS = os.environ.get("DPX_PEER_ROWS")


@pytest.mark.soak
@pytest.mark.timeout(LONGEST_SECONDS * (PEER_KILLS + 1))
def test_a_peer_that_is_killed_at_any_moment_ends_the_job_with_75_or_it_starts_again(tmp_path):
    """A checkpoint follows every second step, so many of the kills meet a save. DPX_PEER_KILLS is their number, 20 by default;
    DPX_PEER_STEPS is the number of steps, 40 by default; DPX_PEER_ROWS is a file that keeps a row of each."""
    rows = Path(PEER_ROWS or tmp_path / "rows.jsonl")
    done = {json.loads(line)["kill"] for line in rows.read_text().splitlines()} if rows.exists() else set()
    common = (*TWO, "seed=1", "schedule.checkpoint_every=2")
    ended(several(tmp_path / "whole", 2, *common, steps=PEER_STEPS), within_s=LONGEST_SECONDS)
    whole, *_ = outcome(tmp_path / "whole")
    for number in range(PEER_KILLS):
        if number not in done:
            row = peer_killed(tmp_path / str(number), number, common, whole)
            with rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)
    rows_by_kill = {row["kill"]: row for row in map(json.loads, rows.read_text().splitlines())}
    assert all(row["is_right"] for row in rows_by_kill.values()) and len(rows_by_kill) == PEER_KILLS


def peer_killed(folder: Path, number: int, common: tuple[str, ...], whole: dict[str, np.ndarray]) -> dict[str, Any]:
    """Kills one of two processes at a drawn moment, starts the job again if it ended with 75, and returns what came of it."""
    draw = random.Random(f"{os.environ.get('DPX_SOAK_SEED', '0')} {number}")
    victim, restarts, awaited, pause = draw.randrange(2), draw.randrange(2), draw.randrange(1, PEER_STEPS), 0.5 * draw.random()
    run = several(folder, 2, *common, f"mesh.restarts={restarts}", steps=PEER_STEPS)
    began = time.monotonic()
    while len(lines(folder)) < awaited and run.poll() is None:
        assert time.monotonic() - began < LONGEST_SECONDS
        time.sleep(0.02)
    time.sleep(pause)
    with contextlib.suppress(OSError):
        os.kill(worker_of(run.pid, victim), signal.SIGKILL)
    out, errors = run.communicate(timeout=LONGEST_SECONDS)
    (folder / "stderr").write_text(errors)
    # A run that ended before it was killed says nothing.
    is_code_right = run.returncode == (0 if restarts or "process lost" not in errors else 75)
    foreign = [line for line in errors.splitlines() if re.search(r"Traceback|\.(cc|py):\d+|^    |stack trace|^  File ", line)]
    if run.returncode == 75:
        ended(several(folder, 2, *common, "mesh.restarts=0", steps=PEER_STEPS), within_s=LONGEST_SECONDS)
    params, _, ledger, _ = outcome(folder)
    apart = max(float(np.abs(params[path] - whole[path]).max()) for path in whole)
    # Of another sum under the same key nothing is released: a new noise epoch draws anew, and is charged.
    is_same = params.keys() == whole.keys() and (apart < 1e-5 or len(ledger.noise_epochs) > 1)
    return {
        "kill": number,
        "process": victim,
        "after_lines": awaited,
        "restarts": restarts,
        "code": run.returncode,
        "said_lost": errors.count("process lost"),
        "foreign_lines": len(foreign),
        "noise_epochs": len(ledger.noise_epochs),
        "apart": apart,
        "is_right": is_code_right and is_same and not foreign,
    }
