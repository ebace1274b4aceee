"""The statement of a whole search: what its winner guarantees once the choice among the trials is charged."""

import json
from pathlib import Path
from typing import Any

from dpx import batch_schedule
from dpx.experiment import Experiment
from dpx.privacy import accounting, calibration, events, ledger, selection, statement
from dpx.privacy.accounting import Charges
from dpx.privacy.ledger import Ledger, Runs
from dpx.tuning.declarations import Tune

_NOT_COVERED = {
    "uncharged": "the choice among the trials of this search: its winner is charged for its own steps alone",
    "composition": "other searches and runs on the same data",
    "repeat_and_select": "other searches and runs on the same data; anything shown of trials that did not win, such as their number",
}
_ASSUMED = {
    "uncharged": "nothing: no epsilon is stated for the search",
    "composition": "every release on the way to the winner is a step of one of these trials",
    "repeat_and_select": "trials are independent random draws, their number was drawn once and stays secret, only release/winner is shown",
}


def build(experiment: Experiment, name: str, folders: list[Path], winner: str | None) -> dict[str, Any]:
    """Every field of the study's `privacy.json`. `folders` are those of all trials that ever began."""
    tune = experiment.tune
    assert tune is not None
    reasons = _reasons(experiment, tune, folders)
    # What an uncharged search could claim is its winner's own epsilon, and that is no bound.
    counted = [folder for folder in folders if tune.charge != "uncharged" or folder.name == winner]
    branches = _ledgers(counted)
    epsilon = _epsilon(experiment, tune, branches) if experiment.is_private else {}
    secret = tune.charge == "repeat_and_select"
    return {
        "format": statement.FORMAT,
        "study": name,
        "charge": tune.charge,
        "trials": {"mean": tune.trials, "shape": str(tune.shape)} if secret else {"begun": len(folders)},
        "guarantee": "not_private" if not experiment.is_private else "none" if reasons else "dp",
        "reasons": reasons,
        "unit": experiment.privacy.unit,
        "adjacency": experiment.privacy.adjacency,
        "delta": experiment.privacy.delta,
        "epsilon": {} if reasons else epsilon,
        "unsupported": [{"name": f"epsilon/{key}", "value": one, "reason": "; ".join(reasons)} for key, one in epsilon.items() if reasons],
        # Folders of the others would tell how many there are.
        "winner": winner if not secret else "winner" if winner else None,
        "assumptions": [_ASSUMED[tune.charge]],
        "not_covered": [_NOT_COVERED[tune.charge], *statement.NOT_COVERED[2:]],
        "ledger": {"runs": ledger.join(*branches)} if not secret else {"repeated": _events(experiment, branches)},
    }


def _reasons(experiment: Experiment, tune: Tune, folders: list[Path]) -> list[str]:
    """Why the search has no guarantee, those of its trials included."""
    if not experiment.is_private:
        return ["mechanism=none"]
    without = [said for said in _statements(folders) if said["guarantee"] != "dp"]
    reasons = sorted({reason for said in without for reason in said["reasons"]} | ({"a trial has no guarantee"} if without else set()))
    if tune.charge == "uncharged":
        reasons.append("tune.charge=uncharged: choosing the best of several trials reads the protected data, and nothing here charges it")
    return reasons


def _ledgers(folders: list[Path]) -> list[Runs]:
    return [Ledger(path).runs() for path in (folder / "private" / "ledger" for folder in folders) if path.is_file()]


def _statements(folders: list[Path]) -> list[dict[str, Any]]:
    """Statements of the trials that came far enough to have one."""
    places = [place for folder in folders for place in (folder / "release", folder / "private" / "withheld")]
    return [json.loads((place / "privacy.json").read_text()) for place in places if (place / "privacy.json").is_file()]


def _epsilon(experiment: Experiment, tune: Tune, branches: list[Runs]) -> dict[str, float | None]:
    """By accountant: of `branches` together, or of the best of a random number of such trials."""
    delta, adjacency = experiment.privacy.delta, experiment.privacy.adjacency
    if tune.charge == "repeat_and_select":
        charges, orders = _repeated(experiment, branches), getattr(experiment.accountant, "orders", None)
        if not charges:
            return {}
        found = selection.epsilon(charges, delta=delta, mean=tune.trials, shape=tune.shape, adjacency=adjacency, orders=orders)
        return {"rdp": accounting.finite(found)}
    charges = accounting.bucketed(ledger.releases(ledger.join(*branches)))
    if not charges:
        return {}
    return {name: accounting.finite(found.epsilon(delta)) for name, found in calibration.compositions(experiment, charges).items()}


def _events(experiment: Experiment, branches: list[Runs]) -> list[dict[str, Any]]:
    """The event of one trial, as dp-accounting composes it; the number of trials is in none of it."""
    adjacency = experiment.privacy.adjacency
    charges = _repeated(experiment, branches)
    return [{"event": statement.describe(events.event(release, adjacency, "rdp")), "count": count} for release, count in charges]


def _repeated(experiment: Experiment, branches: list[Runs]) -> Charges:
    """One trial's charges: those planned, or more where a trial was restarted and charged for steps again."""
    planned = [_planned(experiment, runs) for runs in branches if runs]
    return worst([accounting.bucketed(ledger.releases(runs)) for runs in [*branches, *planned]])


def _planned(experiment: Experiment, runs: Runs) -> Runs:
    """The whole trial of which `runs` may be a part: a trial that failed was the same mechanism."""
    steps = batch_schedule.runs(experiment.batch_schedule, experiment.steps)
    return calibration.planned(experiment, steps, runs[0]["size"], runs[0]["noise_multiplier"])


def worst(charges: list[Charges]) -> Charges:
    """Charges that no trial exceeds: of each release the most that any trial made (a restarted trial repeats steps)."""
    most: dict[events.Release, int] = {}
    for one in charges:
        for release, count in one:
            most[release] = max(count, most.get(release, 0))
    return list(most.items())
