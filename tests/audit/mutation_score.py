"""Generated one-token edits of a room's source, and how many of them the room's own tests notice.

Forty places are drawn with a fixed seed, with one of cosmic-ray's operators at each (at fewer places, several). Every mutant runs in a
copy of the project against the room's tests: first the tests of its file, then the cheapest, up to the first failure or the limit
of processor time (a mutant that reaches it counts as killed). Annotations, type aliases, docstrings, messages, decorators, imports and
`__repr__` are left out: they do not change behaviour.

    python -m venv /tmp/mutation && /tmp/mutation/bin/pip install cosmic-ray
    /tmp/mutation/bin/python -m tests.audit.mutation_score sampler --python .venv/bin/python

cosmic-ray needs another SQLAlchemy than the extra tune, hence the separate environment. Each mutant is written to
`experiments/audit/mutation_<room>.csv` as it ends; a later run repeats only new mutants and survivors, so after a test for a survivor
is added the same command shows it killed. `first` keeps the first result: the score is computed from it. A survivor that
no test can tell from the source needs a sentence under `equivalent_because`, written into the file by hand.
With `--again` no mutant is drawn: the caught mutants of the table run again if their line still exists in any of the room's files, to
check that code or tests which changed since still catch them.
"""

import argparse
import contextlib
import csv
import dataclasses
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from .mutants import ROOT, copied
from .mutation_sites import Mutant, chosen, moved, mutated

FOLDER = ROOT / "experiments" / "audit"
SUMMARY = FOLDER / "mutation.md"
COUNT, SEED, LIMIT_S, MEMORY_BYTES = 40, 20, 120, 6 << 30
SURVIVED, KILLED, OVERTIME = "survived", "killed", "killed by the time limit"


