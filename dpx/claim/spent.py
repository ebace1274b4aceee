"""Computes the privacy cost of a run from its ledger: epsilon so far and at the planned end, and numbers that are not bounds.

The facts that a statement follows from are read once: what the ledger holds now and at the planned end, what the run begins from, and which
packages its claim trusts. During a run the progress bar and TensorBoard show the epsilon so far (`Spending`).
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dpx.claim.calibration import ASSUMED_ADJACENCY, Calibrated, Entries, accountant_of, assumed, compositions
from dpx.data.declared_data import Data
from dpx.declaration import ConfigError, require
from dpx.privacy import accounting, events, ledger, loss_grid, origins, profile
from dpx.privacy.declared_privacy import Accountant, GdpClt, Privacy
from dpx.privacy.events import describe
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import NoiseEpoch, Verdict
from dpx.privacy.origins import Beginning, Origin
from dpx.privacy.segments import Segments, decode, is_forward, join, left, until
from dpx.sampler import Sampler
from dpx.statement import outside_code
from dpx.statement.statement_records import (
    ChainFacts,
    CountedEvent,
    EpsilonAt,
    LedgerFacts,
    NotABound,
    OutsideCode,
    RatesRoundedUp,
    SpentEpsilon,
)

CHAIN_SHOWS = (
    "the ledger is a chain of lines, and each file that depends on it names one of its lines: dpx detects a ledger that was lost, cut, "
    "edited or rolled back, and a statement or a config that does not match its checksum in the ledger; dpx does not detect a ledger that "
    "was forged with its key, or rolled back together with all files that depend on it"
)


class Spent:
    """Composes the charges of a ledger once per accountant and returns their epsilon."""

    def __init__(self, accountant: Accountant, privacy: Privacy, segments: Segments):
        self._delta, self._adjacency, self._coarse = privacy.delta, privacy.adjacency, accountant.value_discretization_interval
        self._exact = ledger.releases(segments)
        self._charges = accounting.bucketed(self._exact)
        self.steps = sum(segment.count for segment in segments)
        self._composed = compositions(accountant, privacy, self._charges)
        self.accountants = list(self._composed)

    def epsilon(self, accountant: str, delta: float | None = None) -> float | None:
        """Returns epsilon at `delta`, by default the declared one; `None` if no finite bound is known."""
        delta = self._delta if delta is None else delta
        if not self._charges:
            return 0.0
        if delta < accounting.SMALLEST_DELTA[accountant]:
            return None
        return accounting.finite(self._composed[accountant].epsilon(delta))

    def table(self, at: list[float]) -> tuple[EpsilonAt, ...]:
        """Returns epsilon by accountant at several deltas."""
        return tuple(EpsilonAt(delta=delta, epsilon={name: self.epsilon(name, delta) for name in self.accountants}) for delta in at)

    def rounding(self) -> RatesRoundedUp | None:
        """Returns the most that rounding up a ramp of sampling rates can add to epsilon; `None` if every rate is composed as it is.

        It is computed by Renyi accounting, or by the run's own accountant if Renyi accounting has no bound.
        """
        if len(self._charges) == len(self._exact):
            return None
        # Renyi accounting is the quickest, but has no bound for some releases.
        accountant = "rdp" if "rdp" in self.accountants else self.accountants[0]
        error = accounting.rounding_error(self._exact, self._delta, self._adjacency, accountant=accountant)
        return RatesRoundedUp(
            distinct=len(self._exact),
            composed=len(self._charges),
            accountant=accountant,
            epsilon_error_at_most=accounting.finite(error),
            pld_grid=loss_grid.coarser(self._charges, self._adjacency, self._coarse),
        )

    def events(self) -> tuple[CountedEvent, ...]:
        """Returns the dp-accounting events composed by the run's own accountant: class, arguments and count."""
        return counted(self._charges, self._adjacency, self.accountants[0])


def counted(charges: accounting.Charges, adjacency: str, accountant: str) -> tuple[CountedEvent, ...]:
    """Returns the dp-accounting event of each of `charges`, as JSON, with its count."""
    as_json = ((json.loads(json.dumps(describe(events.event(release, adjacency, accountant)))), count) for release, count in charges)
    return tuple(CountedEvent(event=event, count=count) for event, count in as_json)


