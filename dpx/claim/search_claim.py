"""The statement of a whole search: the guarantee of its winner, with the choice among the trials charged."""

from collections.abc import Sequence
from pathlib import Path

from dpx.claim import calibration, caveats, trial_charges
from dpx.claim.caveats import unlike_units
from dpx.claim.search_record import Record, Trial
from dpx.claim.spent import counted
from dpx.claim.trial_charges import Cost, Search
from dpx.declaration import ConfigError
from dpx.privacy import accounting, ledger, origins, search_accounting
from dpx.privacy.accounting import Charges
from dpx.privacy.declared_privacy import UnitFacts
from dpx.privacy.segments import join
from dpx.statement import agreement, outside_code
from dpx.statement.seals import FORMAT, STATEMENT, read_statement
from dpx.statement.statement_records import (
    BudgetFacts,
    CountedTrials,
    DrawnTrials,
    DrawsFrom,
    NotABound,
    RecordFacts,
    RecordMark,
    Score,
    Statement,
    StudyLedger,
    StudySpent,
    StudyStatement,
)

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
_SCORE_READS = (
    "rows of the held-out split: the score that chooses among the trials reads them, and they are not protected. Other data that code "
    "from another package reads for that score is not charged either"
)
_DECLARED = "the number of trials was declared before the first, and none was started again because of its result"

Costs = list[tuple[Trial, Cost]]


def build(search: Search, record: Record, winner: Trial | None) -> StudyStatement:
    """Returns every field of the study's `privacy.json`, from its record and from the folders of its trials."""
    from dpx.data.learnt_from import learnt_from
    from dpx.data.prepare import vocabulary_place

    tune, privacy = search.tune, search.privacy
    secret, known = tune.charge == "repeat_and_select", record.distribution
    declared = record.declared or tune.trials
    # Every trial that began is charged, whatever its result; an uncharged search states that of its winner, which is not a bound.
    charged = record.trials if tune.charge != "uncharged" else [winner] if winner else []
    costs = [(trial, trial_charges.cost_of(trial, record)) for trial in charged]
    units = trial_charges.distinct(one for _, cost in costs for one in cost.units)
    begun = trial_charges.charges(*(cost.segments for _, cost in costs))

    reasons, by, epsilon, spent, budget = ["mechanism=none"], (), {}, None, trial_charges.filter_of(search)
    given = dict.fromkeys(search.given_protected)
    if search.is_private:
        reasons = _reasons(search, record, costs, units)
        epsilon = _epsilon(search, record, costs, begun)
        stated = [_stated(record.outputs / trial.folder) for trial, _ in costs]
        said = [outside_code.packages_of_guarantee(one.guarantee) or () for one in stated if one is not None]
        by = outside_code.joined(search.by, *(outside_code.packages_of_segments(cost.segments) for _, cost in costs), *said)
        given = dict.fromkeys([*given, *(name for one in stated if one for name in origins.given_by_statement(one.not_covered))])
    if search.is_private and tune.charge == "composition" and budget is None:
        # Composing takes seconds for a ramp: if every declared trial has begun, the result is the headline.
        so_far = _composed(search, begun) if declared > len(record.trials) else epsilon
        valid = "no trial more begins, and stopping here depended neither on the data nor on anything that a trial gave out"
        # Where the claim trusts a package, the epsilon spent so far is not proved either.
        spent = StudySpent(trials=len(costs), epsilon={} if by else so_far, valid_only_if=valid)
    why = reasons or outside_code.sentences(by)
    numbers = [NotABound(name=f"epsilon/{key}", value=one, reason="; ".join(why)) for key, one in epsilon.items() if why]

    if secret:
        trials = DrawnTrials(mean=float(tune.trials), shape=str(tune.shape))
        # The event of one trial, as dp-accounting composes it, does not contain the number of trials.
        charges = StudyLedger(repeated=counted(_plan(record), privacy.adjacency, "rdp"))
    else:
        lost = tuple(trial.folder for trial, cost in costs if cost.lost and search.is_private)
        trials = CountedTrials(declared=declared, begun=len(record.trials), charged_by_plan_alone=lost)
        charges = StudyLedger(segments=tuple(join(*(cost.segments for _, cost in costs))))
    path = search.declared.get("data", {}).get("vocabulary", {}).get("path")
    place = None if path is None else vocabulary_place(path)
    # Whether the vocabulary that the trials read is public, as far as is known.
    tells_words = place is None or not place.exists() or origins.have_public_words(learnt_from(place))
    mark = record.chain.mark
    is_of_budget = budget is not None and tune.charge == "composition"
    return StudyStatement(
        format=FORMAT,
        study=record.path.name,
        charge=tune.charge,
        trials=trials,
        guarantee=outside_code.guarantee(search.is_private, reasons, by),
        reasons=tuple(reasons),
        unit=privacy.unit,
        adjacency=privacy.adjacency,
        delta=privacy.delta,
        units=tuple(one and one.as_released(tells_words) for one in units),
        epsilon={} if why else epsilon,
        unsupported=tuple(numbers),
        spent=spent,
        budget=BudgetFacts(**{name: getattr(budget, name) for name in ("kind", "epsilon", "order", "limit")}) if is_of_budget else None,
        # A function of a trial's noisy parameters and of held-out rows, so it adds no charge.
        score=Score(name=search.score, of="the trained parameters", reads="rows of the held-out split", charged=False),
        # The folders of the other trials would reveal their number.
        winner=None if winner is None else "winner" if secret else winner.folder,
        assumptions=tuple([_ASSUMED[tune.charge], *([_DECLARED] if tune.charge == "composition" else [])]),
        not_covered=(
            *(_NOT_COVERED[tune.charge], _SCORE_READS, *search.uncovered, *caveats.NOT_COVERED[2:]),
            *origins.given_protected(given, by="trials"),
        ),
        # Fixed before the first trial, so it depends on none.
        draws_from=DrawsFrom(sampler=known.sampler, space=known.space) if secret and known is not None else None,
        ledger=charges,
        # The position of the line reveals the number of trials; its digest, without the record's key, reveals nothing.
        record=RecordFacts(mark=RecordMark(chain=mark.chain, position=None if secret else mark.position, digest=mark.digest)),
    )