@dataclasses.dataclass(frozen=True)
class Room:
    """Patterns of source files, the test files that are theirs, cheapest first, and tests in these that cost more than they tell.

    `apart` names the tests of a source file (by its stem) where all of the room's together would not end within the limit.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]
    without: tuple[str, ...] = ()
    apart: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    limit_s: int = LIMIT_S

    def command(self, file: str) -> list[str]:
        """What pytest is told for a mutant of `file`: the tests called after it come first."""
        own = f"test_{Path(file).name}"
        tests = sorted(self.apart.get(Path(file).stem, self.tests), key=lambda path: Path(path).name != own)
        return [*tests, *(f"--deselect={test}" for test in self.without)]


def _in(folder: str, names: str) -> tuple[str, ...]:
    """`test_<name>.py` in `folder`, with what follows `::` kept, for each of the names."""
    parts = [name.partition("::") for name in names.split()]
    return tuple(f"tests/{folder}/test_{file}.py{colons}{test}" for file, colons, test in parts)


ROOMS = {
    "randomness": Room(("dpx/randomness.py",), ("tests/test_randomness.py",)),
    "sampler": Room(("dpx/sampler/*.py",), ("tests/test_sampler.py",)),
    "mechanism": Room(
        ("dpx/mechanism/*.py",),
        _in("mechanism", "declarations discrete_gaussian telemetry quantile gaussian rounded banded noise"),
        _in(
            "mechanism",
            "noise::test_noise_of_a_base_model_needs_little_memory_of_its_own banded::test_a_target_is_met_by_the_amplified_event",
        ),
    ),
    "privacy": Room(
        ("dpx/privacy/*.py", "dpx/claim/*.py"),
        _in(
            "privacy",
            "cost combinations ledger selection filter reference profile approximations statement events joint noise_batch_ratio "
            "calibration",
        ),
        _in(
            "privacy",
            "joint::test_a_target_epsilon_is_met_by_sum_and_count_together joint::test_a_count_dearer_than_the_target_is_refused "
            "noise_batch_ratio::test_reference calibration::test_a_ramp_is_bounded_from_above_and_closely "
            "calibration::test_extreme_targets_are_met",
        ),
    ),
    "training": Room(
        tuple(f"dpx/training/{name}.py" for name in ("loop", "step", "run_start", "opening")),
        _in("training", "run_start loop draws_and_charges every_draw_is_charged step session"),
        _in(
            "training",
            "step::test_private_steps_agree_on_every_mesh step::test_mechanism_none_sums_plain_gradients "
            "step::test_a_model_axis_changes_neither_norms_nor_sums "
            "session::test_a_full_disk_stops_the_run_with_one_line_and_it_goes_on_afterwards "
            "session::test_a_damaged_checkpoint_is_named_and_the_one_before_still_serves session::test_two_unseeded_runs_share_no_noise "
            "session::test_a_plain_run_enters_nothing_and_claims_nothing",
        ),
        {
            "loop": _in("training", "loop draws_and_charges"),
            "step": _in("training", "step loop"),
            "run_start": _in("training", "run_start session"),
        },
        # Simulated devices keep both cores busy.
        2 * LIMIT_S,
    ),
    "clipping": Room(
        ("dpx/clipping/*.py",),
        _in("clipping", "weights rounding norms readme narrow_and_infinite ops attacks_values found_by_attack"),
        apart={
            "clipped_grad": _in("clipping", "transform"),
            **dict.fromkeys(("example_loss", "mapped"), _in("clipping", "clipped_grad readme found_by_attack")),
            "reader_ops": _in("clipping", "clipped_grad readme found_by_attack"),
            "separate": _in("clipping", "row_flow attacks_rows readme attacks_wrapped found_by_attack"),
            "row_rules": _in("clipping", "row_flow readme"),
            "program": _in("clipping", "ghost weights ops narrow_and_infinite crossings"),
            "readers": _in("clipping", "attacks_wrapped readme attacks_loops found_by_attack"),
            "clipped_sum": _in("clipping", "weights readme ops clipped_sum clipped_grad arguments found_by_attack"),
            **dict.fromkeys(("groups", "methods"), _in("clipping", "weights readme ops clipped_sum arguments units")),
        },
        limit_s=2 * LIMIT_S,
    ),
    "models": Room(
        ("dpx/models/*.py", "dpx/cost/memory.py", "dpx/cost/memory.py"),
        (*_in("models", "shape dropout head bert decoder trainable"), *_in("cost", "memory"), *_in("clipping", "matrix families cost")),
        limit_s=2 * LIMIT_S,
    ),
}


@dataclasses.dataclass
class Row:
    """A line of a room's table."""

    mutant: Mutant
    first: str
    now: str
    seconds: float
    equivalent_because: str = ""

    def plain(self) -> dict[str, object]:
        own = {"first": self.first, "now": self.now, "seconds": round(self.seconds, 1), "equivalent_because": self.equivalent_because}
        return dataclasses.asdict(self.mutant) | own


COLUMNS = [field.name for field in dataclasses.fields(Mutant)] + ["first", "now", "seconds", "equivalent_because"]


def _processor_s() -> float:
    """Processor time of all child processes so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_tests(root: Path, tests: list[str], python: str, limit_s: int) -> tuple[str, float, str]:
    """(outcome, seconds of processor time, the end of what pytest printed) of the tests in a copy of the project."""
    pytest = [python, "-m", "pytest", "-n0", "-x", "-q", "-p", "no:cacheprovider", *tests]
    # Processor time, so that a busy machine kills no mutant; and a mutated size may ask for all the memory there is.
    command = ["sh", "-c", f'ulimit -S -t {limit_s}; ulimit -d {MEMORY_BYTES >> 10}; exec "$@"', "sh", *pytest]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    began = _processor_s()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=root, env=environment, start_new_session=True, **pipes) as process:
        try:
            printed, _ = process.communicate(timeout=5 * limit_s)
        except subprocess.TimeoutExpired:
            printed = ""
        # Also what the tests had started themselves.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    outcome = {0: SURVIVED, -signal.SIGXCPU: OVERTIME, -signal.SIGKILL: OVERTIME}.get(process.returncode, KILLED)
    return outcome, _processor_s() - began, printed[-1500:]


def table_of(room: str) -> Path:
    return FOLDER / f"mutation_{room}.csv"


def read(room: str) -> list[Row]:
    """A room's current table; no rows if it does not exist."""
    if not table_of(room).exists():
        return []
    with open(table_of(room), newline="") as file:
        rows = []
        for line in csv.DictReader(file):
            mutant = Mutant(line["file"], int(line["line"]), line["operator"], int(line["occurrence"]), line["old"], line["new"])
            rows.append(Row(mutant, line["first"], line["now"], float(line["seconds"]), line["equivalent_because"]))
        return rows


