"""A trial remains a trial of its study: its folder records this, whatever the command that resumes it says."""

import contextlib
import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from dpx.claim import calibration, statement
from dpx.claim.study import Study
from dpx.config.experiment import Experiment
from dpx.declaration import ConfigError, declaration
from dpx.files.results import Results, write_results
from dpx.job.plan import Plan
from dpx.job.released_jobs import Evaluate
from dpx.job.train import Resume, Train
from dpx.launch import search
from dpx.launch.search import search_of
from dpx.privacy.ledger import Ledger
from dpx.processes.interruption import Interrupted
from dpx.statement import outside_code
from tests.composed import point_at
from tests.tuning.made_up import BATCH, DRAWN, SIGMA, SIZE, STEPS, begin, enter, experiment, folder_of, stated, steps_of, trial

CHARGES = ("uncharged", "composition", "repeat_and_select")


@pytest.fixture(autouse=True)
def three_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpx.privacy.search_accounting.draw", lambda mean, shape: 3)


def _without_search(of: Experiment) -> Experiment:
    return dataclasses.replace(of, tune=None)


def _killed(study: Study, of: Experiment, number: int = 0) -> Path:
    """A trial that was killed after two steps; its ledger says whose trial it is, as a session notes it."""
    folder = folder_of(study, number)
    begin(study, of, folder)
    enter(folder, of, range(2))
    _note(folder, of)
    return folder


def _note(folder: Path, of: Experiment) -> None:
    ledger = Ledger(folder / "private" / "ledger")
    assert of.tune is not None
    ledger.note_trial(of.name, of.tune.charge)
    ledger.close()


def _go_on(folder: Path, of: Experiment, job: Any, name: str, score: float = 0.4, is_sweep: bool = False) -> Experiment:
    """What a launch of `job` on the run in `folder` gives the job; it trains the steps that are left."""
    with search.trial(point_at(folder, name, is_sweep=is_sweep), of, job) as seen:
        enter(folder, of, range(2, STEPS))
        write_results(folder / "private", Results(steps=STEPS, metric="accuracy", heldout={"accuracy": score}, baselines={}))
    return seen


# The job, its name, whether it is launched as a sweep, and whether the command still declares the search.
ROADS = {
    "job=resume": (Resume(), "resume", False, False),
    "job=resume under a config with the search": (Resume(), "resume", False, True),
    "the point without -m": (Train(), "train", False, True),
    "the point without -m and without the search": (Train(), "train", False, False),
    "a point of a sweep without the search": (Train(), "train", True, False),
}


# Each road under one charge, in turn.
RESUMED = [(road, charge, place == number % len(CHARGES)) for number, road in enumerate(ROADS) for place, charge in enumerate(CHARGES)]


@pytest.mark.parametrize(
    ("road", "charge"),
    [pytest.param(road, charge, marks=[pytest.mark.slow] * (not is_its_turn)) for road, charge, is_its_turn in RESUMED],
)
def test_a_resumed_trial_keeps_its_charge_and_its_study_learns_what_it_comes_to(tmp_path: Path, charge: str, road: str) -> None:
    of = experiment(charge, 3)
    study = Study(tmp_path, of.name)
    folder = _killed(study, of)
    job, name, is_sweep, declares = ROADS[road]
    seen = _go_on(folder, of if declares else _without_search(of), job, name, is_sweep=is_sweep)
    assert seen == of, "with the search that its study began with"
    (ended,) = study.trials()
    assert (ended.state, ended.score) == ("finished", 0.4)
    if charge == "repeat_and_select":
        assert not (folder / "release").exists() and (folder / "private" / "withheld").is_dir()
    else:
        assert steps_of(stated(study)) == STEPS


@pytest.mark.parametrize("charge", CHARGES)
def test_the_statement_of_a_trial_follows_its_ledger_whatever_the_command_says(tmp_path: Path, charge: str) -> None:
    of = experiment(charge, 3)
    folder = _killed(Study(tmp_path, of.name), of)
    calibrated = calibration.Calibrated(SIGMA, ((0.1, STEPS),), ((BATCH, STEPS),), SIZE, {"rdp": 1.0})
    plain = statement.build(_without_search(of).claim, None, calibrated, Ledger(folder / "private" / "ledger"))
    assert plain == statement.build(of.claim, None, calibrated, Ledger(folder / "private" / "ledger"))
    assert plain.tuning is not None and plain.tuning.charge == charge and plain.tuning.meaning.startswith("one trial of a search")
    assert plain.tuning.meaning == plain.not_covered[0], "where the card and the explanation show it"
    copied = shutil.copytree(folder, tmp_path / "elsewhere" / "copy")
    assert statement.build(_without_search(of).claim, None, calibrated, Ledger(copied / "private" / "ledger")) == plain


def test_a_resumed_trial_that_fails_has_failed_in_its_study(tmp_path: Path) -> None:
    of = experiment("composition", 3)
    study = Study(tmp_path, of.name)
    folder = _killed(study, of)
    with pytest.raises(RuntimeError), search.trial(point_at(folder, "resume"), of, Resume()):
        raise RuntimeError("out of memory")
    (failed,) = study.trials()
    assert (failed.state, failed.error) == ("failed", "RuntimeError: out of memory")


