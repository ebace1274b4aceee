"""The record of a search: a chain of JSON lines (`dpx.privacy.hash_chain`), one before a trial starts and one when it ends.

Each line is a record with its `kind`: to note something new, declare its line here, add it to `Line` and say in `Record` what it means. The
files that follow from the record name a line of it: the study's statement, and `private/trial.json` in each trial's run folder. They show
that a record was lost, cut or changed, so a study whose folder was deleted does not start to count again.
"""

import contextlib
import dataclasses
import fcntl
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from dpx.config.declared_tuning import Budget, Charge, Tune
from dpx.declaration import require, several
from dpx.durable import locked, make_private, seal, write_durably
from dpx.files.records import as_written, described, from_json, record, to_json
from dpx.files.run_folder import RunFolder, read_json, write_json
from dpx.privacy.declared_privacy import UnitFacts
from dpx.privacy.hash_chain import Chain, Mark, mark_of
from dpx.privacy.lines import SealedStatementLine, StatedLine
from dpx.privacy.segments import Segment, Segments
from dpx.statement.seals import STATEMENT, text_of
from dpx.statement.statement_records import StudyStatement

# A function from overrides to the config that they compose, as plain values, in the form of `TrialDistribution.fixed`.
Compose = Callable[[Sequence[str]], dict[str, Any]]


@record
class TrialDistribution:
    """Declares what the trials of a search are drawn from.

    A setting of the space has a type (`float`, `int` or `choice`), and its bounds (`low`, `high`, `step`, `is_log`) or its `values`. All
    values can be written as JSON.
    """

    sampler: dict[str, Any] = described("The classes that draw, and their settings.")
    space: dict[str, dict[str, Any]] = described("The distribution of each setting that is drawn, by its key.")
    fixed: dict[str, Any] = described("The config without the settings that are drawn.")

    def differing(self, other: "TrialDistribution") -> list[str]:
        """Returns the keys with different values in the two, as a user writes them."""
        parts = (("hydra.sweeper.", "sampler"), ("hydra.sweeper.params.", "space"))
        named = [
            f"{prefix}{key}"
            for prefix, part in parts
            for key in sorted(getattr(self, part).keys() | getattr(other, part).keys())
            if getattr(self, part).get(key) != getattr(other, part).get(key)
        ]
        return named + different_keys(self.fixed, other.fixed)

    def refusal(self, point: Sequence[str]) -> str | None:
        """Returns the reason, as text, why a trial with the overrides `point` is not a draw; `None` if it may be a draw."""
        settings = {key_of(part): part.partition("=")[2] for part in point}
        for key, distribution in self.space.items():
            if key not in settings:
                return f"sets no {key}, which the search draws"
            value = settings[key]
            if distribution["type"] == "choice":
                is_of_space = value in distribution["values"]
            else:
                try:
                    number = int(value) if distribution["type"] == "int" else float(value)
                    is_of_space = distribution["low"] <= number <= distribution["high"]
                except ValueError:
                    is_of_space = False
            if not is_of_space:
                return f"has {key}={settings[key]}, which is not of the declared space"
        return None

    def others(self, point: Sequence[str]) -> list[str]:
        """Returns the overrides in `point` that are not drawn."""
        return [part for part in point if key_of(part) not in self.space]


def key_of(override: str) -> str:
    """Returns the config key that an override sets, as a search space names it."""
    return override.lstrip("+~").partition("=")[0]