def write(room: str, rows: list[Row]) -> None:
    """The room's table, and the summary of all rooms."""
    with open(table_of(room), "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.plain() for row in rows)
    SUMMARY.write_text(summary({name: read(name) for name in ROOMS}))


def interval(killed: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z2 = 1.959964**2
    middle, half = killed + z2 / 2, math.sqrt(z2 * (killed * (count - killed) / count + z2 / 4))
    return (middle - half) / (count + z2), (middle + half) / (count + z2)


def summary(tables: dict[str, list[Row]]) -> str:
    """`mutation.md`: the scores, and what became of each mutant that the tests of the time let live."""
    lines = [
        "# Mutation scores",
        "",
        f"{COUNT} generated edits of each room's source, at places drawn with seed {SEED}, against the room's own tests, up to the first",
        f"failure or {LIMIT_S} s of processor time, {2 * LIMIT_S} s for the last 3 (`tests/audit/mutation_score.py`; every mutant is in",
        "`mutation_<room>.csv`). The score is the share of behaviour-changing mutants that the tests caught when they were first drawn,",
        "with Wilson's 95 % interval. Survivors then got a test, so the last column estimates nothing.",
        "",
        "| room | mutants | equivalent | caught at first | by the time limit | score | 95 % interval | caught now |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_score(name, rows) for name, rows in tables.items() if rows]
    lines += ["", "## Survivors", "", "| room | place | old | new | became |", "| --- | --- | --- | --- | --- |"]
    for name, rows in tables.items():
        for row in rows:
            if row.first == SURVIVED:
                became = row.equivalent_because or ("a test catches it now" if row.now != SURVIVED else "**lives**")
                place = f"`{row.mutant.file}:{row.mutant.line}`"
                old, new = (text.replace("|", "\\|") for text in (row.mutant.old, row.mutant.new))
                lines.append(f"| {name} | {place} | `{old}` | `{new}` | {became} |")
    return "\n".join(lines) + "\n"


def _score(name: str, rows: list[Row]) -> str:
    counted = [row for row in rows if not row.equivalent_because]
    killed, now = (sum(state != SURVIVED for state in states) for states in ([r.first for r in counted], [r.now for r in counted]))
    late, (low, high) = sum(row.first == OVERTIME for row in counted), interval(killed, len(counted))
    share = f"{killed / len(counted):.0%} | {low:.0%} to {high:.0%}"
    return f"| {name} | {len(rows)} | {len(rows) - len(counted)} | {killed} | {late} | {share} | {now} of {len(counted)} |"


def score(name: str, python: str, is_fresh: bool) -> int:
    """Runs a room's mutants; returns how many live on without a reason."""
    room = ROOMS[name]
    mutants, places = chosen(room.sources, COUNT, SEED)
    print(f"{name}: {places} places, {len(mutants)} mutants", flush=True)
    _check_sound_code(name, [mutant.file for mutant in mutants], python)
    known = {} if is_fresh else {row.mutant.identity: row for row in read(name)}
    rows = [dataclasses.replace(known[m.identity], mutant=m) if m.identity in known else Row(m, "", "", 0.0) for m in mutants]
    for row in rows:
        if row.now not in (KILLED, OVERTIME) and not row.equivalent_because:
            row.now, row.seconds = _outcome(row.mutant, room, python)
            row.first = row.first or row.now
            print(
                f"{row.now}  {row.seconds:5.1f} s  {row.mutant.file}:{row.mutant.line}  {row.mutant.old}  ->  {row.mutant.new}", flush=True
            )
            write(name, [row for row in rows if row.now])
    write(name, rows)
    return sum(row.now == SURVIVED and not row.equivalent_because for row in rows)


def repeat(name: str, python: str) -> int:
    """Runs what a room's tests caught once more, where its line still stands; returns how many live now."""
    room, rows = ROOMS[name], read(name)
    today = {at: mutant for at, row in enumerate(rows) if row.now in (KILLED, OVERTIME) and (mutant := moved(row.mutant, room.sources))}
    print(f"{name}: {len(today)} of {len(rows)} mutants can be run once more", flush=True)
    _check_sound_code(name, [mutant.file for mutant in today.values()], python)
    for at, mutant in today.items():
        now, seconds = _outcome(mutant, room, python)
        rows[at] = dataclasses.replace(rows[at], mutant=mutant, now=now, seconds=seconds)
        print(f"{now}  {seconds:5.1f} s  {mutant.file}:{mutant.line}  {mutant.old}  ->  {mutant.new}", flush=True)
        write(name, rows)
    return sum(rows[at].now == SURVIVED for at in today)


def _check_sound_code(name: str, files: list[str], python: str) -> None:
    """Ends the program unless every list of tests that a mutant will meet passes without one, well within the limit."""
    for command in {frozenset(command): command for command in map(ROOMS[name].command, files)}.values():
        # The first time compiles what later ones find compiled.
        for _ in range(2):
            with copied() as root:
                outcome, seconds, printed = run_tests(root, command, python, ROOMS[name].limit_s)
            print(f"without a mutant: {outcome} {seconds:.0f} s of processor time", flush=True)
            if outcome == SURVIVED and seconds <= 0.75 * ROOMS[name].limit_s:
                break
        else:
            sys.exit(f"{name}: {' '.join(command)}\nmust pass well within the limit\n{printed}")


def _outcome(mutant: Mutant, room: Room, python: str) -> tuple[str, float]:
    with copied() as root:
        path = root / mutant.file
        text = mutated(path.read_text(), f"core/{mutant.operator}", mutant.occurrence)
        assert text is not None
        path.write_text(text)
        outcome, seconds, _ = run_tests(root, room.command(mutant.file), python, room.limit_s)
    return outcome, seconds


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.audit.mutation_score", formatter_class=argparse.RawTextHelpFormatter)
    parser.description = __doc__
    parser.add_argument("rooms", nargs="*", metavar="room", help=f"{', '.join(ROOMS)}; without one only {SUMMARY.name} is written again")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has dpx's requirements, if not this one")
    parser.add_argument("--fresh", action="store_true", help="forgets what the room's table says, the sentences too")
    parser.add_argument("--again", action="store_true", help="draws no mutants; runs the caught ones that can still be made")
    parser.add_argument("--list", action="store_true", help="prints the mutants and runs nothing")
    given = parser.parse_args()
    unknown = set(given.rooms) - set(ROOMS)
    if unknown:
        parser.error(f"no such room: {', '.join(sorted(unknown))}")
    if given.list:
        for mutant in (mutant for name in given.rooms for mutant in chosen(ROOMS[name].sources, COUNT, SEED)[0]):
            print(f"{mutant.file}:{mutant.line}  {mutant.operator}  {mutant.old}  ->  {mutant.new}")
        return 0
    python = str(Path(given.python).absolute())
    living = sum(repeat(name, python) if given.again else score(name, python, given.fresh) for name in given.rooms)
    SUMMARY.write_text(summary({name: read(name) for name in ROOMS}))
    return int(living > 0)


if __name__ == "__main__":
    sys.exit(main())
