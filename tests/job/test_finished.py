"""A run that has finished says so, and no file of it changes; one that lost something goes on, or is refused."""

import hashlib
from pathlib import Path

import pytest

from tests.processes import Answer, answers, head_run

RUN = head_run(2)


def state(run: Path) -> dict[str, tuple[int, str]]:
    """Every file of the run, with the time it was written at and its content."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file()]
    return {str(path.relative_to(run)): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files}


# Code that runs between the command lines, in their process: a second process would import and compile everything again.
LOOK = "import pathlib, tests.job.test_finished as t; print(t.state(next(pathlib.Path('outputs').glob('main-*'))))"
TAKE = "import pathlib; next(pathlib.Path('outputs').glob('main-*/private/results.json')).unlink()"
LOSE = "import pathlib; next(path for path in pathlib.Path('outputs').glob('main-*/release/params/**/*') if path.is_file()).unlink()"
DROP = "import pathlib, shutil; shutil.rmtree(next(pathlib.Path('outputs').glob('main-*/release/params')))"
CUT = "import pathlib; path = next(pathlib.Path('outputs').glob('main-*/private/ledger')); path.write_bytes(path.read_bytes()[:-200])"
AGAIN = [RUN, ["job=resume", "run=main"], [*RUN, "schedule.checkpoint_every=1"]]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    place = tmp_path_factory.mktemp("finished")
    lines = [RUN, LOOK, *AGAIN, LOOK, TAKE, RUN, LOOK, LOSE, RUN, DROP, RUN, RUN, CUT, RUN]
    done, *answered = answers([(place, line) for line in lines], trains_alike=True)
    assert done.returncode == 0, done.stderr
    return answered


def test_it_says_so_and_touches_nothing(answered: list[Answer]) -> None:
    before, *again, after = answered[: len(AGAIN) + 2]
    for one in again:
        assert one.returncode == 0 and "this run has finished; nothing was done" in one.stderr
        assert "epsilon (rdp)" in one.stdout
    assert after == before and "private/ledger" in before.stdout


def test_what_was_taken_away_is_made_again_and_a_cut_ledger_is_refused(answered: list[Answer]) -> None:
    taken, again, state, *_, refused = answered[len(AGAIN) + 2 :]
    assert taken.returncode == again.returncode == 0 and "nothing was done" not in again.stderr
    assert "private/results.json" in state.stdout
    assert refused.returncode == 2 and "nothing was done" not in refused.stderr and len(refused.stderr.splitlines()) == 1


def test_a_lost_part_of_the_released_weights_is_named_and_the_line_that_it_gives_mends_it(answered: list[Answer]) -> None:
    lost, dropped, mended, after = (answered[len(AGAIN) + 2 :][place] for place in (4, 5, 6, 7))
    assert lost.returncode == 2 and "nothing was done" not in lost.stderr and len(lost.stderr.splitlines()) == 1
    assert "is missing, and dpx_manifest.json lists it. Restore it, or remove " in lost.stderr
    assert dropped.returncode == mended.returncode == 0 and "nothing was done" not in mended.stderr
    assert after.returncode == 0 and "this run has finished; nothing was done" in after.stderr
