"""What a claim refuses: declarations that no proof covers together, and what a search may vary under its charge.

The cross-checks of a run's claim (`check_claim`), tried once N is known, and those of a search, tried at launch against the sweeper's
settings and again when a trial begins.
"""

from typing import Any

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from dpx import packages
from dpx.claim.search_record import TrialDistribution
from dpx.config.declared_init import Init
from dpx.config.declared_tuning import Tune
from dpx.config.experiment_parts import Claim
from dpx.data.declared_data import Data
from dpx.declaration import require
from dpx.mechanism import declared_mechanism
from dpx.mechanism.declared_mechanism import TargetClt, TargetCopy, TargetEpsilon
from dpx.mechanism.mechanism_protocol import ForwardNoise, Mechanism
from dpx.privacy import events
from dpx.privacy.declared_privacy import Accountant, GdpClt
from dpx.sampler import Sampler, batch_schedule
from dpx.statement import outside_code


def check_claim(claim: Claim, size: int) -> int:
    """Returns the public N of the claim: `data.declared_size`, or else `size`, plus the number of places for an audit's canaries.

    It tries all checks of a private claim, in this order, and raises `ConfigError` for a size, a delta, a neighbouring relation or batch
    sizes that are not valid, and for declarations that no proof covers together.
    """
    privacy, declared, sampler = claim.privacy, claim.data.declared_size, claim.sampler
    require(
        privacy.adjacency != "add_remove" or declared is not None,
        "privacy.adjacency=add_remove",
        f"this relation protects the number of {privacy.drawn}s, so the run cannot use the counted number",
        "Set data.declared_size to a public number, or use privacy.adjacency=zero_out",
    )
    # Under add_remove N is protected: a refusal that depends on it would reveal something about it.
    counted = declared if privacy.adjacency == "add_remove" and declared else size
    size = declared or size
    require(size > 0, "data", f"the data has no protected {privacy.drawn}", "Add text")
    _require_size_of_text(claim.data, sampler, privacy.drawn, counted)
    require(
        privacy.delta < 1 / counted or privacy.allow_large_delta,
        f"privacy.delta={privacy.delta}",
        f"not below 1/N = {1 / counted:.3g}: releasing one unit outright would pass",
        "Use a smaller delta, or privacy.allow_large_delta=true, which the statement lists",
    )
    require(
        privacy.adjacency != "replace_one" or privacy.unit_mode != "group" or privacy.rows_per_unit_max == 1,
        f"privacy.rows_per_unit_max={privacy.rows_per_unit_max}",
        "dpx has no accounting under replace_one for units of several rows that are drawn row by row",
        "Use privacy.adjacency=zero_out, or privacy.unit_mode=sample_units",
    )
    size += claim.audit.places(privacy)
    sampler.check(privacy, claim.accountant)
    claim.mechanism.check(claim)
    declared_mechanism.check(claim.mechanism, claim)
    require_own_word(claim.mechanism, "ledger_fields")
    require_own_word(sampler, "ledger_fields", "event")
    limit, batch_stages = sampler.largest_batch(size), batch_schedule.stages(claim.batch_schedule, claim.steps)
    for batch, _ in batch_stages:
        require(
            batch <= limit,
            f"batch size {batch}",
            f"a step draws from {limit} {privacy.drawn}s, so the sampling probability q would exceed 1",
            claim.batch_schedule.at_most.format(limit=limit),
        )
    require(
        not sampler.needs_one_batch_size or len({batch for batch, _ in batch_stages}) == 1,
        f"sampler={sampler.name}",
        "this sampler needs the same batch size at every step",
        "Use batch_schedule=constant",
    )
    mechanism = claim.mechanism
    require(
        sampler.covers_packages or outside_code.package_of(type(mechanism)) == packages.OWN,
        f"sampler={sampler.name}, mechanism={mechanism.name}",
        "the bound of this sampler is proved for dpx's own Gaussian noise on a sum",
        "Use sampler=poisson, or mechanism=dp_sgd",
    )
    _require_noise(claim, size, batch_stages[0][0])
    return size


def _require_noise(claim: Claim, size: int, batch: int) -> None:
    """Raises `ConfigError` where the declared noise is not for this mechanism or data, or cannot be found for this event or accountant."""
    mechanism, noise, privacy = claim.mechanism, claim.noise, claim.privacy
    require(
        not isinstance(noise, TargetClt) or isinstance(mechanism, ForwardNoise),
        f"noise=target_clt with mechanism={mechanism.name}",
        "an approximation that can under-report is the calibration of mechanism=dp_fp alone",
        "Use noise=target_epsilon",
    )
    require(
        not isinstance(noise, TargetCopy) or (claim.data.copies > 1 and privacy.unit_mode == "group"),
        "noise=target_copy",
        "a unit has no other rows with the same text that are drawn one by one",
        "Use noise=target_epsilon",
    )
    if isinstance(noise, TargetEpsilon | TargetCopy):
        require(
            event_of_step(mechanism, claim.sampler, privacy.adjacency, 1.0, size, batch) is None,
            f"noise={noise.kind}",
            "dpx cannot compute the noise from epsilon when a package defines the event",
            "Use noise=multiplier",
        )
        require(
            not isinstance(claim.accountant, GdpClt),
            "accountant=gdp_clt",
            "is an approximation that can underestimate epsilon, so it cannot set the noise",
            "Use accountant=pld, or noise=multiplier",
        )