def spent_facts(spent: "Spent", own: Segments) -> SpentEpsilon:
    """Returns the field `spent`, what the ledger holds so far, and when that is a claim; `own` are the run's own steps in it."""
    return SpentEpsilon(
        steps=len({step for _, step, _ in decode(own)}),
        charged_steps=spent.steps,
        epsilon={name: spent.epsilon(name) for name in spent.accountants},
        valid_only_if="the reason why the run stopped here depends neither on the data nor on any output of the run",
    )


def ledger_facts(entered: Ledger | None, segments: Segments, whole: "Spent") -> LedgerFacts:
    """Returns the steps that ran, the events that the headline composes, and the ledger line that both follow from."""
    line = chain_facts(entered)
    return LedgerFacts(
        segments=tuple(segments),
        rates_rounded_up=whole.rounding(),
        events=whole.events(),
        identity=entered.identity if entered is not None else None,
        mark=line.mark,
        chain=line.chain,
    )


def require_planned(
    accountant: Accountant, privacy: Privacy, plan: Callable[[NoiseEpoch | None], Segments], entered: Ledger, from_step: int
) -> None:
    """Raises `ConfigError` if a noise epoch from `from_step` on would charge more than the run's plan, at its end, by its own accountant.

    `plan` returns the steps to come in a noise epoch; without one, those of the whole run. A job that is started again by itself goes on
    only within what its user planned.
    """
    if not entered.noise_epochs:
        return
    newest = entered.noise_epochs[-1]
    epoch = replace(newest, number=newest.number + 1, name="to come", from_step=from_step)
    ends = (join(*origins.charged(entered.origins), plan(None)), join(entered.segments(), plan(epoch)))
    first, then = (Spent(accountant, privacy, end) for end in ends)
    planned, charged = (math.inf if (value := one.epsilon(one.accountants[0])) is None else value for one in (first, then))
    require(
        charged <= planned,
        f"restart from step {from_step}",
        f"needs fresh noise, and epsilon at the end would be {charged:.4g} where {planned:.4g} was planned",
        "The same command goes on, and charges that",
    )


def require_bound(accountant: Accountant, privacy: Privacy, own: Segments, begins_from: Sequence[Origin]) -> None:
    """Raises `ConfigError` if the run's accountant has no joint bound for its `own` steps (empty without privacy) and those of its
    origins."""
    before = origins.charged(begins_from)
    if own and before:
        Spent(accountant, privacy, join(*before, own))


def chain_facts(entered: Ledger | None) -> ChainFacts:
    """Returns the line of the ledger that a statement follows from, and what such marks can show."""
    if entered is None:
        return ChainFacts(mark=None, chain="the run has not begun, so it has no ledger that this statement could be compared with")
    return ChainFacts(mark=entered.mark, chain=CHAIN_SHOWS)


def unsupported(
    sampler: Sampler, accountant: Accountant, delta: float, reasons: list[str], epsilon: dict[str, float | None], segments: Segments
) -> tuple[NotABound, ...]:
    """Returns the numbers that are not bounds for this run, each with the reason.

    `epsilon`, by accountant, is one of them if there are `reasons`.
    """
    against = epsilon if reasons else {}
    numbers = [NotABound(name=f"epsilon/{name}", value=value, reason="; ".join(reasons)) for name, value in against.items()]
    if sampler.assumed is not None:
        numbers += under_assumed_sampler(sampler, accountant, delta, segments)
    numbers += as_if_hidden(accountant, delta, segments)
    if isinstance(accountant, GdpClt) and not any(map(is_forward, segments)):
        known = [replace(segment, sampler="poisson") for segment in segments]
        value = profile.gdp_clt_epsilon(ledger.releases(known), delta)
        why = "the central limit of Gaussian DP is an approximation and can underestimate epsilon"
        numbers.append(NotABound(name="epsilon/gdp_clt", value=accounting.finite(value), reason=why))
    return tuple(numbers)


