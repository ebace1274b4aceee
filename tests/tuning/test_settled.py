"""What a search settles before its first trial: what trials are drawn from, their number, and what no later launch may change."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from dpx.claim import search_record
from dpx.claim.claim_checks import check_space
from dpx.claim.search_record import TrialDistribution, different_keys
from dpx.claim.study import Study
from dpx.config.declared_tuning import Tune
from dpx.config.experiment import Experiment
from dpx.declaration import ConfigError
from dpx.launch.search import search_of
from dpx.privacy.hash_chain import Chain
from tests.tuning.made_up import BATCH, DRAWN, STEPS, begin, distribution, enter, experiment, folder_of, stated, trial

TUNE = Tune(charge="repeat_and_select", trials=8)


@pytest.fixture(autouse=True)
def three_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpx.privacy.search_accounting.draw", lambda mean, shape: 3)


def _lines(study: Study) -> list[str]:
    return [line["kind"] for line in Chain(study.private / "trials").lines]


def _other_space(**changes: object) -> TrialDistribution:
    known = distribution()
    return dataclasses.replace(known, space={"optimizer.weight_decay": known.space["optimizer.weight_decay"] | changes})


def test_space_sampler_number_and_its_distribution_are_on_disk_before_the_first_trial(tmp_path: Path) -> None:
    study = Study(tmp_path, "s")
    study.settle(TUNE, distribution(steps=STEPS))
    settled, drawn = Chain(study.private / "trials").lines
    assert settled == {"kind": "draws_from", "distribution": dataclasses.asdict(distribution(steps=STEPS))}
    assert drawn == {"kind": "drawn", "number": 3, "drawn_from": {"mean": 8, "shape": "1.0"}}
    study.begin(search_of(experiment("repeat_and_select", 8)), folder_of(study, 0), (DRAWN,), lambda others: {"steps": STEPS})
    assert _lines(study) == ["draws_from", "drawn", "began_with", "begun"]


DIFFERENT = {
    "hydra.sweeper.params.optimizer.weight_decay": _other_space(high=9.0),
    "hydra.sweeper.params.optimizer.eps": dataclasses.replace(
        distribution(), space=distribution().space | {"optimizer.eps": {"type": "choice", "values": ["1", "2"]}}
    ),
    "hydra.sweeper.params.optimizer.weight_decay ": dataclasses.replace(distribution(), space={}),
    "hydra.sweeper.sampler": dataclasses.replace(distribution(), sampler=distribution().sampler | {"sampler": {"seed": 1}}),
    "lr_schedule": distribution(lr_schedule={"warmup_steps": 1}),
}


@pytest.mark.parametrize("named", DIFFERENT)
def test_a_later_launch_that_would_draw_from_something_else_is_refused_by_name(tmp_path: Path, named: str) -> None:
    study, of = Study(tmp_path, "s"), experiment("repeat_and_select", 8)
    study.settle(TUNE, DIFFERENT[named])
    study.settle(TUNE, distribution())  # nothing was seen
    assert Chain(study.private / "trials").lines[-1] == {"kind": "draws_from", "distribution": dataclasses.asdict(distribution())}
    assert _lines(study).count("drawn") == 1, "the number stays"
    trial(study, of, 0, 0.1)
    before = (study.private / "trials").read_bytes()
    with pytest.raises(ConfigError) as refused:
        study.settle(TUNE, DIFFERENT[named])
    assert str(refused.value) == (
        f"tune.charge=repeat_and_select: the study s began with another {named.strip()}. Give this study another name."
    )
    assert (study.private / "trials").read_bytes() == before
    study.settle(TUNE, distribution())


@pytest.mark.parametrize(
    ("charge", "later"),
    [
        ("repeat_and_select", Tune(charge="composition")),
        ("composition", Tune(charge="repeat_and_select")),
        ("composition", Tune(charge="uncharged")),
        ("uncharged", Tune(charge="composition")),
    ],
)
def test_a_launch_under_another_charge_is_refused_before_it_draws(tmp_path: Path, charge: str, later: Tune) -> None:
    study = Study(tmp_path, "s")
    trial(study, experiment(charge, 8), 0, 0.1)
    before = (study.private / "trials").read_bytes()
    with pytest.raises(ConfigError, match="the study s began with another charge"):
        study.settle(later, distribution()) if later.charge == "repeat_and_select" else study.left(later)
    assert (study.private / "trials").read_bytes() == before


@pytest.mark.parametrize(
    ("charge", "overrides", "named"),
    [
        ("repeat_and_select", ["tune.trials=1"], "trials"),
        pytest.param("repeat_and_select", ["tune.shape=0"], "shape", marks=pytest.mark.slow),
        ("repeat_and_select", ["noise.noise_multiplier=9"], "noise"),
        pytest.param(
            "composition",
            ["privacy.unit=document", "privacy.rows_per_unit_max=4", "privacy.unit_mode=sample_units"],
            "privacy",
            marks=pytest.mark.slow,
        ),
        pytest.param("composition", ["tune.charge=uncharged"], "charge", marks=pytest.mark.slow),
        ("uncharged", ["tune.charge=composition"], "charge"),
        ("composition", ["privacy.delta=1e-3"], "privacy"),
        ("composition", ["tune.budget.epsilon=1", "tune.budget.order=4", "accountant=rdp"], "budget"),
    ],
)
def test_a_search_that_is_over_is_not_stated_anew_under_another_declaration(
    tmp_path: Path, charge: str, overrides: list[str], named: str
) -> None:
    study, of = Study(tmp_path, "s"), experiment(charge, 3)
    for number in range(3):
        trial(study, of, number, 0.1)
    study.close(search_of(of))
    before = stated(study)
    with pytest.raises(ConfigError, match=f"the study s began with another .*{named}"):
        study.close(search_of(experiment(charge, 3, *overrides)))
    assert stated(study) == before


def test_a_trial_that_nobody_declared_a_space_for_is_refused(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("repeat_and_select", 8)
    with pytest.raises(ConfigError, match="hydra.sweeper.n_trials: the study s has no record of its search space .* Remove it"):
        study.begin(search_of(of), folder_of(study, 0), (DRAWN,), lambda others: {})
    assert study.trials() == []


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ((), "sets no optimizer.weight_decay, which the search draws"),
        (("optimizer.weight_decay=10.5",), "has optimizer.weight_decay=10.5, which is not of the declared space"),
        (("optimizer.weight_decay=-0.1",), "is not of the declared space"),
        (("optimizer.weight_decay=nan",), "is not of the declared space"),
        (("optimizer.weight_decay=null",), "is not of the declared space"),
        ((DRAWN, "optimizer.eps=1"), "began with another optimizer.eps"),
    ],
)
def test_a_trial_that_is_no_draw_of_the_declared_space_is_refused(tmp_path: Path, point: tuple[str, ...], words: str) -> None:
    study, of = Study(tmp_path, "s"), experiment("repeat_and_select", 8)
    study.settle(TUNE, distribution(optimizer={"eps": 0}))

    def compose(others):
        return {"optimizer": {"eps": 1 if "optimizer.eps=1" in others else 0}}

    with pytest.raises(ConfigError, match=words):
        study.begin(search_of(of), folder_of(study, 0), point, compose)
    assert study.trials() == []
    study.begin(search_of(of), folder_of(study, 0), (DRAWN, "optimizer.eps=0"), compose)


@pytest.mark.parametrize("kind", ["int", "choice"])
def test_whole_numbers_and_choices_are_held_against_their_support(kind: str) -> None:
    numbers = {"type": "int", "low": 1, "high": 3, "step": 1, "is_log": False}
    space = {"a": numbers if kind == "int" else {"type": "choice", "values": ["1", "3"]}}
    drawn = TrialDistribution(sampler={}, space=space, fixed={})
    assert drawn.refusal(["a=3", "b=9"]) is None
    assert drawn.refusal(["a=4"]) and drawn.refusal(["a=1.5"]) and drawn.refusal(["b=1"])


def test_the_statement_holds_trials_against_the_space_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = experiment("repeat_and_select", 8)
    whole = _three(Study(tmp_path / "whole", "s"), of)
    assert whole["guarantee"] == "dp" and whole["draws_from"]["space"] == distribution().space
    assert whole["score"] == {
        "name": "mlm_accuracy",
        "of": "the trained parameters",
        "reads": "rows of the held-out split",
        "charged": False,
    }
    assert "the score that chooses among the trials reads them, and they are not protected" in whole["not_covered"][1]
    monkeypatch.setattr("dpx.claim.study.check_draw", lambda *unused: None)
    outside = _three(Study(tmp_path / "outside", "s"), of, last=("optimizer.weight_decay=11",))
    assert outside["guarantee"] == "none" and outside["epsilon"] == {}
    assert outside["reasons"] == ["repeat_and_select: a trial's settings are not a draw from the declared search space"]
    study = Study(tmp_path / "unsettled", "s")
    study.settle(TUNE, distribution())
    _without(study, "draws_from")
    monkeypatch.setattr("dpx.claim.study.Study.settle", lambda *unused: None)
    unsettled = _three(study, of)
    assert unsettled["reasons"] == ["repeat_and_select: what trials are drawn from was not recorded before the first"]


def _three(study: Study, of: Experiment, last: tuple[str, ...] = (DRAWN,)) -> dict:
    trial(study, of, 0, 0.1)
    trial(study, of, 1, 0.3)
    begin(study, of, folder_of(study, 2), last)
    enter(folder_of(study, 2), of, range(STEPS))
    study.end(search_of(of), folder_of(study, 2), "finished", 0.2)
    study.close(search_of(of))
    return stated(study)


def _without(study: Study, kind: str) -> None:
    """Rewrites the record as if no line of that kind had been written."""
    lines = [line for line in Chain(study.private / "trials").lines if line["kind"] != kind]
    (study.private / "trials").unlink()
    rewritten = Chain(study.private / "trials", {"trials": search_record.FORMAT})
    rewritten.append(lines)
    rewritten.close()


@pytest.mark.parametrize("change", [shutil.copytree, shutil.move])
def test_a_copied_or_renamed_trial_is_no_further_draw(tmp_path: Path, change) -> None:
    study, of = Study(tmp_path, "s"), experiment("repeat_and_select", 8)
    change(trial(study, of, 0, 0.1), folder_of(study, 9))
    with pytest.raises(ConfigError, match="is a copy of a trial of the study s, or was renamed"):
        begin(study, of, folder_of(study, 9))
    assert len(study.trials()) == 1


def test_a_copied_trial_of_a_sum_is_charged_as_one_trial_more(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("composition", 2)
    shutil.copytree(trial(study, of, 0, 0.1), folder_of(study, 9))
    begin(study, of, folder_of(study, 9))
    enter(folder_of(study, 9), of, range(STEPS), epoch=1)
    study.end(search_of(of), folder_of(study, 9), "finished", 0.3)
    said = stated(study)
    assert said["trials"]["begun"] == 2 and sum(n for run in said["ledger"]["segments"] for _, n in run["steps"]) == 2 * STEPS
    shutil.copytree(folder_of(study, 0), folder_of(study, 10))
    with pytest.raises(ConfigError, match="has already run all its trials"):
        begin(study, of, folder_of(study, 10))


def test_a_trial_that_was_cut_short_goes_on_before_others_are_drawn(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("repeat_and_select", 8)
    begin(study, of, folder_of(study, 0))
    enter(folder_of(study, 0), of, range(2))
    (folder_of(study, 0) / "release" / "config.yaml").touch()
    with pytest.raises(ConfigError, match="was interrupted, .* Resume it first: python -m dpx job=resume run=.*anil_tune_32k-0"):
        study.settle(TUNE, distribution())
    study.close(search_of(of))
    assert not (folder_of(study, 0) / "release").exists()
    with pytest.raises(ConfigError, match="Resume it first: python -m dpx optimizer.weight_decay=1 hydra.mode=RUN"):
        study.settle(TUNE, distribution())
    begin(study, of, folder_of(study, 0), settles=False)
    enter(folder_of(study, 0), of, range(2, STEPS))
    study.end(search_of(of), folder_of(study, 0), "finished", 0.1)
    study.settle(TUNE, distribution())


def test_a_trial_that_failed_or_left_nothing_keeps_no_other_from_being_drawn(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), experiment("repeat_and_select", 8)
    trial(study, of, 0, None, steps=2)
    begin(study, of, folder_of(study, 1))
    shutil.rmtree(folder_of(study, 1))
    study.settle(TUNE, distribution())


@pytest.mark.parametrize("key", ["noise.epsilon", "batch_schedule.size", "task.masking_rate", "name", "seed", "sampler@sampler", "clip"])
def test_a_repeated_mechanism_is_not_searched_over_what_its_trials_share(key: str) -> None:
    searched = dataclasses.replace(distribution(), space={key: {"type": "float", "low": 0.0, "high": 1.0}})
    with pytest.raises(ConfigError, match="repetitions of one mechanism must have the same value of this setting and the same cost"):
        check_space(searched)
    check_space(distribution())


def test_different_keys_are_named_in_dots() -> None:
    assert different_keys({"a": {"b": 1, "c": [1]}, "d": 2}, {"a": {"b": 2, "c": [1]}}) == ["a.b", "d"]
    assert different_keys({"batch": BATCH}, {"batch": BATCH}) == []


def test_a_number_of_zero_is_no_trial_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpx.privacy.search_accounting.draw", lambda mean, shape: 0)
    study, of = Study(tmp_path, "s"), experiment("repeat_and_select", 8, "tune.shape=.inf")
    assert of.tune is not None
    study.settle(of.tune, distribution())
    assert study.is_empty(of.tune) and study.left(of.tune) == 0 and study.close(search_of(of)) == []
    with pytest.raises(ConfigError, match="has already run all its trials"):
        begin(study, of, folder_of(study, 0))
