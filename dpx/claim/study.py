"""One search: its trials in the order in which they began, the number of trials left, and the folder `outputs/studies/<name>`.

A trial is recorded, with its plan, before it starts and again when it ends (`dpx.claim.search_record`), so a trial that is killed, or whose
folder is deleted, has begun and is charged.
"""

import contextlib
import fcntl
import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from dpx.claim.claim_checks import check_space
from dpx.claim.search_record import (
    CHAIN,
    TRIAL,
    Compose,
    DeclaredLine,
    DistributionLine,
    DrawnNumber,
    NumberLine,
    Record,
    SharedLine,
    SharedSettings,
    Trial,
    TrialDistribution,
    note_in,
    opened,
)
from dpx.claim.trial_charges import Search, check_draw, check_plan, differs, filter_of
from dpx.config.declared_tuning import Tune
from dpx.declaration import require
from dpx.durable import not_following, put_in_place, write_durably
from dpx.files.run_folder import CONFIG, LOCK, RunFolder, Status
from dpx.privacy.ledger import Ledger
from dpx.statement import agreement
from dpx.statement.seals import STATEMENT, read_node

__all__ = ["Study", "Trial"]

# The settings that all trials of a study share, whatever the charge, and the further settings that a repeated mechanism must share. For the
# latter, the whole config except the search space is fixed before the first trial (`Study.settle`).
_ALWAYS = ("data", "privacy", "task")
_ONE_MECHANISM = ("steps", "batch_schedule", "sampler", "mechanism", "noise", "accountant", "audit")


