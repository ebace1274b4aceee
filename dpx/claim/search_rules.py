"""What a search may vary under each charge: checked at launch against the sweeper's settings, and reliably when a trial begins.

The parts of an experiment that decide how the trials of its search are charged.
"""

import dataclasses
from pathlib import Path
from typing import Any

from dpx.claim.caveats import of_table
from dpx.claim.search_record import Compose, Record, TrialDistribution, different_keys, note_in
from dpx.config.declared_tuning import Tune
from dpx.config.experiment import Experiment
from dpx.declaration import ConfigError, require
from dpx.privacy.declared_privacy import Accountant, Privacy
from dpx.privacy.segments import Segments
from dpx.statement import outside_code


@dataclasses.dataclass(frozen=True)
class Search:
    """Holds what a search needs of the experiment that declares it.

    `by` are the external packages that a trial trusts. `score` names what is compared, and `uncovered` the rows that it may read in
    addition to the protected ones. `declared` is the whole experiment as plain data, with its external classes by config key, if any: two
    classes may hold the same values."""

    tune: Tune
    privacy: Privacy
    accountant: Accountant
    is_private: bool
    by: tuple[str, ...]
    score: str
    uncovered: tuple[str, ...]
    declared: dict[str, Any]

    @classmethod
    def from_experiment(cls, experiment: Experiment) -> "Search":
        """Returns the search of an experiment that declares one."""
        assert experiment.tune is not None
        classes = {part.key: part.kind for part in outside_code.parts(experiment)}
        return cls(
            experiment.tune,
            experiment.privacy,
            experiment.accountant,
            experiment.is_private,
            outside_code.packages_of(experiment),
            experiment.task.metric,
            tuple(of_table(experiment.data)),
            dataclasses.asdict(experiment) | ({"outside_code": classes} if classes else {}),
        )


# Settings that change the cost of a step, whatever their value, with all settings below them.
ACCOUNTED = ("batch_schedule", "sampler", "noise", "steps", "mechanism", "telemetry", "data", "privacy", "accountant", "audit")
ACCOUNTED_ALONE = ("clip", "clip.count_noise_multiplier")
# Other settings that all trials of a study share, or that would move a trial to another study.
_SHARED = ("task", "tune", "name", "seed", "replicate", "init", "fork", "run", "job", "schedule")
# The only sweeper and the only sampler whose draws are known to be independent of each other and of every result.
_SWEEPER, _SAMPLER = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper", "optuna.samplers.RandomSampler"
_NOT_INDEPENDENT = (
    "its proof needs independent random trials, but these trials depend on each other, come from a list, or are drawn by unknown code"
)
_ONE_BUDGET = "trials of different cost that are chosen after results compose only under a budget declared before the first trial"
_ORDERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
_DECLARE = (
    "Declare tune.budget.epsilon and tune.budget.order before the first trial, in a study of another name, or search over settings that "
    "do not change the cost"
)


def is_accounted(setting: str) -> bool:
    """Returns whether another value of `setting`, as a sweeper writes it, changes the input of an accountant."""
    name = setting.lstrip("+~").partition("=")[0].replace("/", ".")
    return name in ACCOUNTED_ALONE or name.partition(".")[0].partition("@")[0] in ACCOUNTED


def check_charge(sweeper: Any, tune: Tune) -> None:
    """Raises `ConfigError` if the charge is not proved for the trials of `sweeper`."""
    varied = [str(key) for key in (sweeper.get("params") or {}) if is_accounted(str(key))]
    if tune.charge == "composition":
        require(
            not varied or tune.budget.is_declared,
            f"hydra.sweeper.params.{next(iter(varied), '')}",
            _ONE_BUDGET,
            _DECLARE,
        )
    if tune.charge != "repeat_and_select":
        return
    # Trials must be independent draws of one distribution.
    sampler = sweeper.get("sampler") or {}
    for name, known in ((str(sampler.get("_target_", sweeper.get("_target_"))), _SAMPLER), (str(sweeper.get("_target_")), _SWEEPER)):
        kind = name.rpartition(".")[2]
        require(
            name == known,
            f"tune.charge=repeat_and_select with {kind if kind != known.rpartition('.')[2] else name}",
            _NOT_INDEPENDENT,
            "Add hydra/sweeper=search hydra/sweeper/sampler=random, or use tune.charge=composition",
        )
    settings = {f"sampler.{key}": value for key, value in sampler.items() if key != "_target_"}
    settings |= {key: sweeper.get(key) for key in ("storage", "search_space", "custom_search_space")}
    for key, value in settings.items():
        require(
            value is None,
            f"hydra.sweeper.{key}={value}",
            "dpx draws trials only from hydra.sweeper.params: not with a known seed, not from a stored study, not by other code",
            "Remove it",
        )


def check_space(distribution: TrialDistribution) -> None:
    """Raises `ConfigError` for a `repeat_and_select` over a setting that all its trials must share."""
    for key in distribution.space:
        require(
            not is_accounted(key) and key.partition(".")[0].partition("@")[0] not in _SHARED,
            f"hydra.sweeper.params.{key}",
            "repetitions of one mechanism must have the same value of this setting and the same cost",
            "Search over settings that do not change the cost",
        )