def different_keys(one: Any, other: Any, path: str = "") -> list[str]:
    """Returns the dotted keys with different values in two plain configs."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return [] if one == other else [path]
    keys = sorted(one.keys() | other.keys())
    return [key for name in keys for key in different_keys(one.get(name), other.get(name), f"{path}.{name}".lstrip("."))]


@record
class DrawnNumber:
    """The distribution of the secret number of trials of a `repeat_and_select`."""

    mean: int = described("Its mean.")
    shape: str = described("Its shape, as text because it may be infinite.")


@record
class SharedSettings:
    """What all trials of a search share."""

    charge: Charge = described("How the search charges the choice among its trials.")
    number: DrawnNumber | None = described("Distribution of the number of trials; null where the number is declared.")
    budget: Budget | None = described("What the trials may cost together; null without a budget.")
    config: dict[str, Any] = described("The parts of the config that all trials share, as plain data.")


@record
class HeldLedger:
    """Everything that the ledger of a trial is known to have held."""

    entered: tuple[Segment, ...] = described("The steps that were entered.", default=())
    mark: Mark | None = described("Its last line; null for a trial whose ledger was never read.", default=None)
    units: tuple[UnitFacts | None, ...] = described("What the steps protect; null for steps whose units were not noted.", default=())


@record
class SharedLine:
    """What the first trial began with."""

    kind: Literal["began_with"] = "began_with"
    shared: SharedSettings = described("The settings.")


@record
class NumberLine:
    """The secret number of trials of a `repeat_and_select`."""

    kind: Literal["drawn"] = "drawn"
    number: int = described("The number.")
    drawn_from: DrawnNumber = described("Its distribution.")


@record
class DistributionLine:
    """What trials are drawn from; the last such line before the first trial counts."""

    kind: Literal["draws_from"] = "draws_from"
    distribution: TrialDistribution = described("The distribution.")


@record
class DeclaredLine:
    """The declared number of trials; another such line says that it was raised."""

    kind: Literal["declared"] = "declared"
    trials: int = described("The number.")


@record
class TrialStart:
    """A trial with its whole plan, as it started: it is charged even if its folder is deleted."""

    number: int = described("Number of the trial, from 0.")
    folder: str = described("Name of its run folder.")
    point: tuple[str, ...] = described("The overrides of the trial.")
    plan: tuple[Segment, ...] | None = described("The charge of its whole schedule; null without privacy.")


@record
class TrialEnd:
    """What a trial came to."""

    state: str = described("How it ended: finished or failed.")
    score: float | None = described("What trials are compared by; null for a trial without a result.")
    error: str | None = described("Why it failed; null for a trial that finished.")
    reasons: tuple[str, ...] = described("Why its own statement has no guarantee.")
    held: HeldLedger = described("What its ledger held.")


@record
class BegunLine(TrialStart):
    """A trial that starts."""

    kind: Literal["begun"] = "begun"


@record
class AgainLine:
    """A trial that is started again."""

    kind: Literal["again"] = "again"
    number: int = described("Number of the trial.")


@record
class EndedLine(TrialEnd):
    """The end of a trial."""

    kind: Literal["ended"] = "ended"
    number: int = described("Number of the trial.")


@record
class Trial(TrialStart, TrialEnd):
    """A trial as the whole record tells it. `state` is `begun` until it ends, and again while it resumes.

    A trial that is drawn again may share its folder with a lost one.
    """

    state: str = "begun"
    score: float | None = None
    error: str | None = None
    reasons: tuple[str, ...] = ()
    held: HeldLedger = HeldLedger()


Line = SharedLine | NumberLine | DistributionLine | DeclaredLine | BegunLine | AgainLine | EndedLine | SealedStatementLine | StatedLine


@record
class TrialNote:
    """The note in a trial's run folder, `private/trial.json`."""

    study: str = described("Name of the study.")
    trial: int = described("Number of the trial.")
    mark: Mark = described("The line of the study's record that it follows from.")


CHAIN, TRIAL = "trials", "private/trial.json"
FORMAT = 3
STATEMENTS = (STATEMENT, f"winner/{STATEMENT}")
_RESTORE = "Restore the study's folder, or give the study another name: the privacy that its trials spent stays spent"