def test_a_trial_that_ends_outside_its_sweep_completes_a_repetition(tmp_path: Path) -> None:
    of = experiment("repeat_and_select", 8)
    study = Study(tmp_path, of.name)
    for number in (1, 2):
        trial(study, of, number, 0.1 * number)
    folder = _killed(study, of)
    _go_on(folder, _without_search(of), Resume(), "resume")
    (winner,) = study.close(search_of(of))
    assert winner.folder == folder.name and stated(study)["guarantee"] == "dp"


def test_a_copy_of_a_trial_is_charged_to_its_study_or_refused(tmp_path: Path) -> None:
    of = experiment("composition", 2)
    study = Study(tmp_path, of.name)
    _go_on(_killed(study, of), _without_search(of), Resume(), "resume")
    copied = shutil.copytree(folder_of(study, 0), folder_of(study, 1))
    _go_on(copied, _without_search(of), Resume(), "resume")
    assert [one.folder for one in study.trials()] == [folder_of(study, 0).name, copied.name]
    secret = experiment("repeat_and_select", 8)
    other = Study(tmp_path / "secret", secret.name)
    copied = shutil.copytree(_killed(other, secret), folder_of(other, 1))
    with pytest.raises(ConfigError, match="is a copy of a trial of the study laptop_anil_tune_32k, or was renamed"):
        _go_on(copied, _without_search(secret), Resume(), "resume")


def test_a_trial_away_from_its_study_or_without_its_note_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    of = experiment("composition", 3)
    study = Study(tmp_path, of.name)
    folder = _killed(study, of)
    away = shutil.copytree(folder, tmp_path / "elsewhere" / folder.name)
    with pytest.raises(
        ConfigError,
        match="is a trial of the study laptop_anil_tune_32k, but the record of the study is not in the same folder. Move the run back",
    ):
        _go_on(away, _without_search(of), Resume(), "resume")
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == [folder.name]
    (folder / "private" / "trial.json").unlink()
    with pytest.raises(ConfigError, match="trial.json: is missing, but the run's ledger says that it is a trial of the study laptop_anil"):
        _go_on(folder, _without_search(of), Train(), "train")


def test_a_config_that_declares_a_search_resumes_nothing_that_is_no_trial(tmp_path: Path) -> None:
    of = experiment("composition", 3)
    for job, name, words in ((Resume(), "resume", "trial.json: is missing, but this run began"), (Train(), "train", "is a sweep")):
        with pytest.raises(ConfigError, match=words):
            _go_on(tmp_path / "run", of, job, name)


def test_jobs_that_do_not_train_begin_no_trial_again(tmp_path: Path) -> None:
    of = experiment("composition", 3)
    study = Study(tmp_path, of.name)
    trial(study, of, 0, 0.1)
    before = (study.private / "trials").read_bytes()
    with search.trial(point_at(folder_of(study, 0), "evaluate"), of, Evaluate()) as seen:
        assert seen.tune is None
    assert (study.private / "trials").read_bytes() == before


def test_a_plan_trains_nothing_whatever_other_points_have_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = experiment("composition", 3)
    monkeypatch.setattr(outside_code, "imported", lambda: ("elsewhere",))
    with search.trial(point_at(tmp_path / "plan", "plan"), of, Plan()) as seen:
        assert seen.tune is None


@declaration
class Outside:
    """Stands for a job of a package: its class names a module that is not of dpx."""

    def __call__(self, experiment: Experiment, folder: Any) -> None: ...


def test_a_job_from_outside_trains_no_uncounted_trial(tmp_path: Path) -> None:
    of = experiment("composition", 3)
    study = Study(tmp_path, of.name)
    with pytest.raises(
        ConfigError, match="job=outside with tune: code from another package may train in this job, but only job=train counts the trials"
    ):
        _go_on(folder_of(study, 0), of, Outside(), "outside", is_sweep=True)
    folder = _killed(study, of)
    assert _go_on(folder, _without_search(of), Outside(), "outside").tune == of.tune
    assert [one.state for one in study.trials()] == ["finished"]


def test_an_interrupted_draw_names_its_own_resume_first(tmp_path: Path) -> None:
    for charge in ("composition", "repeat_and_select"):
        of = experiment(charge, 3)
        study = Study(tmp_path / charge, of.name)
        folder = _killed(study, of)
        point = point_at(folder, "train", DRAWN)
        with search.trial(point, _without_search(of), Train()):
            enter(folder, of, range(2, 3))
        point.is_sweep = True
        interrupted = Interrupted(3)
        point.note_interrupted(interrupted)
        assert ("job=resume" in interrupted.how) == (charge == "repeat_and_select") and "the same command" in interrupted.how


def test_trials_lie_beside_the_study_that_counts_them(tmp_path: Path) -> None:
    cfg = OmegaConf.create({"name": "s", "tune": {"charge": "composition"}})
    for folder, is_beside in (("s-1", True), ("group/s-1", False), ("../elsewhere/s-1", False)):
        sweep = SimpleNamespace(dir=str(tmp_path), subdir=folder)
        settings = SimpleNamespace(runtime=SimpleNamespace(output_dir=str(tmp_path / folder)), sweep=sweep, sweeper={})
        expected = (
            contextlib.nullcontext()
            if is_beside
            else pytest.raises(ConfigError, match=f"hydra.sweep.subdir={folder}: .*must be in the same folder")
        )
        with expected:
            point_at(tmp_path / folder, cfg=cfg).require_fits_sweep(settings)
        point_at(tmp_path / folder, cfg=OmegaConf.create({"name": "s", "tune": None})).require_fits_sweep(settings)