# A declared number of rows further from the counted one than this share of it needs `data.allow_other_size`.
_OTHER_SIZE = 0.02


def _require_size_of_text(data: Data, sampler: Sampler, drawn: str, counted: int) -> None:
    """Raises `ConfigError` for a declared N that the text does not give, where N is public.

    Fixed-size samplers are accounted at the number that they draw from, so both must be equal. Poisson draws are private at any N, but a
    step draws more or fewer rows than the batch size says.
    """
    declared = data.declared_size or counted
    value = f"data.declared_size={declared}"
    require(
        counted == declared or not sampler.depends_on_size,
        value,
        f"sampler={sampler.name} draws from exactly the number of {drawn}s that it is accounted at, and the text gives {counted}",
        "Use data.declared_size=null",
    )
    require(
        abs(counted - declared) <= _OTHER_SIZE * declared or data.allow_other_size,
        value,
        f"the text gives {counted} {drawn}s, so a step draws {counted / declared:.4g} times the batch size",
        "Use data.declared_size=null, or data.allow_other_size=true to draw so",
    )


def require_own_word(part: Mechanism | Sampler, *methods: str) -> None:
    """Raises `ConfigError` for a mechanism or a sampler of another package that defines none of `methods` itself.

    With an inherited method its steps would be charged for a different draw or different noise.
    """
    kinds = [kind for kind in type(part).__mro__ if outside_code.package_of(kind) != packages.OWN]
    require(
        outside_code.package_of(type(part)) == packages.OWN or any(method in vars(kind) for kind in kinds for method in methods),
        f"{type(part).__module__}.{type(part).__qualname__}",
        f"does not state the privacy cost of its steps: it does not define {' or '.join(methods)}",
        f"Define {methods[0]}(), or event() if no event in dpx's table describes it (dpx/docs/extending.md)",
    )


def event_of_step(mechanism: Mechanism, sampler: Sampler, adjacency: str, noise_multiplier: float, size: int, batch: int) -> str | None:
    """Returns the event of a whole step as text, if the mechanism or the sampler defines one; `None` if the table of events has it."""
    noisy = mechanism.event(noise_multiplier, adjacency)
    sampled = sampler.event(noisy or GaussianDpEvent(noise_multiplier), size, batch, adjacency)
    if sampled is None and noisy is not None:
        # The event of a mechanism under a sampler of the table of events is known only for independent draws.
        released = sampler.ledger_fields(size, batch)
        require(
            released["sampler"] == "poisson" and adjacency != "replace_one",
            f"mechanism={mechanism.name}, sampler={sampler.name}, adjacency={adjacency}",
            f"dpx has no event for the noise of {mechanism.name} under this sampler and relation",
            "Use sampler=poisson and privacy.adjacency=zero_out",
        )
        sampled = PoissonSampledDpEvent(released["q"], noisy) if released["q"] < 1 else noisy
    return None if sampled is None else events.as_text(sampled, adjacency)


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
ONE_BUDGET = "trials of different cost that are chosen after results compose only under a budget declared before the first trial"
DECLARE = (
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
            ONE_BUDGET,
            DECLARE,
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


def check_start(fork: str | None, init: Init, tune: Tune) -> None:
    """Raises `ConfigError` for trials of a charged search that are forks or begin from trained weights: their plans lack its cost."""
    for is_met, value, of_what, fix in (
        (fork is None, f"fork={fork}", "forked run", "Remove the fork"),
        (init.is_random, f"init={init.kind}", "starting weights", "Use init=random"),
    ):
        require(
            is_met or tune.charge == "uncharged",
            f"{value} with tune.charge={tune.charge}",
            f"the plans of the trials do not include the cost of the {of_what}",
            f"{fix}, or use tune.charge=uncharged",
        )


def check_budget(accountant: Accountant) -> None:
    """Raises `ConfigError` for a search with a budget under an accountant that cannot enforce one."""
    require(
        accountant.name == "rdp",
        f"accountant={accountant.name} with tune.budget",
        "a budget that stops a search is proved only for Renyi divergences at one order and for zCDP",
        "Use accountant=rdp",
    )