class Record:
    """Reads the record of the study in `path`, and checks it against everything under `outputs` that follows from it.

    Raises `ConfigError` if the check fails."""

    def __init__(self, outputs: Path, path: Path):
        self.outputs, self.path = outputs, path
        self.trials: list[Trial] = []
        self.began_with: SharedSettings | None = None
        self.drawn: int | None = None
        self.drawn_from: DrawnNumber | None = None
        self.distribution: TrialDistribution | None = None
        self.declared: int | None = None
        self.raised: list[str] = []
        self.sealed: set[str] = set()
        followers, file = list(_followers(outputs, path)), path / "private" / CHAIN
        lost = [] if file.is_file() else [place for place, _, _ in followers]
        require(not lost, file, f"is lost, but {several(lost)} follow{'s' if len(lost) == 1 else ''} from it", _RESTORE)
        self.chain = Chain(file, {"trials": FORMAT})
        for number, node in enumerate(self.chain.lines, 2):
            place, begun = f"{file}, line {number}", len(self.trials)
            line = from_json(Line, node, place)
            # Trials begin in order, and only one that began can end.
            if isinstance(line, BegunLine):
                require(line.number == begun, place, f"trial {line.number} begins after {begun} others", _RESTORE)
            if isinstance(line, (AgainLine, EndedLine)):
                require(0 <= line.number < begun, place, f"trial {line.number} did not begin", _RESTORE)
            self._take(line)
        for place, mark, _ in followers:
            missing = self._missing(mark)
            require(missing is None, f"{file}, beside {place}", missing or "", _RESTORE)
        for place, _, content in followers:
            # A statement that was edited, or replaced by an older one.
            fits = content is None or seal(content) in self.sealed
            require(fits, f"{path.parent / place}", "differs from the statement whose checksum is in the study's record", _RESTORE)

    @property
    def tune(self) -> Tune | None:
        """Returns the search that its first trial began with, with the number of trials that was declared last; `None` before the first
        trial."""
        known = self.began_with
        if known is None:
            return None
        drawn = self.drawn_from if known.charge == "repeat_and_select" else None
        trials, shape = (drawn.mean, drawn.shape) if drawn else (self.declared or len(self.trials), 1.0)
        return Tune(charge=known.charge, trials=trials, shape=float(shape), budget=known.budget or Budget())

    def note(self, *further: Line) -> None:
        """Adds lines; on disk when this returns."""
        nodes, read = as_written(further, Line, self.path)
        self.chain.append(nodes)
        for line in read:
            self._take(line)

    def state(self, statement: StudyStatement) -> None:
        """Seals the statement of the study and writes it, also beside a winner that was already released (see `dpx.statement.seals`)."""
        text = text_of(statement)
        checksum = seal(json.loads(text))
        self.note(SealedStatementLine(checksum=checksum))
        released = self.path / "release"
        for path in (released / STATEMENT, *(path for name in STATEMENTS[1:] if (path := released / name).is_file())):
            write_durably(path, text)
        self.note(StatedLine(checksum=checksum))

    def begin(self, folder: Path, point: tuple[str, ...], plan: Segments | None) -> None:
        """Notes a new trial with its whole plan, here and in its folder."""
        noted = None if plan is None else tuple(plan)
        self.note(BegunLine(number=len(self.trials), folder=folder.name, point=point, plan=noted))
        self._mark(folder, len(self.trials) - 1)

    def begin_again(self, trial: Trial) -> None:
        """Notes that the same trial resumes."""
        self.note(AgainLine(number=trial.number))
        self._mark(self.outputs / trial.folder, trial.number)

    def end(
        self, trial: Trial, state: str, held: HeldLedger, score: float | None = None, error: str | None = None, reasons: Iterable[str] = ()
    ) -> None:
        """Notes the result of a trial, and what its ledger held then."""
        self.note(EndedLine(number=trial.number, state=state, score=score, error=error, reasons=tuple(reasons), held=held))

    def trial_in(self, folder: Path) -> Trial | None:
        """Returns the trial whose run lies in `folder`; `None` if no trial began there, or if that trial was lost."""
        newest, noted = self.newest_in(folder.name), note_in(folder)
        is_noted = newest is not None and noted is not None and (noted.study, noted.trial) == (self.path.name, newest.number)
        return newest if is_noted else None

    def newest_in(self, folder: str) -> Trial | None:
        """Returns the last trial that began in the run folder with that name; earlier ones were lost."""
        return next((trial for trial in reversed(self.trials) if trial.folder == folder), None)

    def _mark(self, folder: Path, number: int) -> None:
        make_private(folder / "private")
        write_json(folder / TRIAL, to_json(TrialNote(study=self.path.name, trial=number, mark=self.chain.mark)))

    def _missing(self, mark: Mark | str | None) -> str | None:
        """Returns the reason, as text, why the record does not have a line, named by its mark or by its digest alone; `None` if it has."""
        if not isinstance(mark, str):
            return self.chain.missing(mark)
        last = self.chain.mark
        places = (Mark(chain=last.chain, position=position, digest=mark) for position in range(last.position, 0, -1))
        return None if any(self.chain.missing(one) is None for one in places) else "does not have the line that this file names"

    def _take(self, line: Line) -> None:
        """Adds what one line says."""
        match line:
            case SharedLine():
                self.began_with = line.shared
            case NumberLine():
                self.drawn, self.drawn_from = line.number, line.drawn_from
            case DistributionLine():
                # A distribution that was declared after the first trial may depend on its result.
                self.distribution = self.distribution if self.trials else line.distribution
            case DeclaredLine():
                if self.declared is not None:
                    said = f"tune.trials was raised from {self.declared} to {line.trials} after {len(self.trials)} had begun"
                    self.raised.append(f"{said}: the number of trials was chosen after results")
                self.declared = line.trials
            case SealedStatementLine():
                self.sealed.add(line.checksum)
            case StatedLine():
                self.sealed = {line.checksum}
            case BegunLine():
                self.trials.append(Trial(number=line.number, folder=line.folder, point=line.point, plan=line.plan))
            case AgainLine():
                again = dataclasses.replace(self.trials[line.number], state="begun", score=None, error=None)
                self.trials[line.number] = again
            case EndedLine():
                ended = {field.name: getattr(line, field.name) for field in dataclasses.fields(TrialEnd)}
                self.trials[line.number] = dataclasses.replace(self.trials[line.number], **ended)