class Study:
    """Keeps the search called `name` among the runs in `outputs`.

    Every use checks its record against the files that follow from it, and raises
    `ConfigError` if they do not agree."""

    def __init__(self, outputs: Path, name: str):
        # With a slash, the trials would be in a subfolder, and the next launch would read another record than the one that counts them.
        require("/" not in name, f"name={name}", "the name of a search must be the name of one folder", "Write it without a slash")
        self.outputs, self.path = outputs, outputs / "studies" / name
        self.private, self.release = self.path / "private", self.path / "release"

    def trials(self) -> list[Trial]:
        """Returns every trial that ever began here."""
        with opened(self.outputs, self.path) as record:
            return record.trials

    @classmethod
    def of_run(cls, folder: Path) -> "Study | None":
        """Returns the study that the run in `folder` is a trial of, according to the folder, not the command; `None` for any other run.

        Raises `ConfigError` if the folder's note or the study is lost: the study could not receive the result of the trial.
        """
        noted = note_in(folder)
        if noted is None:
            ledger = folder / "private" / "ledger"
            named = [trial.study for trial in Ledger(ledger).trials] if ledger.is_file() else []
            words = f"is missing, but the run's ledger says that it is a trial of the study {', '.join(named)}"
            require(not named, folder / TRIAL, words, "Restore the file")
            return None
        study = cls(folder.parent, noted.study)
        require(
            (study.private / CHAIN).is_file(),
            folder,
            f"is a trial of the study {study.path.name}, but the record of the study is not in the same folder",
            f"Move the run back into the folder of its study, or restore {study.private / CHAIN}",
        )
        return study

    def first_tune(self, declared: Tune | None) -> Tune | None:
        """Returns the search that the study began with, whatever search the command has `declared`; `declared` for a study without a
        trial."""
        with opened(self.outputs, self.path) as record:
            return record.tune or declared

    def settle(self, tune: Tune, distribution: TrialDistribution) -> None:
        """Fixes, before the first trial of a `repeat_and_select`, the distribution of its trials, their number, and the distribution of
        that number; durable when this returns.

        The number is drawn once. Until the first trial begins, another distribution of the trials may be declared, since no result has been
        seen and the number stays the same. Raises `ConfigError`, naming what differs, for any other difference, and if an interrupted trial
        can still be trained to its end.
        """
        from dpx.privacy.search_accounting import draw

        check_space(distribution)
        with opened(self.outputs, self.path) as record:
            _require_same_search(record, tune)
            declared = _number_of(tune)
            require(
                record.drawn is None or record.drawn_from == declared,
                f"tune.trials={tune.trials}, tune.shape={tune.shape}",
                f"the number of trials of the study {self.path.name} was already drawn from another distribution, and is drawn only once",
                "Give this study another name",
            )
            known = record.distribution
            if record.trials:
                differing = ["hydra.sweeper.params"] if known is None else known.differing(distribution)
                require(not differing, f"tune.charge={tune.charge}", *differs(self.path.name, differing))
                for trial in record.trials:
                    self._require_not_cut_short(trial)
                return
            number = [] if record.drawn is not None else [NumberLine(number=draw(tune.trials, tune.shape), drawn_from=declared)]
            space = [] if known == distribution else [DistributionLine(distribution=distribution)]
            record.note(*space, *number)

    def is_empty(self, tune: Tune) -> bool:
        """Returns whether the secret number of trials is 0, which is possible for a Poisson distribution."""
        with opened(self.outputs, self.path) as record:
            return tune.charge == "repeat_and_select" and record.drawn == 0

    def left(self, tune: Tune) -> int:
        """Returns the number of trials still to begin. Raises `ConfigError` if `tune` is not the search that the first trial began with."""
        with opened(self.outputs, self.path) as record:
            _require_same_search(record, tune)
            return _left(record, tune)

    def has(self, folder: Path) -> bool:
        """Returns whether the run in `folder` is a trial of this study."""
        with opened(self.outputs, self.path) as record:
            return record.trial_in(folder) is not None

    def begin(self, search: Search, folder: Path, point: tuple[str, ...], compose: Compose) -> None:
        """Counts a trial, and charges its plan, before it starts; raises `ConfigError` for a trial that does not belong to the study,
        exceeds the declared number, does not fit a declared budget, or is not a draw from the distribution fixed for a `repeat_and_select`.
        A run in `folder` that is not a trial yet becomes a trial, with everything that it spent. `compose` gives the config of some
        overrides of `point`."""
        filter_of(search)
        RunFolder(folder).require_no_links()
        plan = search.planned()
        with opened(self.outputs, self.path) as record:
            trial = record.trial_in(folder)
            left = _left(record, search.tune)
            shared = _check_same(record, search)
            if trial is not None:
                record.begin_again(trial)
                _note_in_ledger(folder, self.path.name, search.tune.charge)
                return
            if search.tune.charge == "repeat_and_select":
                check_draw(record, folder, point, compose)
            require(
                left > 0,
                f"tune.trials={search.tune.trials}",
                f"the study {self.path.name} has already run all its trials",
                "Give it another name, or more trials if it is not repeat_and_select",
            )
            check_plan(search, record, plan, point)
            if record.began_with is None:
                record.note(SharedLine(shared=shared))
            if search.tune.charge != "repeat_and_select" and search.tune.trials > (record.declared or 0):
                record.note(DeclaredLine(trials=search.tune.trials))
            record.begin(folder, point, plan)
            _note_in_ledger(folder, self.path.name, search.tune.charge)

    def end(self, search: Search, folder: Path, state: str, score: float | None = None, error: str | None = None) -> None:
        """Notes the result of a trial; then its release is withheld, or the statement of the study is written again."""
        with opened(self.outputs, self.path) as record:
            trial = record.newest_in(folder.name)
            require(trial is not None, folder.name, f"is not a trial of the study {self.path.name}", "Begin the trial first")
            assert trial is not None
            self._end(record, search, trial, state, score, error)

    def close(self, search: Search) -> list[Trial]:
        """Closes the study after a launch: killed trials have failed, or have finished if `job=resume` trained them to their end; the
        winner of a drawn number of trials is released now.

        Returns all trials, but for a `repeat_and_select` only the winner, once it is complete.
        """
        with opened(self.outputs, self.path) as record:
            if record.began_with is not None:
                # The statement uses the settings that the trials began with, not those of this launch, since the search may be over.
                _check_same(record, search)
            for trial in record.trials:
                folder = self.outputs / trial.folder
                if _was_killed(trial) and record.newest_in(trial.folder) == trial and _is_dead(folder):
                    finished = _came_to(folder)
                    if finished is not None:
                        self._end(record, search, trial, "finished", finished.get("score"))
                    elif trial.state == "begun":
                        self._end(record, search, trial, "failed", error="killed")
            trials, secret = record.trials, search.tune.charge == "repeat_and_select"
            if not trials or (secret and (_left(record, search.tune) or any(trial.state == "begun" for trial in trials))):
                return [] if secret else trials
            self._state(search, record)
            best = self.winner(trials)
            if not secret:
                return trials
            if best is None:
                return []
            # The trial's own statement does not charge the choice, so the winner is released with that of the study.
            withheld, shown = self.outputs / best.folder / "private" / "withheld", self.release / "winner"
            if withheld.is_dir():
                RunFolder(self.outputs / best.folder).require_no_links()
                shutil.copytree(withheld, shown, dirs_exist_ok=True, ignore=shutil.ignore_patterns(STATEMENT))
                write_durably(shown / STATEMENT, (self.release / STATEMENT).read_bytes())
                agreement.seal_winner(shown, read_node(shown / STATEMENT))
            return [best]

    def winner(self, trials: list[Trial]) -> Trial | None:
        """Returns the finished trial of the highest held-out accuracy; the first of equals."""
        finished = [trial for trial in trials if trial.state == "finished" and trial.score is not None]
        return max(finished, key=lambda trial: trial.score or 0.0, default=None)

    def _require_not_cut_short(self, trial: Trial) -> None:
        folder = self.outputs / trial.folder
        noted = note_in(folder)
        is_there = noted is not None and noted.trial == trial.number and _is_dead(folder) and _came_to(folder) is None
        # A trial's release is withheld when its launch ends, and a run is found by its release.
        is_resumable = (folder / "release" / CONFIG).is_file()
        by_its_point = shlex.join([*trial.point, "hydra.mode=RUN"])
        again = f"job=resume run={os.path.relpath(folder)}" if is_resumable else by_its_point
        require(
            not (_was_killed(trial) and is_there),
            folder,
            f"this trial of the study {self.path.name} was interrupted, and the search has no guarantee unless the trial finishes",
            f"Resume it first: python -m dpx {again}",
        )

    def _end(
        self,
        record: Record,
        search: Search,
        trial: Trial,
        state: str,
        score: float | None = None,
        error: str | None = None,
    ) -> None:
        from dpx.claim import search_claim, trial_charges

        folder = self.outputs / trial.folder
        held = trial_charges.held(trial, record)
        is_secret = search.tune.charge == "repeat_and_select"
        # This is done before the end is noted: a trial that is killed between the two has not ended, and is withheld at the next launch.
        if is_secret and (folder / "release").is_dir():
            # Only the winner of a repeated mechanism may be seen.
            shutil.rmtree(folder / "private" / "withheld", ignore_errors=True)
            put_in_place(folder / "release", folder / "private" / "withheld")
        record.end(trial, state, held, score, error, search_claim.reasons_at_end(folder))
        if not is_secret:
            self._state(search, record)

    def _state(self, search: Search, record: Record) -> None:
        from dpx.claim import search_claim

        record.state(search_claim.build(search, record, self.winner(record.trials)))


