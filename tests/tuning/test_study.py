"""Studies on made-up trials: counting down, what belongs together, what is released, and the joint claim against dp-accounting."""

import dataclasses
import json
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting import dp_event, pld, rdp

from dpx import config, recipes
from dpx.declaration import Refused
from dpx.experiment import Experiment
from dpx.privacy import calibration
from dpx.privacy.ledger import Ledger
from dpx.sweep import Status
from dpx.tuning.declarations import Tune
from dpx.tuning.study import Study, check_charge

SIZE, SIGMA = 1000, 1.0
RELATION = dp_accounting.NeighboringRelation.REPLACE_SPECIAL


def _experiment(charge: str, trials: int = 3, *overrides: str) -> Experiment:
    plain = ["+experiment=laptop/anil_tune_32k", "hydra/sweeper=basic", "model=micro", "steps=5", "batch_schedule.size=100"]
    built, _ = config.build(recipes.compose([*plain, f"tune.charge={charge}", f"tune.trials={trials}", "privacy.delta=1e-4", *overrides]))
    return built


def _trial(study: Study, experiment: Experiment, number: int, steps: int, accuracy: float | None) -> Path:
    """A trial that entered `steps` steps in its ledger and then finished with `accuracy`, or failed."""
    folder = study.outputs / f"laptop_anil_tune_32k-{number}"
    study.begin(experiment, folder, (f"optimizer.weight_decay={number}",))
    (folder / "release").mkdir(parents=True)
    (folder / "private").mkdir()
    ledger = Ledger(folder.joinpath("private", "ledger"))
    for step in range(steps):
        ledger.append(step, calibration.entry(experiment, SIZE, SIGMA, 100))
    ledger.close()
    (folder / "release" / "privacy.json").write_text(json.dumps({"guarantee": "dp", "reasons": []}))
    study.end(experiment, folder, "failed" if accuracy is None else "finished", accuracy)
    return folder


def _stated(study: Study) -> dict:
    return json.loads((study.release / "privacy.json").read_text())


def _steps(count: int) -> dp_event.DpEvent:
    return dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(SIGMA)), count)


def test_a_study_counts_down_and_takes_no_trial_more(tmp_path: Path) -> None:
    study, experiment = Study(tmp_path, "s"), _experiment("uncharged", 2)
    assert experiment.tune is not None and study.left(experiment.tune) == 2
    _trial(study, experiment, 1, 5, 0.1)
    assert Study(tmp_path, "s").left(experiment.tune) == 1, "from the file, by another process"
    _trial(study, experiment, 2, 5, None)
    assert study.left(experiment.tune) == 0, "a failed trial counts"
    with pytest.raises(Refused, match=r"tune.trials=2: the study s has had all its trials"):
        study.begin(experiment, tmp_path / "x", ())
    study.begin(experiment, tmp_path / "laptop_anil_tune_32k-1", ())  # the same trial goes on
    assert study.left(Tune(trials=5)) == 3


def test_uncharged_is_no_guarantee_and_says_why(tmp_path: Path) -> None:
    study, experiment = Study(tmp_path, "s"), _experiment("uncharged")
    for number, accuracy in enumerate([0.1, 0.3, 0.2]):
        _trial(study, experiment, number, 5, accuracy)
    said = _stated(study)
    alone = rdp.RdpAccountant(neighboring_relation=RELATION).compose(_steps(5)).get_epsilon(1e-4)
    assert {one["name"]: one["value"] for one in said["unsupported"]}["epsilon/rdp"] == pytest.approx(alone)
    assert said["guarantee"] == "none" and said["epsilon"] == {} and "uncharged" in said["reasons"][0]
    assert "the choice among the trials" in said["not_covered"][0]


def test_composition_sums_all_trials_failed_ones_included(tmp_path: Path) -> None:
    study, experiment = Study(tmp_path, "s"), _experiment("composition")
    for number, (steps, accuracy) in enumerate([(5, 0.1), (2, None), (5, 0.3)]):
        _trial(study, experiment, number, steps, accuracy)
    said = _stated(study)
    assert said["guarantee"] == "dp" and said["winner"] == "laptop_anil_tune_32k-2"
    together = _steps(12)
    assert said["epsilon"]["rdp"] == pytest.approx(rdp.RdpAccountant(neighboring_relation=RELATION).compose(together).get_epsilon(1e-4))
    tight = pld.PLDAccountant(neighboring_relation=RELATION).compose(together).get_epsilon(1e-4)
    assert said["epsilon"]["pld"] == pytest.approx(tight, rel=1e-3)


