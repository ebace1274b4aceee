"""Trials that differ in what they cost: only within a budget that was declared before the first, and that is what is stated."""

from pathlib import Path

import pytest

from dpx.claim.claim_checks import check_charge
from dpx.claim.study import Study
from dpx.config.declared_tuning import Budget, Tune
from dpx.declaration import ConfigError
from dpx.launch.search import search_of
from dpx.privacy.events import Release
from dpx.privacy.search_accounting import renyi, renyi_limit
from tests.tuning.made_up import STEPS, begin, enter, experiment, folder_of, stated, trial

BUDGET = ("tune.budget.epsilon=0.9", "tune.budget.order=16")


def _adaptive(*overrides: str, trials: int = 9):
    return experiment("composition", trials, *BUDGET, *overrides)


@pytest.mark.parametrize(
    "override",
    ["batch_schedule.size=50", "noise.noise_multiplier=5", "steps=6", "clip=quantile", "telemetry=released"],
)
def test_trials_of_another_cost_are_refused_without_a_budget(tmp_path: Path, override: str) -> None:
    study = Study(tmp_path, "s")
    begin(study, experiment("composition"), tmp_path / "a")
    other = experiment("composition", 3, override)
    with pytest.raises(ConfigError, match="has another cost than the trials before it") as refused:
        begin(study, other, tmp_path / "b", ("optimizer.weight_decay=0.2", override))
    assert str(refused.value).startswith(f"{override}: ") and "\n" not in str(refused.value)
    assert len(study.trials()) == 1 and not (tmp_path / "b").exists(), "nothing of it has begun"
    begin(study, experiment("composition", 3, "clip.clipping_norm=0.5", "lr_schedule.learning_rate=1"), tmp_path / "c")


def test_the_line_names_an_accountant_that_is_never_proved(tmp_path: Path) -> None:
    study = Study(tmp_path, "s")
    begin(study, experiment("composition", 3, "accountant=pld"), tmp_path / "a")
    with pytest.raises(ConfigError, match="and never with accountant=pld"):
        begin(study, experiment("composition", 3, "accountant=pld", "steps=6"), tmp_path / "b", ("steps=6",))


def test_a_budget_is_refused_under_pld(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"accountant=pld with tune.budget: .*Use accountant=rdp"):
        begin(Study(tmp_path, "s"), _adaptive("accountant=pld"), tmp_path / "a")
    assert Study(tmp_path, "s").trials() == []


def test_within_a_budget_trials_may_differ_and_the_budget_is_stated(tmp_path: Path) -> None:
    study = Study(tmp_path, "s")
    trial(study, _adaptive(), 1, 0.1)
    trial(study, _adaptive("batch_schedule.size=50"), 2, 0.3)
    trial(study, _adaptive("noise.noise_multiplier=8", "steps=7", trials=20), 3, 0.2)
    said = stated(study)
    assert said["guarantee"] == "dp" and said["epsilon"] == {"rdp": 0.9}, "the budget, not the sum"
    assert said["budget"] == {"kind": "renyi", "epsilon": 0.9, "order": 16.0, "limit": renyi_limit(0.9, 1e-4, 16.0)}
    assert said["spent"] is None and said["trials"]["begun"] == 3


def test_a_trial_beyond_the_budget_is_refused_before_it_begins(tmp_path: Path) -> None:
    one = renyi([(Release(noise_multiplier=4.0, sampling_probability=0.1), STEPS)], 16, "zero_out")
    fitting = int(renyi_limit(0.9, 1e-4, 16.0) / one)
    study = Study(tmp_path, "s")
    trial(study, _adaptive(), 0, None, steps=1)
    costly = _adaptive("steps=500")
    with pytest.raises(ConfigError, match=r"tune.budget.epsilon=0.9: the trial costs .* are spent"):
        begin(study, costly, folder_of(study, 99), ("steps=500",))
    assert len(study.trials()) == 1 and not folder_of(study, 99).exists()
    assert fitting > 2, "one that failed after a step has cost its plan, and others still fit"
    trial(study, _adaptive(), 1, 0.2)