@contextlib.contextmanager
def opened(outputs: Path, path: Path) -> Iterator[Record]:
    """Opens the record of the study in `path` for one process at a time; creates it if it is missing."""
    private = path / "private"
    RunFolder(path).made_private()
    with locked(private / "trials.lock", fcntl.LOCK_EX):
        record = Record(outputs, path)
        try:
            yield record
        finally:
            record.chain.close()


def note_in(folder: Path) -> TrialNote | None:
    """Returns the note in the run folder of a trial; `None` for a run that is not a trial."""
    path = folder / TRIAL
    return from_json(TrialNote, read_json(path), path) if path.is_file() else None


# A file that follows from a record: its path, the line it names (only the digest if a position would reveal a secret number), and the
# content of a statement.
Follower = tuple[str, Mark | str | None, Any]


def _followers(outputs: Path, path: Path) -> Iterator[Follower]:
    for name in STATEMENTS:
        stated = path / "release" / name
        if stated.is_file():
            # Not read as a record yet: one that was edited may be none, and its seal shows that.
            content = read_json(stated)
            mark = content.get("record", {}).get("mark")
            is_secret = isinstance(mark, dict) and mark.get("position") is None
            yield f"{path.name}/release/{name}", str(mark.get("digest")) if is_secret else mark_of(mark), content
    for noted_at in sorted(outputs.glob(f"*/{TRIAL}")):
        folder = noted_at.parent.parent
        noted = note_in(folder)
        if noted is not None and noted.study == path.name:
            yield f"{folder.name}/{TRIAL}", noted.mark, None
