"""One search: its trials in the order they began, how many are left, and what `outputs/studies/<name>` says of them all.

A trial is written down, with its plan, before it starts and once more when it ends (`dpx.tuning.record`), so one that is killed, or whose
folder is deleted, has begun and is charged.
"""

import dataclasses
import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

from dpx.claim import rests_on
from dpx.declaration import require
from dpx.durable import put_in_place
from dpx.experiment import Experiment
from dpx.launch.sweep import SCORE, Status
from dpx.run_folder import read_json, write_json
from dpx.tuning.declarations import Tune
from dpx.tuning.record import Record, Trial, opened
from dpx.tuning.rules import check_charge, check_plan, filter_of
from dpx.tuning.search import Search

__all__ = ["Study", "Trial", "check_charge"]

# What all trials of a study share, whatever the charge, and what one mechanism repeated must share besides.
_ALWAYS = ("data", "privacy", "task")
_ONE_MECHANISM = ("model", "steps", "batch_schedule", "sampler", "mechanism", "noise", "accountant", "audit")


class Study:
    """The search called `name` among the runs in `outputs`. Every use holds its record against what follows from it, and raises
    `ConfigError` where they do not agree."""

    def __init__(self, outputs: Path, name: str):
        # Below a folder of its own the trials of one search would be counted in another record than is looked at for the next.
        require("/" not in name, f"name={name}", "a search's name is that of one folder", "Write it without a slash")
        self.outputs, self.path = outputs, outputs / "studies" / name
        self.private, self.release = self.path / "private", self.path / "release"

    def trials(self) -> list[Trial]:
        """Every trial that ever began here."""
        with opened(self.outputs, self.path) as record:
            return record.trials

    def left(self, tune: Tune) -> int:
        """Trials still to begin. Under `repeat_and_select` their whole number is drawn here, once, before the first."""
        with opened(self.outputs, self.path) as record:
            return _left(record, tune)

    def has(self, folder: Path) -> bool:
        """Whether the run in `folder` is a trial of this study."""
        with opened(self.outputs, self.path) as record:
            return record.trial_in(folder) is not None

    def begin(self, experiment: Experiment, folder: Path, point: tuple[str, ...]) -> None:
        """Counts a trial, and charges its plan, before it starts; raises `ConfigError` for one that does not belong to the study, is one
        too many, or does not fit a declared budget. A run that lies in `folder` and is no trial yet becomes one, with all that it spent."""
        from dpx.tuning import charges

        search = Search.of(experiment)
        filter_of(search)
        plan = charges.planned(experiment)
        with opened(self.outputs, self.path) as record:
            trial = record.trial_in(folder)
            left = _left(record, search.tune)
            shared = _check_same(record, search.tune, dataclasses.asdict(experiment) | _classes(experiment))
            if trial is not None:
                record.begin_again(trial)
                return
            require(
                left > 0,
                f"tune.trials={search.tune.trials}",
                f"the study {self.path.name} has had all its trials",
                "Give it another name, or more trials where it is not repeat_and_select",
            )
            check_plan(search, record, plan, point)
            if record.began_with is None:
                record.note({"began_with": shared})
            if search.tune.charge != "repeat_and_select" and search.tune.trials > (record.declared or 0):
                record.note({"declared": search.tune.trials})
            record.begin(folder, point, plan)

    def end(self, experiment: Experiment, folder: Path, state: str, score: float | None = None, error: str | None = None) -> None:
        """Notes what a trial came to; what it would release is withheld, or the study stated anew."""
        with opened(self.outputs, self.path) as record:
            trial = record.newest_in(folder.name)
            require(trial is not None, folder.name, f"is no trial of the study {self.path.name}", "Begin it first")
            assert trial is not None
            self._end(record, Search.of(experiment), trial, state, score, error)

    def close(self, experiment: Experiment) -> list[Trial]:
        """The study after a launch: trials that were killed have failed, or finished where `job=resume` took them to their end; the
        winner of a drawn number of trials is released now.

        Returns all trials, those of a `repeat_and_select` that is not complete or did not win left out.
        """
        search = Search.of(experiment)
        with opened(self.outputs, self.path) as record:
            for trial in record.trials:
                self._settle(record, search, trial)
            trials, secret = record.trials, search.tune.charge == "repeat_and_select"
            if not trials or (secret and (_left(record, search.tune) or any(trial.state == "begun" for trial in trials))):
                return [] if secret else trials
            self._state(search, record)
            best = self.winner(trials)
            if not secret:
                return trials
            if best is not None:
                self._release(best)
            return [best] if best else []

    def winner(self, trials: list[Trial]) -> Trial | None:
        """The finished trial of the highest held-out accuracy; the first of equals."""
        finished = [trial for trial in trials if trial.state == "finished" and trial.score is not None]
        return max(finished, key=lambda trial: trial.score or 0.0, default=None)

    def _settle(self, record: Record, search: Search, trial: Trial) -> None:
        """Ends a trial that no process holds, as what its run folder says it came to."""
        folder = self.outputs / trial.folder
        killed = trial.state == "begun" or (trial.state, trial.error) == ("failed", "killed")
        if not killed or record.newest_in(trial.folder) != trial or not _is_dead(folder):
            return
        came_to = [Status(folder, job).read() for job in ("train", "resume")]
        finished = next((one for one in came_to if one.get("state") == "finished"), None)
        if finished is not None:
            self._end(record, search, trial, "finished", finished.get(SCORE))
        elif trial.state == "begun":
            self._end(record, search, trial, "failed", error="killed")

    def _end(
        self,
        record: Record,
        search: Search,
        trial: Trial,
        state: str,
        score: float | None = None,
        error: str | None = None,
    ) -> None:
        from dpx.tuning import charges, claim

        folder = self.outputs / trial.folder
        known = charges.known(trial, record)
        is_secret = search.tune.charge == "repeat_and_select"
        # Before the end is noted: a trial that was killed between the two has not ended, and is withheld at the next launch.
        if is_secret:
            _withhold(folder)
        record.end(trial, state=state, error=error, reasons=claim.own_reasons(folder), **known, **{SCORE: score})
        if not is_secret:
            self._state(search, record)

    def _state(self, search: Search, record: Record) -> None:
        from dpx.tuning import claim

        write_json(self.release / "privacy.json", claim.build(search, record, self.winner(record.trials)))

    def _release(self, best: Trial) -> None:
        """The winner's results, under the statement of the study: the trial's own does not charge the choice."""
        withheld, shown = self.outputs / best.folder / "private" / "withheld", self.release / "winner"
        if withheld.is_dir():
            shutil.copytree(withheld, shown, dirs_exist_ok=True, ignore=shutil.ignore_patterns("privacy.json"))
            write_json(shown / "privacy.json", read_json(self.release / "privacy.json"))