def test_a_killed_trial_is_charged_and_has_failed(tmp_path: Path) -> None:
    study, experiment = Study(tmp_path, "s"), _experiment("composition")
    _trial(study, experiment, 1, 5, 0.1)
    folder = tmp_path / "laptop_anil_tune_32k-2"
    study.begin(experiment, folder, ())
    (folder / "private").mkdir(parents=True)
    Ledger(folder / "private" / "ledger").append(0, calibration.entry(experiment, SIZE, SIGMA, 100))
    with open(study.private / "trials.jsonl", "a") as file:
        file.write('{"folder": "cut sh')
    assert [trial.state for trial in study.close(experiment)] == ["finished", "failed"]
    assert sum(count for run in _stated(study)["ledger"]["runs"] for _, count in run["steps"]) == 6


def test_repeat_and_select_releases_the_winner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpx.privacy.selection.draw", lambda mean, shape: 3)
    study, experiment = Study(tmp_path, "s"), _experiment("repeat_and_select", 8)
    for number, (steps, accuracy) in enumerate([(5, 0.1), (5, 0.3), (2, None)]):
        assert study.close(experiment) == [], "nothing is told before the last trial"
        folder = _trial(study, experiment, number, steps, accuracy)
        assert not (folder / "release").exists()
    (winner,) = study.close(experiment)
    assert winner.folder.endswith("-1") and (study.release / "winner" / "privacy.json").is_file()
    said = _stated(study)
    event = dp_event.RepeatAndSelectDpEvent(_steps(5), 8, 1.0)
    reference = rdp.RdpAccountant(neighboring_relation=RELATION).compose(event).get_epsilon(1e-4)
    assert said["guarantee"] == "dp" and said["epsilon"] == {"rdp": pytest.approx(reference, rel=1e-6)}
    # The number of trials is as secret as the noise.
    assert said["trials"] == {"mean": 8, "shape": "1.0"} and said["winner"] == "winner" and "runs" not in said["ledger"]
    assert [one["count"] for one in said["ledger"]["repeated"]] == [5]
    assert json.loads((study.release / "winner" / "privacy.json").read_text()) == said


def test_the_number_of_trials_is_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([4, 9])
    monkeypatch.setattr("dpx.privacy.selection.draw", lambda mean, shape: next(drawn))
    tune = Tune(charge="repeat_and_select")
    assert Study(tmp_path, "s").left(tune) == Study(tmp_path, "s").left(tune) == 4


@pytest.mark.parametrize(
    ("charge", "override", "named"),
    [
        ("repeat_and_select", "steps=6", "steps"),
        ("repeat_and_select", "tune.trials=9", "trials"),
        ("repeat_and_select", "noise.epsilon=2", "noise"),
        ("composition", "data.sequence_length=16", "data"),
    ],
)
def test_trials_of_one_study_share_what_the_charge_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, charge: str, override: str, named: str
) -> None:
    monkeypatch.setattr("dpx.privacy.selection.draw", lambda mean, shape: 3)
    study = Study(tmp_path, "s")
    study.begin(_experiment(charge, 8), tmp_path / "a", ())
    with pytest.raises(Refused, match=f"began with another {named}"):
        study.begin(_experiment(charge, 8, override), tmp_path / "b", ())
    study.begin(_experiment(charge, 8, "optimizer.weight_decay=0.3", "clip.clipping_norm=0.5"), tmp_path / "c", ())


def test_a_charge_is_no_change_of_mind(tmp_path: Path) -> None:
    study = Study(tmp_path, "s")
    study.begin(_experiment("uncharged"), tmp_path / "a", ())
    with pytest.raises(Refused, match="began with another charge"):
        study.begin(_experiment("composition"), tmp_path / "b", ())


@pytest.mark.parametrize(
    ("sweeper", "words"),
    [
        ({"sampler": {"_target_": "optuna.samplers.TPESampler"}}, "with TPESampler: it is proved for independent random trials"),
        ({"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"}, "with BasicSweeper"),
        ({"sampler": {"_target_": "optuna.samplers.RandomSampler", "seed": 1}}, "known seed"),
    ],
)
def test_adaptive_trials_are_not_charged_as_independent_ones(sweeper: dict, words: str) -> None:
    with pytest.raises(Refused, match=words):
        check_charge(sweeper, Tune(charge="repeat_and_select"))
    check_charge(sweeper, Tune(charge="composition"))
    check_charge({"sampler": {"_target_": "optuna.samplers.RandomSampler", "seed": None}}, Tune(charge="repeat_and_select"))


def test_a_trial_names_its_charge_and_keeps_its_folder() -> None:
    from dpx.privacy import statement

    uncharged, charged = _experiment("uncharged"), _experiment("composition")
    calibrated = calibration.Calibrated(SIGMA, ((0.1, 5),), ((100, 5),), SIZE, {})
    said = statement.build(uncharged, None, calibrated)
    assert said["tuning"]["charge"] == "uncharged" and "not charged" in said["tuning"]["meaning"]
    assert "tuning" not in statement.build(dataclasses.replace(charged, tune=None), None, calibrated)
    assert Status(Path("x"), "train").job == "train"
