"""The cost of a trial: its plan from the moment it begins, and everything in its ledger beyond the plan."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from dpx.claim import calibration
from dpx.claim.search_record import HeldLedger, Record, Trial
from dpx.config.experiment import Experiment
from dpx.declaration import ConfigError
from dpx.privacy import ledger
from dpx.privacy.accounting import Charges
from dpx.privacy.declared_privacy import UnitFacts
from dpx.privacy.ledger import Ledger, Segments
from dpx.privacy.segments import left
from dpx.statement import agreement

# Two steps that agree in all other fields have the same cost.
_NO_COST = ("origin", "epoch", "epoch_name", "clipping_norm", "by")


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


def planned_segments(experiment: Experiment) -> Segments | None:
    """Returns everything that a run of `experiment` will be charged for, `None` without privacy; raises `ConfigError` if it cannot run."""
    if not experiment.is_private:
        return None
    size = experiment.data.declared_size
    if size is None:
        from dpx.data.prepare import prepare

        size = experiment.privacy.population(prepare(experiment.data, experiment.privacy).manifest)
    calibrated = calibration.calibrate(experiment, size)
    assert calibrated.noise_multiplier is not None
    return calibration.planned_segments(experiment, calibrated.batch_stages, calibrated.size, calibrated.noise_multiplier)


def cost_of(trial: Trial, record: Record) -> Cost:
    """Returns the cost of `trial`: its plan, and everything that its ledger holds or is known to have held; its folder need not exist."""
    entered, units, lost, disagrees = list(trial.held.entered), list(trial.held.units), True, None
    if record.newest_in(trial.folder) == trial and (record.outputs / trial.folder / agreement.LEDGER).is_file():
        held, of_held, disagrees = _believed(record.outputs / trial.folder, trial)
        entered, units, lost = ledger.join(entered, held), [*units, *of_held], False
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
        entered=tuple(ledger.join(before.entered, entered.segments())),
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
    return ledger.join(entered, [dataclasses.replace(segment, **newest) for segment in left(plan, entered, _NO_COST)])


def charges(*branches: Segments) -> Charges:
    """Returns the charges of all `branches`, for an accountant; steps that they share count once."""
    return ledger.releases(ledger.join(*branches))


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