def test_where_no_trial_fits_the_line_names_an_order_at_which_some_do_and_it_may_still_be_declared(tmp_path: Path) -> None:
    study, noisy = Study(tmp_path, "s"), ("steps=100", "tune.budget.epsilon=2.5")
    with pytest.raises(ConfigError, match=r"Declare tune.budget.order=6, which allows 6 such trials"):
        begin(study, experiment("composition", 9, *noisy, "tune.budget.order=64"), tmp_path / "a")
    begin(study, experiment("composition", 9, *noisy, "tune.budget.order=6"), tmp_path / "a")
    assert len(study.trials()) == 1


def test_restarts_that_break_the_budget_take_the_guarantee_away(tmp_path: Path) -> None:
    study, of = Study(tmp_path, "s"), _adaptive("steps=40")
    folder = trial(study, of, 1, 0.1)
    assert stated(study)["guarantee"] == "dp"
    for epoch in range(1, 4):
        enter(folder, of, range(40), epoch=epoch)
    study.close(search_of(of))
    said = stated(study)
    assert said["guarantee"] == "none" and "cost more than the budget" in said["reasons"][0] and said["epsilon"] == {}
    with pytest.raises(ConfigError, match=r"are spent"):
        begin(study, _adaptive(), folder_of(study, 2))


def test_a_budget_comes_before_the_first_trial(tmp_path: Path) -> None:
    study = Study(tmp_path, "s")
    begin(study, experiment("composition"), tmp_path / "a")
    with pytest.raises(ConfigError, match="began with another budget"):
        begin(study, _adaptive(), tmp_path / "b")


def test_zcdp_adds_up_passes_over_everyone(tmp_path: Path) -> None:
    study, sampler = Study(tmp_path, "s"), "sampler=deterministic"
    budget = ("tune.budget.kind=zcdp", "tune.budget.epsilon=9", sampler)
    trial(study, experiment("composition", 3, *budget), 1, 0.1)
    trial(study, experiment("composition", 3, *budget, "noise.noise_multiplier=6"), 2, 0.1)
    assert stated(study)["epsilon"] == {"zcdp": 9.0} and stated(study)["guarantee"] == "dp"
    with pytest.raises(ConfigError, match="tune.budget.kind=zcdp, sampler=poisson"):
        begin(study, experiment("composition", 3, *budget[:2]), folder_of(study, 3))


@pytest.mark.parametrize(
    "key", ["batch_schedule.size", "noise.epsilon", "steps", "+telemetry", "clip", "clip.count_noise_multiplier", "privacy.delta", "data"]
)
def test_a_sweeper_that_varies_the_cost_is_refused_at_launch(key: str) -> None:
    sweeper = {"params": {"lr_schedule.learning_rate": "interval(0, 1)", key: "choice(1, 2)"}}
    with pytest.raises(ConfigError, match=r"hydra.sweeper.params.*only under a budget"):
        check_charge(sweeper, Tune(charge="composition"))
    check_charge(sweeper, Tune(charge="composition", budget=Budget(epsilon=8.0, order=16.0)))
    check_charge(sweeper, Tune(charge="uncharged"))
    check_charge({"params": {"clip.clipping_norm": "interval(0, 1)", "optimizer.eps": "1"}}, Tune(charge="composition"))


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ({"epsilon": 8.0}, "tune.budget.order=None"),
        ({"epsilon": 8.0, "order": 1.0}, "tune.budget.order=1.0"),
        ({"epsilon": 0.0, "order": 16.0}, "tune.budget.epsilon=0.0"),
        ({"order": 16.0}, "tune.budget: has no epsilon"),
        ({"kind": "zcdp", "epsilon": 8.0, "order": 16.0}, "a zCDP budget is valid at every order"),
    ],
)
def test_half_a_budget_is_none(budget: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Budget(**budget)


def test_a_budget_is_held_by_adding_up() -> None:
    with pytest.raises(ConfigError, match="with tune.charge=repeat_and_select"):
        Tune(charge="repeat_and_select", budget=Budget(epsilon=8.0, order=16.0))
