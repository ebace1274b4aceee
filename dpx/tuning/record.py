"""The record of a search: a chain of JSON lines (`dpx.privacy.chain`), one before a trial starts and one when it ends.

`{"began_with": ...}` holds what all trials share, `{"drawn": n, ...}` the secret number of a `repeat_and_select` and the distribution of
that number, `{"draws_from": ...}` the distribution of its trials (`dpx.tuning.distribution`; the last line before the first trial counts),
`{"declared": n}` the declared number of trials, repeated when it was increased. `{"begun": n, ...}` holds a trial's whole plan, so that it
is charged even if its folder is deleted; `{"again": n}` is the same trial started again; `{"ended": n, ...}` holds its result, and
everything that its ledger held then. `{"sealed": ...}` is the checksum of a statement that is written next, `{"stated": ...}` that of a
statement that was written.

The files that follow from the record name a line of it: the study's statement, and `private/trial.json` in each trial's run folder. They
show that a record was lost, cut or changed, so a study whose folder was deleted does not start to count again.
"""

import contextlib
import dataclasses
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpx.claim.document import StudyStatement
from dpx.claim.seals import STATEMENT, seal, text_of
from dpx.declaration import ConfigError, require, several
from dpx.durable import locked, make_private, write_durably
from dpx.privacy.chain import Chain, Mark, mark_of
from dpx.privacy.segments import Segment, Segments
from dpx.privacy.unit_facts import UnitFacts
from dpx.records import from_json, to_json
from dpx.run_folder import RunFolder, read_json, write_json
from dpx.tuning.declarations import Budget, Tune
from dpx.tuning.distribution import TrialDistribution

CHAIN, TRIAL = "trials", "private/trial.json"
FORMAT = 2
STATEMENTS = (STATEMENT, f"winner/{STATEMENT}")
_RESTORE = "Restore the study's folder, or give the study another name: the privacy that its trials spent stays spent"


@dataclasses.dataclass(frozen=True)
class Trial:
    """`state` is `begun` until the trial ends; `folder` is its run folder's name, which a trial that is drawn again may share with a lost
    one.

    `plan` is the charge of its whole schedule, `None` without privacy; `entered` is what its ledger held when it last ended, and `ledger`
    the mark of that; `units` is what those steps protect; `reasons` say why its own statement had no
    guarantee then.
    """

    folder: str
    point: tuple[str, ...] = ()
    state: str = "begun"
    score: float | None = None
    error: str | None = None
    number: int = 0
    plan: Segments | None = None
    entered: Segments = dataclasses.field(default_factory=list)
    ledger: Mark | None = None
    reasons: tuple[str, ...] = ()
    units: list[UnitFacts | None] = dataclasses.field(default_factory=list)