def of_one_copy(data: Data, privacy: Privacy, declared: Accountant, segments: Segments) -> list[NotABound]:
    """Returns what epsilon is of one row alone, which other work publishes, where several rows of a unit hold the same text."""
    if data.copies == 1 or privacy.unit_mode != "group" or privacy.rows_per_unit_max == 1:
        return []
    charges = accounting.bucketed(ledger.releases([replace(segment, rows_per_unit=1) for segment in segments]))
    why = f"of one row alone, but {data.copies} rows hold the same text, and the unit is all of its rows"
    return _composed_beside(charges, declared, privacy.adjacency, privacy.delta, outside_code.ONE_COPY, why)


def as_if_hidden(declared: Accountant, delta: float, segments: Segments) -> list[NotABound]:
    """Returns the epsilons that other work publishes for rows released one by one, which assume that it is hidden who is drawn.

    It is empty for other steps.
    """
    if not any(map(is_forward, segments)):
        return []
    charges = [
        (replace(release, kind="poisson") if release.kind == "slot_revealed" else release, count)
        for release, count in accounting.bucketed(ledger.releases(segments))
    ]
    why = "assumes that a row's taking part stays hidden (amplification by sampling), but its noisy vector is released in its own place"
    numbers = _composed_beside(charges, declared, "zero_out_text", delta, "poisson", why)
    limit = (
        "assumes a limit of many small privacy losses (p sqrt(T M) constant at a fixed mu), but p is far smaller and single losses are "
        "large; it can under-report, and it assumes hidden participation too"
    )
    value = accounting.finite(profile.gdp_clt_epsilon(charges, delta))
    return [*numbers, NotABound(name="epsilon/gdp_clt", value=value, reason=limit)]


def under_assumed_sampler(sampler: Sampler, declared: Accountant, delta: float, segments: Segments) -> list[NotABound]:
    """Returns what epsilon would be under the sampler that `sampler.assumed` names, which is not the one that runs."""
    try:
        charges = accounting.bucketed(ledger.releases(assumed(sampler, segments)))
    except ConfigError:
        # A run that this one starts from may have steps that this sampler has no charge for, such as rows of one unit drawn apart.
        return []
    why = f"sampler.assumed={sampler.assumed} under {ASSUMED_ADJACENCY}, but {sampler.name} ran"
    return _composed_beside(charges, declared, ASSUMED_ADJACENCY, delta, str(sampler.assumed), why)


def _composed_beside(
    charges: accounting.Charges, declared: Accountant, adjacency: str, delta: float, sampler: str, why: str
) -> list[NotABound]:
    """Returns the epsilons of charges as if this sampler had drawn them."""
    numbers = []
    for accountant in ("pld", "rdp"):
        # Renyi accounting does not support a unit of several rows; this number, which is unsupported anyway, is then left out.
        with suppress(ConfigError):
            coarse = declared.value_discretization_interval
            value = accounting.compose(charges, accountant, adjacency, coarse=coarse).epsilon(delta) if charges else 0.0
            numbers.append(NotABound(name=f"epsilon/{accountant}/{sampler}", value=accounting.finite(value), reason=why))
    return numbers


# Time limits for showing epsilon: a fraction of the run's time so far, or this many seconds in a short run.
SHARE, SECONDS = 0.01, 0.8


class Spending:
    """Computes epsilon after each requested step by the run's own accountant, while that is cheap.

    The privacy losses of one step are computed once. Composing them costs hundredths of a second on a grid whose interval is a whole
    multiple of the statement's, so the value shown is never below the statement's value for the same steps (0.3 % above at most). The last
    step is composed as in the statement. `bound` is the headline of the newest statement, at the planned end, and bounds every step's
    epsilon; if the statement has none, it is `None` and nothing is reported.
    """

    def __init__(self, accountant: Accountant, privacy: Privacy, steps: int, entered: Ledger):
        self._accountant, self._privacy, self._steps, self._ledger = accountant_of(accountant), privacy, steps, entered
        self._coarse = accountant.value_discretization_interval
        self.bound: float | None = None
        self._began, self._took = time.monotonic(), 0.0

    def after(self, done: int) -> float | None:
        """Returns epsilon at the declared delta of the first `done` steps of this noise epoch and of all other charges.

        Returns `None` without a claim, without a known finite bound, or if the computation would cost too much now.
        """
        is_last, now = done == self._steps, time.monotonic()
        if self.bound is None or not (is_last or self._took <= max(SECONDS, SHARE * (now - self._began))):
            return None
        spent = min(self._composed(done, is_last), self.bound)
        self._took += time.monotonic() - now
        return accounting.finite(spent)

    def _composed(self, done: int, is_last: bool) -> float:
        (own, orders), privacy = self._accountant, self._privacy
        # Without the later steps of the newest noise epoch: the next step is entered before the metrics of this step are read.
        newest, segments = self._ledger.noise_epochs[-1].name, self._ledger.segments()
        before = [segment for segment in segments if segment.epoch_name != newest]
        entered = before + until([segment for segment in segments if segment.epoch_name == newest], done)
        charges = accounting.bucketed(ledger.releases(entered))
        interval = None if is_last or own != "pld" else loss_grid.multiple(charges, privacy.adjacency, self._coarse)
        return accounting.compose(charges, own, privacy.adjacency, orders, interval, self._coarse).epsilon(privacy.delta)


