"""Studies on made-up trials: counting down, what belongs together, what is released, and the joint claim against dp-accounting."""

import dataclasses
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting import dp_event, pld, rdp

from dpx.claim import calibration
from dpx.claim.claim_checks import _SAMPLER, _SWEEPER, check_charge
from dpx.claim.study import Study
from dpx.config.declared_tuning import Tune
from dpx.declaration import ConfigError
from dpx.files.records import to_json
from dpx.files.run_folder import Status
from dpx.launch.search import search_of
from tests.released_digests import unexplained
from tests.tuning.made_up import BATCH, SIGMA, SIZE, STEPS, begin, distribution, event, experiment, folder_of, stated, trial

RANDOM = {"_target_": _SWEEPER, "sampler": {"_target_": _SAMPLER, "seed": None}, "storage": None}
RELATION = dp_accounting.NeighboringRelation.REPLACE_SPECIAL


def _by_renyi(composed: dp_event.DpEvent) -> float:
    return rdp.RdpAccountant(neighboring_relation=RELATION).compose(composed).get_epsilon(1e-4)


def test_a_study_counts_down_and_takes_no_trial_more(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("uncharged", 2)
    assert of.tune is not None and study.left(of.tune) == 2
    first = trial(study, of, 1, 0.1)
    assert Study(tmp_path, "s").left(of.tune) == 1, "from the file, by another process"
    trial(study, of, 2, None)
    assert study.left(of.tune) == 0, "a failed trial counts"
    with pytest.raises(ConfigError, match=r"tune.trials=2: the study s has already run all its trials"):
        begin(study, of, tmp_path / "x")
    begin(study, of, first)  # the same trial goes on
    assert study.left(Tune(trials=5)) == 3


def test_uncharged_is_no_guarantee_and_says_why(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("uncharged")
    for number, accuracy in enumerate([0.1, 0.3, 0.2]):
        trial(study, of, number, accuracy)
    said = stated(study)
    assert {one["name"]: one["value"] for one in said["unsupported"]}["epsilon/rdp"] == pytest.approx(_by_renyi(event(STEPS)))
    assert said["guarantee"] == "none" and said["epsilon"] == {} and "uncharged" in said["reasons"][0]
    assert "the choice among the trials" in said["not_covered"][0]


def test_composition_sums_all_trials_and_a_failed_one_costs_its_plan(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition")
    for number, (steps, accuracy) in enumerate([(5, 0.1), (2, None), (5, 0.3)]):
        trial(study, of, number, accuracy, steps)
    said = stated(study)
    assert said["guarantee"] == "dp" and said["winner"] == "laptop_anil_tune_32k-2"
    together = event(3 * STEPS)
    assert said["epsilon"]["rdp"] == pytest.approx(_by_renyi(together))
    tight = pld.PLDAccountant(neighboring_relation=RELATION).compose(together).get_epsilon(1e-4)
    assert said["epsilon"]["pld"] == pytest.approx(tight, rel=1e-3)


def test_repeat_and_select_releases_the_winner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpx.privacy.search_accounting.draw", lambda mean, shape: 3)
    study, of = Study(tmp_path, "s"), experiment("repeat_and_select", 8)
    for number, accuracy in enumerate([0.1, 0.3, 0.2]):
        assert study.close(search_of(of)) == [], "nothing is told before the last trial"
        folder = trial(study, of, number, accuracy)
        assert not (folder / "release").exists() and not study.release.exists()
    (winner,) = study.close(search_of(of))
    assert winner.folder.endswith("-1") and (study.release / "winner" / "privacy.json").is_file()
    said = stated(study)
    reference = _by_renyi(dp_event.RepeatAndSelectDpEvent(event(STEPS), 8, 1.0))
    assert said["guarantee"] == "dp" and said["epsilon"] == {"rdp": pytest.approx(reference, rel=1e-6)}
    # The number of trials is as secret as the noise.
    assert (
        said["trials"] == {"kind": "drawn", "mean": 8, "shape": "1.0"} and said["winner"] == "winner" and said["ledger"]["segments"] is None
    )
    assert [one["count"] for one in said["ledger"]["repeated"]] == [STEPS]
    assert (study.release / "winner" / "privacy.json").read_text() == (study.release / "privacy.json").read_text()
    privates = [study.release.parent / "private", *tmp_path.glob("laptop_anil_tune_32k-*/private")]
    assert unexplained(study.release, privates) == {} and len(privates) == 4


def test_the_number_of_trials_is_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([4, 9])
    monkeypatch.setattr("dpx.privacy.search_accounting.draw", lambda mean, shape: next(drawn))
    tune = Tune(charge="repeat_and_select")
    for _ in range(2):
        Study(tmp_path, "s").settle(tune, distribution())
        assert Study(tmp_path, "s").left(tune) == 4


@pytest.mark.parametrize("changed", [{"trials": 30}, {"shape": 0.0}, {"shape": float("inf")}])
def test_a_number_is_not_drawn_again_from_another_distribution_not_even_before_the_first_trial(tmp_path: Path, changed: dict) -> None:
    study, tune = Study(tmp_path, "s"), Tune(charge="repeat_and_select", trials=8)
    study.settle(tune, distribution())
    left = study.left(tune)
    with pytest.raises(
        ConfigError, match="the number of trials of the study s was already drawn from another distribution, and is drawn only once"
    ):
        study.settle(dataclasses.replace(tune, **changed), distribution())
    study.settle(tune, distribution())
    assert study.left(tune) == left


@pytest.mark.parametrize(
    ("charge", "override", "named"),
    [
        ("repeat_and_select", "steps=6", "steps"),
        ("repeat_and_select", "tune.trials=9", "trials"),
        ("repeat_and_select", "noise.noise_multiplier=5", "noise"),
        ("composition", "data.sequence_length=16", "data"),
    ],
)
def test_trials_of_one_study_share_what_the_charge_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, charge: str, override: str, named: str
) -> None:
    monkeypatch.setattr("dpx.privacy.search_accounting.draw", lambda mean, shape: 3)
    study = Study(tmp_path, "s")
    begin(study, experiment(charge, 8), tmp_path / "a")
    with pytest.raises(ConfigError, match=f"began with another {named}"):
        begin(study, experiment(charge, 8, override), tmp_path / "b", settles=False)
    begin(study, experiment(charge, 8, "optimizer.weight_decay=0.3", "clip.clipping_norm=0.5"), tmp_path / "c", settles=False)


def test_the_name_of_a_search_is_one_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^name=a/b: the name of a search must be the name of one folder"):
        Study(tmp_path, "a/b")


def test_a_charge_is_no_change_of_mind(tmp_path: Path) -> None:
    study = Study(tmp_path, "s")
    begin(study, experiment("uncharged"), tmp_path / "a")
    with pytest.raises(ConfigError, match="began with another charge"):
        begin(study, experiment("composition"), tmp_path / "b")


def test_a_trial_that_refuses_to_start_has_not_begun(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition", 3, f"batch_schedule.size={SIZE + 1}")
    with pytest.raises(ConfigError, match=f"batch size {SIZE + 1}"):
        begin(study, of, folder_of(study, 0))
    assert study.trials() == [] and not folder_of(study, 0).exists()


@pytest.mark.parametrize(
    ("sweeper", "words"),
    [
        ({"sampler": {"_target_": "optuna.samplers.TPESampler"}}, "with TPESampler: its proof needs independent random trials"),
        ({"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"}, "with BasicSweeper"),
        ({"_target_": _SWEEPER, "sampler": {"_target_": "acme.RandomSampler"}}, "with acme.RandomSampler"),
        ({"_target_": "acme.OptunaSweeper", "sampler": {"_target_": _SAMPLER}}, "with acme.OptunaSweeper"),
        ({"_target_": "acme.Sweeper", "sampler": {"_target_": _SAMPLER}}, "with Sweeper"),
        (RANDOM | {"sampler": {"_target_": _SAMPLER, "seed": 1}}, "sampler.seed=1: dpx draws trials only from .*: not with a known seed"),
        (RANDOM | {"storage": "sqlite:///x"}, "hydra.sweeper.storage=sqlite:///x: dpx draws trials only .* from a stored study"),
        (RANDOM | {"custom_search_space": "acme.space"}, "custom_search_space=acme.space: dpx draws trials only"),
        (RANDOM | {"search_space": {"a": {"type": "float"}}}, "search_space=.*: dpx draws trials only"),
    ],
)
def test_adaptive_trials_are_not_charged_as_independent_ones(sweeper: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_charge(sweeper, Tune(charge="repeat_and_select"))
    check_charge(sweeper, Tune(charge="composition"))
    check_charge(RANDOM, Tune(charge="repeat_and_select"))


def test_a_trial_names_its_charge_and_keeps_its_folder() -> None:
    from dpx.claim import statement

    uncharged, charged = experiment("uncharged"), experiment("composition")
    calibrated = calibration.Calibrated(SIGMA, ((0.1, STEPS),), ((BATCH, STEPS),), SIZE, {})
    said = to_json(statement.build(uncharged.claim, None, calibrated))
    assert said["tuning"]["charge"] == "uncharged" and "not charged" in said["tuning"]["meaning"]
    assert statement.build(dataclasses.replace(charged, tune=None).claim, None, calibrated).tuning is None
    assert Status(Path("x"), "train").job == "train"
