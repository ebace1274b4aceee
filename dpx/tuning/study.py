"""One search: its trials in the order they began, how many are left, and what `outputs/studies/<name>` says of them all.

`private/trials.jsonl` gets a line before a trial starts and one when it ends, so a killed trial has begun and counts.
"""

import dataclasses
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

from dpx.declaration import require
from dpx.durable import sync_directory
from dpx.experiment import Experiment
from dpx.run_folder import write_json
from dpx.tuning.declarations import Tune

# What all trials of a study share, whatever the charge, and what one mechanism repeated must share besides.
_ALWAYS = ("data", "privacy", "task")
_ONE_MECHANISM = ("model", "steps", "batch_schedule", "sampler", "mechanism", "noise", "accountant", "audit")


@dataclasses.dataclass(frozen=True)
class Trial:
    """`state` is `begun` until the trial ends; `folder` is its run folder's name."""

    folder: str
    point: tuple[str, ...] = ()
    state: str = "begun"
    objective: float | None = None
    error: str | None = None


class Study:
    """The search called `name` among the runs in `outputs`."""

    def __init__(self, outputs: Path, name: str):
        self.outputs, self.path = outputs, outputs / "studies" / name
        self.private, self.release = self.path / "private", self.path / "release"

    def trials(self) -> list[Trial]:
        """Every trial that ever began here."""
        found: dict[str, Trial] = {}
        for line in self._lines():
            known = found.get(line["folder"], Trial(line["folder"]))
            found[line["folder"]] = dataclasses.replace(known, **(line | {"point": tuple(line.get("point", known.point))}))
        return list(found.values())

    def left(self, tune: Tune) -> int:
        """Trials still to begin. Under `repeat_and_select` their whole number is drawn here, once, before the first."""
        self.private.mkdir(parents=True, exist_ok=True, mode=0o700)
        return max(0, self._wanted(tune) - len(self.trials()))

    def begin(self, experiment: Experiment, folder: Path, point: tuple[str, ...]) -> None:
        """Counts a trial before it starts; raises `Refused` for one that does not belong to the study, or is one too many."""
        assert experiment.tune is not None
        began = folder.name in {trial.folder for trial in self.trials()}
        left = self.left(experiment.tune)
        self._check_same(experiment)
        require(
            began or left > 0,
            f"tune.trials={experiment.tune.trials}",
            f"the study {self.path.name} has had all its trials",
            "Give it another name, or more trials where it is not repeat_and_select",
        )
        self._append(Trial(folder.name, point))

    def end(self, experiment: Experiment, folder: Path, state: str, objective: float | None = None, error: str | None = None) -> None:
        """Notes what a trial came to; what it would release is withheld, or the study stated anew."""
        assert experiment.tune is not None
        self._append(Trial(folder.name, (), state, objective, error), ended=True)
        if experiment.tune.charge == "repeat_and_select":
            _withhold(folder)
        else:
            self._state(experiment, self.trials())

    def close(self, experiment: Experiment) -> list[Trial]:
        """The study after a launch: trials that were killed have failed; the winner of a drawn number of trials is released now.

        Returns all trials, those of a `repeat_and_select` that is not complete or did not win left out.
        """
        assert experiment.tune is not None
        for trial in self.trials():
            if trial.state == "begun" and _is_dead(self.outputs / trial.folder):
                self.end(experiment, self.outputs / trial.folder, "failed", error="killed")
        trials, secret = self.trials(), experiment.tune.charge == "repeat_and_select"
        if not trials or (secret and (self.left(experiment.tune) or any(trial.state == "begun" for trial in trials))):
            return [] if secret else trials
        self._state(experiment, trials)
        best = self.winner(trials)
        if not secret:
            return trials
        if best is not None:
            shutil.copytree(self.outputs / best.folder / "private" / "withheld", self.release / "winner", dirs_exist_ok=True)
            # The trial's own statement does not charge the choice.
            shutil.copy(self.release / "privacy.json", self.release / "winner")
        return [best] if best else []

    def winner(self, trials: list[Trial]) -> Trial | None:
        """The finished trial of the highest held-out accuracy; the first of equals."""
        finished = [trial for trial in trials if trial.state == "finished" and trial.objective is not None]
        return max(finished, key=lambda trial: trial.objective or 0.0, default=None)

    def _state(self, experiment: Experiment, trials: list[Trial]) -> None:
        from dpx.tuning import claim

        self.release.mkdir(parents=True, exist_ok=True)
        best = self.winner(trials)
        stated = claim.build(experiment, self.path.name, [self.outputs / trial.folder for trial in trials], best.folder if best else None)
        write_json(self.release / "privacy.json", stated)

    def _wanted(self, tune: Tune) -> int:
        if tune.charge != "repeat_and_select":
            return tune.trials
        from dpx.privacy import selection

        secret = self.private / "number_of_trials.json"
        if not secret.exists():
            write_json(secret, {"trials": selection.draw(tune.trials, tune.shape)})
        return json.loads(secret.read_text())["trials"]

    def _check_same(self, experiment: Experiment) -> None:
        """One study has one charge, one corpus and one claim; a repeated mechanism is the same at every repetition."""
        assert experiment.tune is not None
        tune, path = experiment.tune, self.private / "study.json"
        # More trials of a charged sum are charged; more of a drawn number would be another distribution.
        fixed = ("charge", "trials", "shape") if tune.charge == "repeat_and_select" else ("charge",)
        fields = _ALWAYS + (_ONE_MECHANISM if tune.charge == "repeat_and_select" else ())
        declared = dataclasses.asdict(experiment)
        plain = {name: getattr(tune, name) for name in fixed} | {name: declared[name] for name in fields}
        plain = json.loads(json.dumps(plain, default=str))
        if not path.exists():
            write_json(path, plain)
        known = json.loads(path.read_text())
        differing = [name for name in plain if known.get(name) != plain[name]]
        require(
            not differing,
            f"tune.charge={tune.charge}",
            f"the study {self.path.name} began with another {', '.join(differing)}",
            "Give this study another name",
        )

    def _lines(self) -> list[dict[str, Any]]:
        path = self.private / "trials.jsonl"
        # A line cut short by a kill is that of a trial that had not started.
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []

    def _append(self, trial: Trial, ended: bool = False) -> None:
        line = {key: value for key, value in dataclasses.asdict(trial).items() if not (ended and key == "point")}
        path = self.private / "trials.jsonl"
        whole = "".join(json.dumps(known) + "\n" for known in self._lines())
        if path.exists() and path.read_text() != whole:
            path.write_text(whole)
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        sync_directory(path.parent)


def check_charge(sweeper: Any, tune: Tune) -> None:
    """Raises `Refused` where the trials of `sweeper` are not what the charge is proved for."""
    if tune.charge != "repeat_and_select":
        return
    sampler = sweeper.get("sampler") or {}
    kind = str(sampler.get("_target_", sweeper.get("_target_"))).rpartition(".")[2]
    require(
        kind == "RandomSampler",
        f"tune.charge=repeat_and_select with {kind}",
        "it is proved for independent random trials, and these depend on each other or are a list",
        "Add hydra/sweeper/sampler=random, or use tune.charge=composition",
    )
    require(
        sampler.get("seed") is None,
        f"hydra.sweeper.sampler.seed={sampler.get('seed')}",
        "trials of a known seed are not drawn anew",
        "Leave the seed out",
    )


def _withhold(folder: Path) -> None:
    """What a trial would release moves into its private tree: of a repeated mechanism only the winner may be seen."""
    if (folder / "release").is_dir():
        shutil.rmtree(folder / "private" / "withheld", ignore_errors=True)
        os.replace(folder / "release", folder / "private" / "withheld")


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