class Record:
    """The record of the study in `path`, checked against everything under `outputs` that follows from it; raises `ConfigError` if the check
    fails."""

    def __init__(self, outputs: Path, path: Path):
        self.outputs, self.path = outputs, path
        self.trials: list[Trial] = []
        self.began_with: dict[str, Any] | None = None
        self.drawn: int | None = None
        self.drawn_from: list[Any] | None = None
        self.distribution: TrialDistribution | None = None
        self.declared: int | None = None
        self.raised: list[str] = []
        self.sealed: set[str] = set()
        followers = list(_followers(outputs, path))
        self.chain = self._opened(followers)
        for line in self.chain.lines:
            self._take(line)
        for place, mark, _ in followers:
            self._require(place, mark)
        self._require_sealed(followers)

    @property
    def tune(self) -> Tune | None:
        """The search that its first trial began with, with the number of trials that was declared last; `None` before the first trial."""
        known = self.began_with
        if known is None:
            return None
        trials, shape = (self.drawn_from if known["charge"] == "repeat_and_select" else None) or (self.declared or len(self.trials), 1.0)
        return Tune(charge=known["charge"], trials=trials, shape=float(shape), budget=Budget(**(known.get("budget") or {})))

    def note(self, *lines: dict[str, Any]) -> None:
        """Adds lines; on disk when this returns."""
        self.chain.append(lines)
        for line in lines:
            self._take(line)

    def state(self, statement: StudyStatement) -> None:
        """Seals the statement of the study and writes it, also beside a winner that was already released (see `dpx.claim.seals`)."""
        text = text_of(statement)
        checksum = seal(json.loads(text))
        self.note({"sealed": checksum})
        released = self.path / "release"
        for path in (released / STATEMENT, *(path for name in STATEMENTS[1:] if (path := released / name).is_file())):
            write_durably(path, text)
        self.note({"stated": checksum})

    def begin(self, folder: Path, point: tuple[str, ...], plan: Segments | None) -> None:
        """Notes a new trial with its whole plan, here and in its folder."""
        self.note({"begun": len(self.trials), "folder": folder.name, "point": list(point), "plan": to_json(plan)})
        self._mark(folder, len(self.trials) - 1)

    def begin_again(self, trial: Trial) -> None:
        """Notes that the same trial resumes."""
        self.note({"again": trial.number})
        self._mark(self.outputs / trial.folder, trial.number)

    def end(self, trial: Trial, **facts: Any) -> None:
        """Notes the result of a trial."""
        self.note({"ended": trial.number} | to_json(facts))

    def trial_in(self, folder: Path) -> Trial | None:
        """The trial whose run lies in `folder`; `None` if no trial began there, or if that trial was lost."""
        newest = self.newest_in(folder.name)
        noted = self.noted_in(folder)
        is_noted = newest is not None and (noted.get("study"), noted.get("trial")) == (self.path.name, newest.number)
        return newest if is_noted else None

    def noted_in(self, folder: Path) -> dict[str, Any]:
        """The note in `folder` about its trial; empty if the note is missing."""
        return _json(folder / TRIAL) or {}

    def newest_in(self, folder: str) -> Trial | None:
        """The last trial that began in the run folder with that name; earlier ones were lost."""
        return next((trial for trial in reversed(self.trials) if trial.folder == folder), None)

    def _mark(self, folder: Path, number: int) -> None:
        make_private(folder / "private")
        write_json(folder / TRIAL, {"study": self.path.name, "trial": number, "mark": to_json(self.chain.mark)})

    def _opened(self, followers: "list[Follower]") -> Chain:
        path = self.path / "private" / CHAIN
        lost = [] if path.is_file() else [place for place, _, _ in followers]
        require(not lost, path, f"is lost, but {several(lost)} follow{'s' if len(lost) == 1 else ''} from it", _RESTORE)
        return Chain(path, {"trials": FORMAT})

    def _require(self, place: str, mark: "Mark | str | None") -> None:
        if isinstance(mark, str):
            missing = None if _holds(self.chain, mark) else "does not have the line that this file names"
        else:
            missing = self.chain.missing(mark)
        require(missing is None, f"{self.chain.path}, beside {place}", missing or "", _RESTORE)

    def _require_sealed(self, followers: "list[Follower]") -> None:
        """Raises `ConfigError` for a statement of the study that was edited, or replaced by an older one."""
        for place, _, content in followers:
            fits = place.endswith(TRIAL) or seal(content) in self.sealed
            require(fits, f"{self.path.parent / place}", "differs from the statement whose checksum is in the study's record", _RESTORE)

    def _take(self, line: dict[str, Any]) -> None:
        if "sealed" in line:
            self.sealed.add(line["sealed"])
        elif "stated" in line:
            self.sealed = {line["stated"]}
        elif "begun" in line:
            self.trials.append(Trial(line["folder"], tuple(line["point"]), number=line["begun"], plan=_plan(line["plan"], self.path)))
        elif "again" in line:
            self._change(line["again"], state="begun", score=None, error=None)
        elif "ended" in line:
            facts = {key: value for key, value in line.items() if key != "ended"}
            facts |= {"ledger": mark_of(line.get("ledger")), "reasons": tuple(line.get("reasons", ()))}
            facts["entered"] = from_json(list[Segment], line.get("entered", []), self.path)
            facts["units"] = from_json(list[UnitFacts | None], line.get("units", []), self.path)
            self._change(line["ended"], **facts)
        elif "began_with" in line:
            self.began_with = line["began_with"]
        elif "drawn" in line:
            self.drawn, self.drawn_from = line["drawn"], line.get("from")
        elif "draws_from" in line:
            # A distribution that was declared after the first trial may depend on its result.
            self.distribution = self.distribution if self.trials else TrialDistribution(**line["draws_from"])
        elif "declared" in line:
            self._declare(line["declared"])
        else:
            raise ConfigError(
                self.chain.path,
                f"has a line that this version does not know: {next(iter(line), '')}",
                "Use the version of dpx that wrote it",
            )

    def _declare(self, number: int) -> None:
        if self.declared is not None:
            said = f"tune.trials was raised from {self.declared} to {number} after {len(self.trials)} had begun"
            self.raised.append(f"{said}: the number of trials was chosen after results")
        self.declared = number

    def _change(self, number: int, **facts: Any) -> None:
        self.trials[number] = dataclasses.replace(self.trials[number], **facts)


@contextlib.contextmanager
def opened(outputs: Path, path: Path) -> Iterator[Record]:
    """The record of the study in `path`, for one process at a time; created if missing."""
    private = path / "private"
    RunFolder(path).made_private()
    with locked(private / "trials.lock", fcntl.LOCK_EX):
        record = Record(outputs, path)
        try:
            yield record
        finally:
            record.chain.close()


# A file that follows from a record: its path, the line it names (only the digest if a position would reveal a secret number), and its
# content.
Follower = tuple[str, Mark | str | None, Any]


def _followers(outputs: Path, path: Path) -> Iterator[Follower]:
    for name in STATEMENTS:
        stated = _json(path / "release" / name)
        if stated is not None:
            # Not read as a record yet: one that was edited may be none, and its seal shows that.
            yield f"{path.name}/release/{name}", _mark_in(stated.get("record", {}).get("mark")), stated
    for noted_at in sorted(outputs.glob(f"*/{TRIAL}")):
        noted = _json(noted_at)
        if noted is not None and noted.get("study") == path.name:
            yield f"{noted_at.parent.parent.name}/{TRIAL}", _mark_in(noted.get("mark")), noted


def _plan(node: Any, source: Path) -> Segments | None:
    return None if node is None else from_json(list[Segment], node, source)


def _mark_in(node: Any) -> Mark | str | None:
    if isinstance(node, dict) and node.get("position") is None:
        return str(node.get("digest"))
    return mark_of(node)


def _holds(chain: Chain, digest: str) -> bool:
    """Whether a line of `chain` has that digest."""
    last = chain.mark
    places = (Mark(chain=last.chain, position=position, digest=digest) for position in range(last.position, 0, -1))
    return any(chain.missing(place) is None for place in places)


def _json(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None