def check_draw(record: Record, folder: Path, point: tuple[str, ...], compose: Compose) -> None:
    """Raises `ConfigError` for a new trial of a `repeat_and_select` that is not a draw from the distribution fixed before the first
    trial."""
    name, distribution = record.path.name, record.distribution
    copied = note_in(folder)
    require(
        copied is None,
        folder,
        f"is a copy of a trial of the study {copied and copied.study}, or was renamed, but trials must be drawn independently",
        "Resume the trial itself, or restore its folder's name",
    )
    if distribution is None or record.drawn is None:
        reason = f"the study {name} has no record of its search space and of a number of trials"
        raise ConfigError("hydra.sweeper.n_trials", reason, "Remove it: both are fixed when the search is launched")
    refusal = distribution.refusal(point)
    require(refusal is None, " ".join(point) or str(folder), f"a trial of the study {name} {refusal}", "Let the search draw its trials")
    differing = different_keys(distribution.fixed, compose(distribution.others(point)))
    require(not differing, differing[0] if differing else "", *differs(name, differing))


def differs(study: str, names: list[str]) -> tuple[str, str]:
    """Returns reason and fix for a launch that differs in `names` from what the study began with."""
    return f"the study {study} began with another {', '.join(names)}", "Give this study another name"


def check_fork(fork: Any, tune: Tune) -> None:
    """Raises `ConfigError` for trials of a charged search that are forks of another run: the cost of that run is in no trial's plan."""
    require(
        fork is None or tune.charge == "uncharged",
        f"fork={fork} with tune.charge={tune.charge}",
        "the plans of the trials do not include the cost of the forked run",
        "Remove the fork, or use tune.charge=uncharged",
    )


def check_init(init: Any, tune: Tune) -> None:
    """Raises `ConfigError` for trials of a charged search that begin from trained weights: the cost of these is in no trial's plan."""
    require(
        init.is_random or tune.charge == "uncharged",
        f"init={init.kind} with tune.charge={tune.charge}",
        "the plans of the trials do not include the cost of the starting weights",
        "Use init=random, or tune.charge=uncharged",
    )


def filter_of(search: Search) -> Any:
    """Returns the declared budget as a `dpx.privacy.search_accounting.Filter`, `None` without a declared budget; raises `ConfigError` for
    a budget that cannot be enforced."""
    budget = search.tune.budget
    if budget.epsilon is None or not search.is_private:
        return None
    require(
        search.accountant.name == "rdp",
        f"accountant={search.accountant.name} with tune.budget",
        "a budget that stops a search is proved only for Renyi divergences at one order and for zCDP",
        "Use accountant=rdp",
    )
    from dpx.privacy.search_accounting import Filter

    privacy = search.privacy
    return Filter(budget.kind, budget.epsilon, privacy.delta, budget.order, privacy.adjacency)


def check_plan(search: Search, record: Record, plan: Segments | None, point: tuple[str, ...]) -> None:
    """Raises `ConfigError`, before anything of a new trial is drawn, if the charge was not declared for its plan."""
    from dpx.claim import trial_charges
    from dpx.privacy.search_accounting import renyi, renyi_limit

    tune = search.tune
    if tune.charge == "uncharged" or plan is None:
        return
    budget = filter_of(search)
    if budget is None:
        known = next((list(trial.plan) for trial in record.trials if trial.plan is not None), plan)
        value = " ".join(part for part in point if is_accounted(part)) or f"tune.charge={tune.charge}"
        reason, fix = "repetitions of one mechanism must have the same cost", "Give this search a study of another name"
        if tune.charge != "repeat_and_select":
            only_rdp = "" if search.accountant.name == "rdp" else f", and never with accountant={search.accountant.name}"
            reason, fix = f"{_ONE_BUDGET}{only_rdp}", _DECLARE
        require(trial_charges.same(plan, known), value, f"has another cost than the trials before it: {reason}", fix)
        return
    begun = trial_charges.charges(*(trial_charges.cost_of(trial, record).segments for trial in record.trials))
    new = trial_charges.charges(trial_charges.union(plan, [], "new"))
    if budget.holds(begun + new):
        return
    fix = "End the search here, or make trials cheaper (more noise, fewer steps)"
    if not record.trials:
        fix = "Declare a larger budget, or make trials cheaper (more noise, fewer steps)"
        fitting = {}
        if budget.kind != "zcdp":
            # No result has been seen yet, so an order may still be chosen by the plan of the first trial.
            fitting = {one: renyi_limit(budget.epsilon, budget.delta, one) / renyi(new, one, budget.adjacency) for one in _ORDERS}
        best = max(fitting, key=lambda one: fitting[one], default=0)
        if fitting.get(best, 0) >= 1:
            fix = f"Declare tune.budget.order={best}, which allows {int(fitting[best])} such trials"
    costs, spent = budget.cost(new), budget.cost(begun)
    reason = f"the trial costs {costs:.4g} and {spent:.4g} of {budget.limit:.4g} are spent"
    raise ConfigError(f"tune.budget.epsilon={budget.epsilon}", reason, fix)