def _reasons(search: Search, record: Record, costs: Costs, units: Sequence[UnitFacts | None]) -> list[str]:
    """Returns the reasons why a private search has no guarantee, including those of its trials."""
    # A trial whose results are deleted still counts by what its statement said when it ended.
    noted = {reason for trial, _ in costs for reason in trial.reasons}
    reasons = sorted(noted | {reason for trial, _ in costs for reason in own_reasons(record.outputs / trial.folder)})
    # The trials' charges cannot be added up, or are not those of one mechanism, if their data was prepared differently in between.
    reasons += unlike_units(units, is_charged=False)
    if search.tune.charge == "uncharged":
        reasons.append("tune.charge=uncharged: choosing the best of several trials reads the protected data, and nothing here charges it")
        return reasons
    if search.tune.charge == "composition":
        reasons += [cost.disagrees for _, cost in costs if cost.disagrees]
        if any(cost.plan is None for _, cost in costs):
            reasons.append("the plan of a trial is not recorded, so what it cost is not known")
        budget = trial_charges.filter_of(search)
        if budget is None:
            reasons += record.raised
            if not all(trial_charges.same(cost.plan, costs[0][1].plan) for _, cost in costs if cost.plan is not None):
                reasons.append("trials were charged differently: chosen after results, without a budget that was declared before")
        elif not budget.holds(trial_charges.charges(*(cost.segments for _, cost in costs))):
            reasons.append("trials that were started again cost more than the budget that was declared before the first")
        return reasons
    # Why the trials are not independent draws of the declared plan; none of these reasons reveals the number of trials.
    withheld = [(record.outputs / trial.folder / "private" / "withheld").is_dir() for trial, _ in costs if trial.state == "finished"]
    distribution = record.distribution
    refused = distribution is None or any(distribution.refusal(trial.point) for trial in record.trials)
    checks = (
        (distribution is None, "what trials are drawn from was not recorded before the first"),
        (distribution is not None and refused, "a trial's settings are not a draw from the declared search space"),
        (any(trial.state != "finished" for trial, _ in costs), "a trial failed, or was killed and never finished"),
        (not all(withheld) or any(cost.lost for _, cost in costs), "the results of a trial are lost"),
        (any(cost.disagrees for _, cost in costs), "a trial's ledger disagrees with what follows from it"),
        (any(not cost.lost and not trial_charges.is_whole(cost) for _, cost in costs), "a trial was stopped before its planned end"),
        (any(trial_charges.beyond(cost) for _, cost in costs), "a trial was drawn again: it was charged for more than its plan"),
    )
    return sorted({*reasons, *(f"repeat_and_select: {reason}" for holds, reason in checks if holds)})


