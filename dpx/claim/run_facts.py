"""The facts that a statement follows from, read once: what the ledger of a run holds now and at the planned end, what the run begins from,
and which packages its claim trusts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dpx.claim.calibration import Calibrated, Entries
from dpx.privacy import ledger, origins
from dpx.privacy.ledger import Ledger, Segments
from dpx.privacy.lines import Verdict
from dpx.privacy.origins import Beginning, Origin
from dpx.privacy.segments import left
from dpx.statement import outside_code
from dpx.statement.statement_records import OutsideCode


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
            segments=ledger.join(*before) if entered is None else entered.segments(),
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
        return ledger.join(*origins.charged(begins_from), to_come)
    # A package that is imported during the run is noted from that step on; the steps before it were entered without it, and count once.
    segments = entered.segments()
    return ledger.join(segments, left(to_come, segments))


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