def _left(record: Record, tune: Tune) -> int:
    if tune.charge != "repeat_and_select":
        return max(0, tune.trials - len(record.trials))
    distribution = [tune.trials, str(tune.shape)]
    # Before the first trial another distribution may still be declared; its number is then drawn from it.
    if record.drawn is None or (not record.trials and record.drawn_from != distribution):
        from dpx.privacy import selection

        record.note({"drawn": selection.draw(tune.trials, tune.shape), "from": distribution})
    assert record.drawn is not None
    return max(0, record.drawn - len(record.trials))


def _classes(experiment: Experiment) -> dict[str, Any]:
    """The classes from outside at their config keys, where there are any: two may hold the same values."""
    parts = rests_on.parts(experiment)
    return {"rests_on": {part.key: part.kind for part in parts}} if parts else {}


def _check_same(record: Record, tune: Tune, declared: dict[str, Any]) -> dict[str, Any]:
    """One study has one charge, one corpus and one claim; a repeated mechanism is the same at every repetition.

    `declared` is an experiment as plain data. Returns all that the trials must share; raises `ConfigError` where it is not what the first
    trial began with.
    """
    # More trials of a charged sum are charged; more of a drawn number would be another distribution.
    fixed = ("charge", "trials", "shape") if tune.charge == "repeat_and_select" else ("charge",)
    fields = _ALWAYS + (_ONE_MECHANISM if tune.charge == "repeat_and_select" else ())
    plain: dict[str, Any] = {name: getattr(tune, name) for name in fixed} | {name: declared[name] for name in fields}
    plain |= {"rests_on": declared["rests_on"]} if "rests_on" in declared else {}
    plain["budget"] = dataclasses.asdict(tune.budget) if tune.budget.is_declared else None
    plain = json.loads(json.dumps(plain, default=str))
    known = plain if record.began_with is None else record.began_with
    differing = [name for name in plain if known.get(name) != plain[name]]
    require(
        not differing,
        f"tune.charge={tune.charge}",
        f"the study {record.path.name} began with another {', '.join(differing)}",
        "Give this study another name",
    )
    return plain


def _withhold(folder: Path) -> None:
    """What a trial would release moves into its private tree: of a repeated mechanism only the winner may be seen."""
    if (folder / "release").is_dir():
        shutil.rmtree(folder / "private" / "withheld", ignore_errors=True)
        put_in_place(folder / "release", folder / "private" / "withheld")


def _is_dead(folder: Path) -> bool:
    """Whether no process holds a run's folder."""
    try:
        with open(folder / "private" / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