@dataclass(frozen=True)
class RunFacts:
    """What the ledger `entered` of a run holds; without one, what a run that begins from `begins_from` will be charged for that.

    Attributes:
        segments: All charges so far.
        own: The run's own steps among them.
        before: The charges of its origins that are composed with its own.
        beginning: Its origins, as a statement has them.
        against: The reasons against a guarantee that they are.
        premises: The assumptions that they need, as sentences.
        tells_words: Whether no vocabulary among them was learnt from protected or unknown text.
        is_joint: Whether charged steps drew from several data.
        verdict: The result of the run's own audit.
        trial_charges: How each search that the run is a trial of charges the choice among its trials.
    """

    entered: Ledger | None
    begins_from: tuple[Origin, ...]
    segments: Segments
    own: Segments
    before: list[Segments]
    beginning: Beginning
    against: list[str]
    premises: list[str]
    tells_words: bool
    is_joint: bool
    verdict: Verdict | None
    trial_charges: list[str]

    @classmethod
    def of(cls, entered: Ledger | None, begins_from: Sequence[Origin] = ()) -> "RunFacts":
        """Returns the facts of a ledger, or without one those of origins that are not in a ledger yet."""
        come_from = tuple(begins_from if entered is None else entered.origins)
        before = origins.charged(come_from)
        return cls(
            entered=entered,
            begins_from=come_from,
            segments=join(*before) if entered is None else entered.segments(),
            own=[] if entered is None else entered.own_segments(),
            before=before,
            beginning=origins.facts(come_from),
            against=origins.reasons(come_from),
            premises=origins.assumptions(come_from),
            tells_words=origins.have_public_words(come_from),
            is_joint=bool(before) or (entered is not None and len(entered.data) > 1),
            verdict=None if entered is None else entered.verdict,
            trial_charges=[] if entered is None else [trial.charge for trial in entered.trials],
        )


def planned_end(entries: Entries, calibrated: Calibrated, entered: Ledger | None, begins_from: Sequence[Origin] = ()) -> Segments:
    """Returns the contents of the ledger at the planned end: its present contents, and the remaining steps of its newest noise epoch.

    Without a ledger, it returns the run's whole plan and the charges of its origins.
    """
    assert calibrated.noise_multiplier is not None
    origin, noise_epoch = (entered.identity, entered.noise_epochs[-1] if entered.noise_epochs else None) if entered else ("planned", None)
    to_come = entries.planned(calibrated.batch_stages, calibrated.size, calibrated.noise_multiplier, origin, noise_epoch)
    if entered is None:
        return join(*origins.charged(begins_from), to_come)
    # A package that is imported during the run is noted from that step on; the steps before it were entered without it, and count once.
    segments = entered.segments()
    return join(segments, left(to_come, segments))


class Trusted(NamedTuple):
    """The packages that a claim trusts: as a statement lists them, by name, and the reason why dpx proves nothing of them, as sentences."""

    packages: tuple[OutsideCode, ...]
    names: tuple[str, ...]
    why_not: list[str]

    @classmethod
    def by_run(cls, now: list[dict[str, Any]], segments: Segments) -> "Trusted":
        """Returns the packages that take part `now` (`outside_code.facts`), and those of the charged steps in `segments`."""
        names = outside_code.joined((told["package"] for told in now), outside_code.packages_of_segments(segments))
        return cls(tuple(OutsideCode(**told) for told in now), names, outside_code.sentences(names))