def _note_in_ledger(folder: Path, name: str, charge: str) -> None:
    """Notes in the ledger of a run that it became a trial after its training, so that runs that begin from it know this."""
    if (folder / agreement.LEDGER).is_file():
        with RunFolder(folder).read_by_another(), contextlib.closing(Ledger(folder / agreement.LEDGER)) as entered:
            entered.note_trial(name, charge)


def _left(record: Record, tune: Tune) -> int:
    if tune.charge != "repeat_and_select":
        return max(0, tune.trials - len(record.trials))
    return max(0, (record.drawn or 0) - len(record.trials))


def _was_killed(trial: Trial) -> bool:
    """Returns whether the end of the trial was not recorded, which is also the case while it runs."""
    return trial.state == "begun" or (trial.state, trial.error) == ("failed", "killed")


def _came_to(folder: Path) -> dict[str, Any] | None:
    """Returns the status of a run that was trained to its end; `None` for any other run."""
    noted = [Status(folder, job).read() for job in ("train", "resume")]
    return next((one for one in noted if one.get("state") == "finished"), None)


def _check_same(record: Record, search: Search) -> SharedSettings:
    """Returns one study has one charge, one corpus and one claim; a repeated mechanism is the same in every repetition.

    Returns everything that the trials must share; raises `ConfigError` if it differs from that of the first trial.
    """
    tune, declared = search.tune, search.declared
    fields = _ALWAYS + (_ONE_MECHANISM if tune.charge == "repeat_and_select" else ())
    shared = {name: declared[name] for name in (*fields, *(["outside_code"] if "outside_code" in declared else []))}
    found = _shared(tune, json.loads(json.dumps(shared, default=str)))
    known = record.began_with or found
    differing = _differing(known, found) + [name for name, value in found.config.items() if known.config.get(name) != value]
    require(not differing, f"tune.charge={tune.charge}", *differs(record.path.name, differing))
    return found


def _shared(tune: Tune, config: dict[str, Any]) -> SharedSettings:
    """Returns the settings of a search that no later launch may change.

    More trials of a charged sum are charged; more trials of a drawn number would be another distribution.
    """
    number = _number_of(tune) if tune.charge == "repeat_and_select" else None
    return SharedSettings(charge=tune.charge, number=number, budget=tune.budget if tune.budget.is_declared else None, config=config)


def _number_of(tune: Tune) -> DrawnNumber:
    return DrawnNumber(mean=tune.trials, shape=str(tune.shape))


def _differing(known: SharedSettings, found: SharedSettings) -> list[str]:
    """Returns the settings of the search that `found` has otherwise than the first trial, as a user names them."""
    same = {"charge": known.charge == found.charge, "budget": known.budget == found.budget}
    if found.number is not None:
        number = known.number
        same |= {"trials": number is not None and number.mean == found.number.mean}
        same |= {"shape": number is not None and number.shape == found.number.shape}
    return [name for name, is_same in same.items() if not is_same]


def _require_same_search(record: Record, tune: Tune) -> None:
    """Raises `ConfigError`, before another trial is drawn, if `tune` is not the search that the first trial began with."""
    differing = _differing(record.began_with, _shared(tune, {})) if record.began_with else []
    require(not differing, f"tune.charge={tune.charge}", *differs(record.path.name, differing))


def _is_dead(folder: Path) -> bool:
    """Returns whether no process holds a run's folder."""
    try:
        with open(folder / "private" / LOCK, opener=not_following) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
