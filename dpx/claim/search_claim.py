"""The statement of a whole search: the guarantee of its winner, with the choice among the trials charged."""

import dataclasses
from pathlib import Path

from dpx.claim import calibration, caveats, search_rules, trial_charges
from dpx.claim.caveats import unlike_in_words
from dpx.claim.search_lines import Trial
from dpx.claim.search_record import Record
from dpx.claim.search_rules import Search
from dpx.claim.spent import counted
from dpx.claim.trial_charges import Cost
from dpx.declaration import ConfigError
from dpx.privacy import accounting, ledger, origins, search_accounting
from dpx.privacy.accounting import Charges
from dpx.privacy.segments import Segment
from dpx.privacy.unit_facts import UnitFacts, unlike
from dpx.statement import agreement, outside_code
from dpx.statement.seals import FORMAT, STATEMENT, read_statement
from dpx.statement.statement_records import (
    BudgetFacts,
    CountedEvent,
    CountedTrials,
    DrawnTrials,
    DrawsFrom,
    Epsilons,
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
    tune = search.tune
    secret = tune.charge == "repeat_and_select"
    costs = _costs(search, record, winner)
    reasons = _reasons(search, record, costs)
    epsilon = _epsilon(search, record, costs) if search.is_private else {}
    by = _by(search, record, costs) if search.is_private else ()
    why = reasons or outside_code.sentences(by)
    spent, budget = _beside(search, record, costs, epsilon)
    numbers = [NotABound(name=f"epsilon/{key}", value=one, reason="; ".join(why)) for key, one in epsilon.items() if why]
    return StudyStatement(
        format=FORMAT,
        study=record.path.name,
        charge=tune.charge,
        trials=DrawnTrials(mean=float(tune.trials), shape=str(tune.shape)) if secret else _trials(search, record, costs),
        guarantee=outside_code.guarantee(search.is_private, reasons, by),
        reasons=tuple(reasons),
        unit=search.privacy.unit,
        adjacency=search.privacy.adjacency,
        delta=search.privacy.delta,
        units=tuple(one and one.as_released(_tells_words(search)) for one in _units(costs)),
        epsilon={} if why else epsilon,
        unsupported=tuple(numbers),
        # Where the claim trusts a package, the epsilon spent so far is not proved either.
        spent=dataclasses.replace(spent, epsilon={}) if spent is not None and by else spent,
        budget=budget,
        # A function of a trial's noisy parameters and of held-out rows, so it adds no charge.
        score=Score(name=search.score, of="the trained parameters", reads="rows of the held-out split", charged=False),
        # The folders of the other trials would reveal their number.
        winner=None if winner is None else "winner" if secret else winner.folder,
        assumptions=tuple([_ASSUMED[tune.charge], *([_DECLARED] if tune.charge == "composition" else [])]),
        not_covered=tuple([_NOT_COVERED[tune.charge], _SCORE_READS, *search.uncovered, *caveats.NOT_COVERED[2:]]),
        draws_from=_draws(record, secret),
        ledger=StudyLedger(repeated=_repeated_events(search, record)) if secret else StudyLedger(segments=_segments(costs)),
        record=RecordFacts(mark=_mark(record, secret)),
    )


def _tells_words(search: Search) -> bool:
    """Returns whether the vocabulary that the trials read is public, as far as is known (`dpx.privacy.origins.have_public_words`)."""
    from dpx.data.learnt_from import learnt_from
    from dpx.data.prepare import vocabulary_place

    path = search.declared.get("data", {}).get("vocabulary", {}).get("path")
    place = None if path is None else vocabulary_place(path)
    return place is None or not place.exists() or origins.have_public_words(learnt_from(place))


def _draws(record: Record, secret: bool) -> DrawsFrom | None:
    """Returns the distribution that the trials of a `repeat_and_select` were drawn from: it was fixed before the first trial, so it depends
    on no trial.
    """
    known = record.distribution
    return DrawsFrom(sampler=known.sampler, space=known.space) if secret and known is not None else None


def _costs(search: Search, record: Record, winner: Trial | None) -> Costs:
    """Returns the cost of every trial that began, whatever its result.

    For an uncharged search only that of the winner, whose epsilon is not a bound.
    """
    counted = record.trials if search.tune.charge != "uncharged" else [winner] if winner else []
    return [(trial, trial_charges.cost_of(trial, record)) for trial in counted]


def _mark(record: Record, secret: bool) -> RecordMark:
    """Returns the line that the statement follows from.

    Its position reveals the number of trials; its digest, without the record's key, reveals nothing.
    """
    mark = record.chain.mark
    return RecordMark(chain=mark.chain, position=None if secret else mark.position, digest=mark.digest)


def _trials(search: Search, record: Record, costs: Costs) -> CountedTrials:
    lost = [trial.folder for trial, cost in costs if cost.lost] if search.is_private else []
    declared = record.declared or search.tune.trials
    return CountedTrials(declared=declared, begun=len(record.trials), charged_by_plan_alone=tuple(lost))


def _reasons(search: Search, record: Record, costs: Costs) -> list[str]:
    """Returns the reasons why the search has no guarantee, including those of its trials."""
    if not search.is_private:
        return ["mechanism=none"]
    reasons = _of_trials(record, costs) + _of_units(costs)
    if search.tune.charge == "uncharged":
        reasons.append("tune.charge=uncharged: choosing the best of several trials reads the protected data, and nothing here charges it")
    elif search.tune.charge == "composition":
        reasons += _against_composition(search, record, costs)
    else:
        reasons = sorted({*reasons, *_against_repetition(record, costs)})
    return reasons


def _of_trials(record: Record, costs: Costs) -> list[str]:
    """Returns the reasons against a guarantee in the trials' statements, now or when they ended.

    A trial whose results are deleted still counts.
    """
    noted = {reason for trial, _ in costs for reason in trial.reasons}
    return sorted(noted | {reason for trial, _ in costs for reason in own_reasons(record.outputs / trial.folder)})


def _segments(costs: Costs) -> tuple[Segment, ...]:
    return tuple(ledger.join(*(cost.segments for _, cost in costs)))


def _units(costs: Costs) -> list[UnitFacts | None]:
    """Returns the records of what the trials' charged steps protect, each once."""
    return trial_charges.distinct(one for _, cost in costs for one in cost.units)


def _of_units(costs: Costs) -> list[str]:
    """Returns the reason why the trials' charges cannot be added up, or are not those of one repeated mechanism: their data was prepared
    differently in between."""
    units = _units(costs)
    return [unlike_in_words(units)] if units and unlike(units) else []


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


def _by(search: Search, record: Record, costs: Costs) -> tuple[str, ...]:
    """Returns the packages that the search trusts: those of its config, of all charges of its trials, and of their statements."""
    stated = [_stated(record.outputs / trial.folder) for trial, _ in costs]
    said = [outside_code.packages_of_guarantee(one.guarantee) or () for one in stated if one is not None]
    return outside_code.joined(search.by, *(outside_code.packages_of_segments(cost.segments) for _, cost in costs), *said)


def _against_composition(search: Search, record: Record, costs: Costs) -> list[str]:
    reasons = [cost.disagrees for _, cost in costs if cost.disagrees]
    if any(cost.plan is None for _, cost in costs):
        reasons.append("the plan of a trial is not recorded, so what it cost is not known")
    budget = search_rules.filter_of(search)
    if budget is None:
        reasons += record.raised
        if not all(trial_charges.same(cost.plan, costs[0][1].plan) for _, cost in costs if cost.plan is not None):
            reasons.append("trials were charged differently: chosen after results, without a budget that was declared before")
    elif not budget.holds(trial_charges.charges(*(cost.segments for _, cost in costs))):
        reasons.append("trials that were started again cost more than the budget that was declared before the first")
    return reasons


def _against_repetition(record: Record, costs: Costs) -> list[str]:
    """Reasons why the trials are not independent draws of the declared plan; none of them reveals the number of trials."""
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
    return [f"repeat_and_select: {reason}" for holds, reason in checks if holds]


def _epsilon(search: Search, record: Record, costs: Costs) -> dict[str, float | None]:
    """Epsilon by accountant: at the planned end of the search, of the declared budget, or of the best of a random number of declared
    plans."""
    tune = search.tune
    if tune.charge == "repeat_and_select":
        plan, orders = _plan(record), getattr(search.accountant, "orders", None)
        delta, adjacency = search.privacy.delta, search.privacy.adjacency
        if not plan:
            return {}
        epsilon = search_accounting.epsilon(plan, delta=delta, mean=tune.trials, shape=tune.shape, adjacency=adjacency, orders=orders)
        return {"rdp": accounting.finite(epsilon)}
    budget = search_rules.filter_of(search)
    if budget is not None:
        return {budget.accountant: budget.epsilon}
    return _composed(search, _planned_end(search, record, costs))


def _planned_end(search: Search, record: Record, costs: Costs) -> Charges:
    """Returns the charges of all trials that began, and the plan once for each declared trial that has not begun."""
    begun = trial_charges.charges(*(cost.segments for _, cost in costs))
    if search.tune.charge == "uncharged":
        return begun
    to_begin = max(0, (record.declared or search.tune.trials) - len(record.trials))
    plan = next((cost.plan for _, cost in costs if cost.plan is not None), [])
    return begun + [(release, count * to_begin) for release, count in ledger.releases(plan)]


def _composed(search: Search, begun: Charges) -> dict[str, float | None]:
    if not begun:
        return {}
    composed = calibration.compositions(search.accountant, search.privacy, accounting.bucketed(begun))
    return {name: accounting.finite(one.epsilon(search.privacy.delta)) for name, one in composed.items()}


def _beside(search: Search, record: Record, costs: Costs, headline: Epsilons) -> tuple[StudySpent | None, BudgetFacts | None]:
    """Returns the epsilon spent so far, beside that of the planned end; or the budget, if it is the claim."""
    if not search.is_private or search.tune.charge != "composition":
        return None, None
    budget = search_rules.filter_of(search)
    if budget is not None:
        return None, BudgetFacts(kind=budget.kind, epsilon=budget.epsilon, order=budget.order, limit=budget.limit)
    # Composing takes seconds for a ramp: if every declared trial has begun, the result is the headline.
    to_begin = (record.declared or search.tune.trials) > len(record.trials)
    epsilon = _composed(search, trial_charges.charges(*(cost.segments for _, cost in costs))) if to_begin else headline
    valid = "no trial more begins, and stopping here depended neither on the data nor on anything that a trial gave out"
    return StudySpent(trials=len(costs), epsilon=epsilon, valid_only_if=valid), None


def _plan(record: Record) -> Charges:
    """Returns the event of one repetition: the plan that was recorded when the first trial began, whatever the results."""
    plan = next((trial.plan for trial in record.trials if trial.plan is not None), [])
    return accounting.bucketed(ledger.releases(list(plan)))


def _repeated_events(search: Search, record: Record) -> tuple[CountedEvent, ...]:
    """Returns the event of one trial, as dp-accounting composes it; it does not contain the number of trials."""
    return counted(_plan(record), search.privacy.adjacency, "rdp")
