"""The cost of a trial: its plan from the moment it begins, and everything in its ledger beyond the plan.

So a study takes only new trials that are draws from the distribution that was fixed, of a cost that the charge was declared for.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dpx.claim.claim_checks import DECLARE, ONE_BUDGET, check_budget, is_accounted
from dpx.claim.search_record import Compose, HeldLedger, Record, Trial, different_keys, note_in
from dpx.config.declared_tuning import Tune
from dpx.declaration import ConfigError, require
from dpx.privacy import ledger
from dpx.privacy.accounting import Charges
from dpx.privacy.declared_privacy import Accountant, Privacy, UnitFacts
from dpx.privacy.ledger import Ledger
from dpx.privacy.segments import Segments, join, left
from dpx.statement import agreement

# Two steps that agree in all other fields have the same cost.
_NO_COST = ("origin", "epoch", "epoch_name", "clipping_norm", "by")
# Renyi orders that are proposed for a budget.
_ORDERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Search:
    """Holds what a search needs of the experiment that declares it.

    `by` are the external packages that a trial trusts. `score` names what is compared, and `uncovered` the rows that it may read in
    addition to the protected ones. `declared` is the whole experiment as plain data, with its external classes by config key, if any: two
    classes may hold the same values. `planned` returns everything that a trial will be charged for, `None` without privacy; it raises
    `ConfigError` for a trial that cannot run. `given_protected` names who is given metrics of a trial without noise."""

    tune: Tune
    privacy: Privacy
    accountant: Accountant
    is_private: bool
    by: tuple[str, ...]
    score: str
    uncovered: tuple[str, ...]
    declared: dict[str, Any]
    planned: Callable[[], Segments | None]
    given_protected: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Cost:
    """Holds what one trial is charged, in `segments`.

    `entered` is the part that a ledger held, `planned` the whole plan, `None` if it is unknown.

    `lost` says that the ledger is missing; `disagrees` says why the existing ledger is not reliable. `units` are the records of
    what the steps in a ledger protect (`dpx.privacy.declared_privacy`), `None` for steps whose units were not noted.
    """

    segments: Segments
    entered: Segments
    plan: Segments | None
    lost: bool = False
    disagrees: str | None = None
    units: Sequence[UnitFacts | None] = ()


def cost_of(trial: Trial, record: Record) -> Cost:
    """Returns the cost of `trial`: its plan, and everything that its ledger holds or is known to have held; its folder need not exist."""
    entered, units, lost, disagrees = list(trial.held.entered), list(trial.held.units), True, None
    if record.newest_in(trial.folder) == trial and (record.outputs / trial.folder / agreement.LEDGER).is_file():
        held, of_held, disagrees = _believed(record.outputs / trial.folder, trial)
        entered, units, lost = join(entered, held), [*units, *of_held], False
    plan = None if trial.plan is None else list(trial.plan)
    return Cost(union(plan or [], entered, f"planned/{trial.number}"), entered, plan, lost, disagrees, distinct(units))


def held(trial: Trial, record: Record) -> HeldLedger:
    """Returns what the record notes about `trial`'s ledger when the trial ends: everything it ever held, and its last line."""
    path, before = record.outputs / trial.folder / agreement.LEDGER, trial.held
    try:
        entered = Ledger(path) if path.is_file() else None
    except ConfigError:
        entered = None
    if entered is None:
        return before
    return HeldLedger(
        entered=tuple(join(before.entered, entered.segments())),
        # A ledger that ends before the mark noted earlier has lost lines: the older mark is kept, to show that.
        mark=before.mark if before.mark and entered.missing(before.mark) else entered.mark,
        units=tuple(distinct([*before.units, *_units(entered)])),
    )


def distinct(units: Iterable[UnitFacts | None]) -> list[UnitFacts | None]:
    """Returns each record once, in the order noted."""
    found: list[UnitFacts | None] = []
    for one in units:
        if one not in found:
            found.append(one)
    return found


def _units(entered: Ledger) -> list[UnitFacts | None]:
    """Returns what the steps of a ledger protect."""
    return list(entered.units or ([None] if entered.segments() else []))


def _believed(folder: Path, trial: Trial) -> tuple[Segments, list[UnitFacts | None], str | None]:
    """Returns the charges in the ledger in `folder`, what its steps protect, and the reason why it cannot be complete, if any."""
    segments: Segments = []
    units: list[UnitFacts | None] = []
    try:
        entered = Ledger(folder / agreement.LEDGER)
        segments, units = entered.segments(), _units(entered)
        missing = entered.missing(trial.held.mark) if trial.held.mark else None
        if missing:
            return segments, units, f"{folder.name}: its ledger {missing}"
    except ConfigError as error:
        return segments, units, f"{folder.name}: its ledger {error.reason}"
    try:
        agreement.check(folder)
    except ConfigError as error:
        # The path of the folder on this machine must not be in a released statement.
        return segments, units, f"{str(error.value).replace(str(folder), folder.name)} {error.reason}"
    return segments, units, None


def union(plan: Segments, entered: Segments, name: str) -> Segments:
    """Returns all of `entered`, and the steps of `plan` that were not entered, as further steps of the newest noise epoch.

    The rest of an epoch then belongs to the epoch that had begun.
    """
    newest = {key: getattr(entered[-1], key) for key in ("origin", "epoch", "epoch_name")} if entered else {"origin": name}
    return join(entered, [dataclasses.replace(segment, **newest) for segment in left(plan, entered, _NO_COST)])


def charges(*branches: Segments) -> Charges:
    """Returns the charges of all `branches`, for an accountant; steps that they share count once."""
    return ledger.releases(join(*branches))


def same(one: Segments | None, other: Segments | None) -> bool:
    """Returns whether both are the same for an accountant."""
    return (one is None) == (other is None) and set(ledger.releases(one or [])) == set(ledger.releases(other or []))


def beyond(cost: Cost) -> Charges:
    """Returns the charges beyond the plan: steps entered again in another noise epoch, or with another event."""
    plan = dict(ledger.releases(cost.plan or []))
    return [(release, count - plan.get(release, 0)) for release, count in ledger.releases(cost.segments) if count > plan.get(release, 0)]


def is_whole(cost: Cost) -> bool:
    """Returns whether every step of the plan was entered."""
    return cost.plan is not None and not left(cost.plan, cost.entered, _NO_COST)


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


def filter_of(search: Search) -> Any:
    """Returns the declared budget as a `dpx.privacy.search_accounting.Filter`, `None` without a declared budget; raises `ConfigError` for
    a budget that cannot be enforced."""
    budget = search.tune.budget
    if budget.epsilon is None or not search.is_private:
        return None
    check_budget(search.accountant)
    from dpx.privacy.search_accounting import Filter

    privacy = search.privacy
    return Filter(budget.kind, budget.epsilon, privacy.delta, budget.order, privacy.adjacency)


def check_plan(search: Search, record: Record, plan: Segments | None, point: tuple[str, ...]) -> None:
    """Raises `ConfigError`, before anything of a new trial is drawn, if the charge was not declared for its plan."""
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
            reason, fix = f"{ONE_BUDGET}{only_rdp}", DECLARE
        require(same(plan, known), value, f"has another cost than the trials before it: {reason}", fix)
        return
    begun = charges(*(cost_of(trial, record).segments for trial in record.trials))
    new = charges(union(plan, [], "new"))
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
