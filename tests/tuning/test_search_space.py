"""What a composed config draws its trials from, and how a launch settles it; Optuna itself is run in test_search.py."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from dpx import config
from dpx.claim.claim_checks import _SAMPLER, _SWEEPER
from dpx.claim.study import Study
from dpx.config import recipes
from dpx.declaration import ConfigError
from dpx.launch import late, refused, search
from dpx.packages import conf_directory

RECIPE = ("+experiment=laptop/anil_tune_32k", "hydra/sweeper=basic", "tune.charge=repeat_and_select")


def _root(*command_line: str, params: dict[str, str] | None = None, sweep_dir: Path = Path("outputs")) -> DictConfig:
    """The base config of a launch, as Hydra gives it to a sweeper: single values are in it, distributions are not."""
    single = [one for one in command_line if "(" not in one]
    root = recipes.compose([*RECIPE, *single], with_hydra=True)
    with open_dict(root):
        root.hydra.overrides.task = [*RECIPE[::2], *command_line]
        root.hydra.sweep.dir = str(sweep_dir)
        drawn = dict(root.hydra.sweeper.params) | (params or {})
        root.hydra.sweeper = {"_target_": _SWEEPER, "sampler": {"_target_": _SAMPLER, "seed": None}, "params": drawn}
    return root


@pytest.fixture(scope="module")
def declared() -> Any:
    return search.declared(_root())


def test_every_distribution_of_a_recipe_is_read_with_its_bounds(declared) -> None:
    assert declared.space["clip.clipping_norm"] == {"type": "float", "low": 1e-6, "high": 2.0, "step": None, "is_log": True}
    assert sorted(declared.space) == [
        "clip.clipping_norm",
        "lr_schedule.learning_rate",
        "optimizer.weight_decay",
        "point.one_minus_beta1",
        "point.one_minus_beta2",
    ]
    assert declared.sampler == {"_target_": _SWEEPER, "sampler": {"_target_": _SAMPLER, "seed": None}}


@pytest.mark.parametrize(
    ("text", "distribution"),
    [
        ("interval(0, 3)", {"type": "float", "low": 0, "high": 3, "step": None, "is_log": False}),
        ("int(interval(0, 3))", {"type": "int", "low": 0, "high": 3, "step": None, "is_log": False}),
        ("tag(log, interval(1e-3, 1))", {"type": "float", "low": 1e-3, "high": 1, "step": None, "is_log": True}),
        ("range(1, 9, step=2)", {"type": "int", "low": 1, "high": 9, "step": 2, "is_log": False}),
        ("range(0.5, 2, step=0.5)", {"type": "float", "low": 0.5, "high": 2, "step": 0.5, "is_log": False}),
        ("choice(0.1, 0.2)", {"type": "choice", "values": ["0.1", "0.2"]}),
        ("0.1,0.2", {"type": "choice", "values": ["0.1", "0.2"]}),
    ],
)
def test_the_command_line_changes_the_space_as_it_does_in_the_sweeper(declared, text: str, distribution: dict) -> None:
    root = _root()
    with open_dict(root):
        root.hydra.overrides.task.append(f"optimizer.weight_decay={text}")
    changed = search.declared(root)
    assert changed.space["optimizer.weight_decay"] == distribution
    assert changed.differing(declared) == ["hydra.sweeper.params.optimizer.weight_decay"]


def test_a_single_value_of_the_command_line_leaves_the_space_and_is_fixed(declared) -> None:
    changed = search.declared(_root("optimizer.weight_decay=0.3"))
    assert "optimizer.weight_decay" not in changed.space
    assert declared.differing(changed) == ["hydra.sweeper.params.optimizer.weight_decay", "optimizer.weight_decay"]


@pytest.mark.parametrize("override", ["lr_schedule.warmup_steps=5", "schedule.evaluation_rows=9", "steps=10", "clip=normalised", "seed=1"])
def test_any_other_value_that_decides_a_trial_or_its_score_differs(declared, override: str) -> None:
    differing = declared.differing(search.declared(_root(override)))
    assert differing and all(one.startswith(override.partition("=")[0]) for one in differing)


def test_how_it_is_computed_and_how_often_it_is_saved_do_not_differ(declared) -> None:
    assert declared.differing(search.declared(_root("microbatch=8", "schedule.checkpoint_every=10", "replicate=1"))) == []


def test_what_a_trials_own_overrides_fix_is_what_its_launch_fixed(declared) -> None:
    drawn = [f"{key}=0.2" for key in declared.space if key != "clip.clipping_norm"]
    point = [*RECIPE[::2], "hydra/sweeper=basic", "clip.clipping_norm=1.5", *drawn]
    assert declared.refusal(point) == "has lr_schedule.learning_rate=0.2, which is not of the declared space"
    assert search.composed(declared.others(point)) == declared.fixed
    other = [*declared.others(point), "steps=10"]
    assert search.composed(other) != declared.fixed


def test_a_trials_own_overrides_lead_to_its_folder_with_and_without_its_search() -> None:
    """So a trial that cannot be resumed by its released config goes on by its point (`Study.settle`)."""
    point = [*RECIPE[:2], "optimizer.weight_decay=0.2", "clip.clipping_norm=1.5"]
    searched, alone = recipes.compose([*point, "tune.charge=repeat_and_select"]), recipes.compose([*point, "~tune"])
    assert config.run_name(searched) == config.run_name(alone)
    assert config.build(alone)[0].tune is None, "as the refusal of a search that is not a sweep says"


def test_no_optuna_study_is_stored_where_trials_are_drawn_anew(tmp_path: Path) -> None:
    late.register_resolvers()
    for charge, stored in (("composition", True), ("uncharged", True), ("repeat_and_select", False)):
        root = OmegaConf.create(
            {"name": "s", "tune": {"charge": charge}, "hydra": {"sweep": {"dir": str(tmp_path)}}, "storage": "${search_storage:}"}
        )
        assert (root.storage == f"sqlite:///{tmp_path}/studies/s/private/optuna.db") is stored and (root.storage is None) is not stored


def test_the_launch_settles_everything_and_a_later_one_that_differs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpx.privacy.search_accounting.draw", lambda mean, shape: 4)
    root = _root(sweep_dir=tmp_path)
    assert search.trials_left(root) == 4
    before = (tmp_path / "studies" / root.name / "private" / "trials").read_bytes()
    assert b"draws_from" in before and b'"number": 4' in before
    with pytest.raises(ConfigError, match="tune.trials=7, tune.shape=1.0: the number of trials of the study .* was already drawn"):
        search.trials_left(_root("tune.trials=7", sweep_dir=tmp_path))
    with pytest.raises(
        ConfigError, match="hydra.sweeper.params.batch_schedule.size: repetitions of one mechanism must have the same value of this setting"
    ):
        search.trials_left(_root(params={"batch_schedule.size": "choice(16, 32)"}, sweep_dir=tmp_path))
    with pytest.raises(ConfigError, match="sampler.seed=3"):
        changed = _root(sweep_dir=tmp_path)
        changed.hydra.sweeper.sampler.seed = 3
        search.trials_left(changed)
    assert (tmp_path / "studies" / root.name / "private" / "trials").read_bytes() == before


def test_a_launch_that_gives_its_own_number_of_trials_is_refused() -> None:
    """It would not be held against the first launch, and could draw from a part of the declared space."""
    option = OmegaConf.load(conf_directory() / "hydra" / "sweeper" / "search.yaml")
    root = OmegaConf.create({"hydra": {"sweeper": option}, "name": "s"})
    search.require_settled(root.hydra.sweeper)
    root.hydra.sweeper.n_trials = 3
    with pytest.raises(ConfigError, match="hydra.sweeper.n_trials=3: the number of trials and their search space must be fixed together"):
        search.require_settled(root.hydra.sweeper)


def test_a_plan_of_a_search_settles_and_stores_nothing(tmp_path: Path) -> None:
    late.register_resolvers()
    for trials in (8, 9):
        root = _root(f"tune.trials={trials}", "job=plan", sweep_dir=tmp_path)
        assert search.trials_left(root) == trials and search.search_storage(root) is None
    assert not (tmp_path / "studies").exists()


def test_a_search_that_has_had_all_its_trials_ends_before_a_sweeper_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpx.privacy.search_accounting.draw", lambda mean, shape: 0)
    with pytest.raises(refused.NothingLeft) as ended:
        search.trials_left(_root("tune.shape=.inf", sweep_dir=tmp_path))
    assert ended.value.config.name == "laptop_anil_tune_32k" and not isinstance(ended.value, Exception)
    assert Study(tmp_path, "laptop_anil_tune_32k").trials() == []