def own_reasons(folder: Path) -> list[str]:
    """Returns the reasons why a trial's own statement has no guarantee; empty if it has a guarantee, or the trial has not written a
    statement."""
    said = _stated(folder)
    return (
        []
        if said is None or outside_code.packages_of_guarantee(said.guarantee) is not None
        else ["a trial has no guarantee", *said.reasons]
    )


def reasons_at_end(folder: Path) -> list[str]:
    """Returns `own_reasons` for a trial that ends, with further reasons if the folder's parts disagree.

    The statement may then not be the one that its run made, and this cannot be checked after the folder is deleted."""
    try:
        agreement.check(folder)
    except ConfigError:
        # No reason here names a trial: if the number of trials is secret, folder names must not be published.
        return list(dict.fromkeys(["a trial has no guarantee", "the parts of a trial's folder do not agree", *own_reasons(folder)]))
    return own_reasons(folder)


def _stated(folder: Path) -> Statement | None:
    """Returns a trial's own statement; `None` before it is written."""
    places = (place / STATEMENT for place in (folder / "release", folder / "private" / "withheld"))
    return next((read_statement(path) for path in places if path.is_file()), None)


def _epsilon(search: Search, record: Record, costs: Costs, begun: Charges) -> dict[str, float | None]:
    """Epsilon by accountant: at the planned end of the search, of the declared budget, or of the best of a random number of declared
    plans; `begun` are the charges of all trials that began."""
    tune = search.tune
    if tune.charge == "repeat_and_select":
        plan, orders = _plan(record), getattr(search.accountant, "orders", None)
        delta, adjacency = search.privacy.delta, search.privacy.adjacency
        if not plan:
            return {}
        epsilon = search_accounting.epsilon(plan, delta=delta, mean=tune.trials, shape=tune.shape, adjacency=adjacency, orders=orders)
        return {"rdp": accounting.finite(epsilon)}
    budget = trial_charges.filter_of(search)
    if budget is not None:
        return {budget.accountant: budget.epsilon}
    if tune.charge == "uncharged":
        return _composed(search, begun)
    # The plan, once for each declared trial that has not begun.
    to_begin = max(0, (record.declared or tune.trials) - len(record.trials))
    plan = next((cost.plan for _, cost in costs if cost.plan is not None), [])
    return _composed(search, begun + [(release, count * to_begin) for release, count in ledger.releases(plan)])


def _composed(search: Search, begun: Charges) -> dict[str, float | None]:
    if not begun:
        return {}
    composed = calibration.compositions(search.accountant, search.privacy, accounting.bucketed(begun))
    return {name: accounting.finite(one.epsilon(search.privacy.delta)) for name, one in composed.items()}


def _plan(record: Record) -> Charges:
    """Returns the event of one repetition: the plan that was recorded when the first trial began, whatever the results."""
    plan = next((trial.plan for trial in record.trials if trial.plan is not None), [])
    return accounting.bucketed(ledger.releases(list(plan)))
