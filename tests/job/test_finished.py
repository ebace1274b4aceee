"""A run that has finished says so, and no file of it changes; one that lost something goes on, or is refused."""

import hashlib
from pathlib import Path

import pytest

from tests.processes import answers

RUN = ["model=micro", "data=synthetic", "steps=2", "microbatch=8", "batch_schedule.size=16", "schedule.evaluation_rows=32"]
RUN += ["data.sequence_length=32", "noise=multiplier", "noise.noise_multiplier=2.0", "accountant=rdp", "privacy.delta=1e-4"]


def _state(run: Path) -> dict[str, tuple[int, str]]:
    """Every file of the run, with the time it was written at and its content."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file()]
    return {str(path.relative_to(run)): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("finished")
    (done,) = answers([(place, RUN)])
    assert done.returncode == 0, done.stderr
    return place


def test_it_says_so_and_touches_nothing(finished: Path) -> None:
    (run,) = finished.glob("outputs/main-*")
    before = _state(run)
    lines = RUN, ["job=resume", f"run={run.relative_to(finished)}"], [*RUN, "schedule.checkpoint_every=1"]
    for again in answers([(finished, line) for line in lines]):
        assert again.returncode == 0 and "this run has finished; nothing was done" in again.stderr
        assert "epsilon (rdp)" in again.stdout
    assert _state(run) == before


def test_what_was_taken_away_is_made_again_and_a_cut_ledger_is_refused(finished: Path) -> None:
    (run,) = finished.glob("outputs/main-*")
    (run / "private" / "results.json").unlink()
    (again,) = answers([(finished, RUN)])
    assert again.returncode == 0 and "nothing was done" not in again.stderr
    assert (run / "private" / "results.json").is_file()
    ledger = run / "private" / "ledger"
    ledger.write_bytes(ledger.read_bytes()[:-200])
    (refused,) = answers([(finished, RUN)])
    assert refused.returncode == 2 and "nothing was done" not in refused.stderr and len(refused.stderr.splitlines()) == 1
