"""Records durably what was released: one line for each step, synced before anything of that step can be seen.

The file is a chain (`dpx.privacy.hash_chain`) of JSON lines, each a record with its `kind` (`dpx.privacy.lines`). A line of the kind
`event` states the event that each of the following steps is charged, and a `step` is a line with its number.

A release is identified by (ledger it was first entered in, noise epoch by number and name, event, step): a replay with the same key gives
the same bits and is charged once; an entry in several epochs or branches is charged each time.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

from dpx.declaration import ConfigError, require
from dpx.files.records import as_written, from_json
from dpx.privacy import events, lines
from dpx.privacy.closed_form import joint
from dpx.privacy.declared_privacy import UnitFacts
from dpx.privacy.events import Kind, Release
from dpx.privacy.hash_chain import Chain, Mark
from dpx.privacy.lines import Line, NoiseEpoch, Plan, TrialOf, Verdict
from dpx.privacy.origins import Origin, charged, merged
from dpx.privacy.segments import (
    ALLOCATION,
    IN_EPOCHS,
    LedgerEntry,
    Segment,
    Segments,
    encode,
    entry_in,
    is_forward,
    join,
    of_entry,
    rows_clipped_apart,
    steps_per_epoch,
)

# Since 7, rows are drawn by the shards of `dpx.sampler.poisson`; 6 had larger ones, and 5 none. Ledgers of these formats have the same
# lines, so they are read, but their runs are not continued (`dpx.statement.agreement.before_training`).
FORMAT, READABLE = 7, (5, 6, 7)
_FIX = "Restore the file, or use the version of dpx that wrote it"

# Noise multipliers of the values that a step releases beside the gradient's sum.
AUXILIARY = ("count_noise_multiplier", "telemetry_noise_multiplier")


class Ledger:
    """An append-only ledger at `path`, created durably if missing. Raises `ConfigError` for a file that is not a ledger.

    `statements` are checksums of the statements that may lie in the run's folder, `configs` those of its configs (`dpx.statement.seals`).
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.noise_epochs: list[NoiseEpoch] = []
        self.plan: Plan | None = None
        self.chosen_after_results: list[str] = []
        self.origins: list[Origin] = []
        self.verdict: Verdict | None = None
        # Who was given metrics that were computed without noise.
        self.sent_to: tuple[str, ...] = ()
        # Every record of units that steps here were entered with; `None` for steps whose units were not noted.
        self.units: list[UnitFacts | None] = []
        self.trials: list[TrialOf] = []
        self.statements: set[str] = set()
        self.configs: set[str] = set()
        self._sums: dict[tuple[str, int], str] = {}
        self._header: tuple[str, LedgerEntry] | None = None
        self._entered: list[tuple[str, int, LedgerEntry]] = []
        self._known: set[tuple[str, int, LedgerEntry]] = set()
        self._chain = Chain(self.path, {"ledger": FORMAT}, {"ledger": READABLE})
        self.format: int = self._chain.first["ledger"]
        self.identity = self._chain.name
        for number, node in enumerate(self._chain.lines, 2):
            line = from_json(Line, node, f"{self.path}, line {number}", _FIX)
            self._require_follow([line])
            self._take(line)

    @property
    def mark(self) -> Mark:
        """Returns the mark after everything entered so far."""
        return self._chain.mark

    def missing(self, mark: Mark | None) -> str | None:
        """Returns the reason, as text, why the ledger does not contain `mark`; `None` if it does."""
        return self._chain.missing(mark)

    def append(self, step: int, entry: LedgerEntry) -> None:
        """Enters `step`, which is on disk when this returns."""
        self._enter([(self.identity, step, entry)])

    def open_noise_epoch(self, epoch: NoiseEpoch) -> None:
        """Opens `epoch`, to which later steps belong. It is on disk when this returns."""
        self._add(lines.EpochLine(epoch=epoch))

    def record_sum(self, epoch_name: str, step: int, checksum: str) -> None:
        """Records the checksum of what the noise of an epoch's `step` was added to. It is on disk when this returns."""
        self._add(lines.SumLine(sum=checksum, step=step, epoch_name=epoch_name))

    def declare_plan(self, plan: Plan) -> None:
        """Records what was planned before the first step."""
        self._add(lines.PlanLine(plan=plan))

    def note_units(self, facts: UnitFacts) -> None:
        """Records which units the following steps protect, if that is new. It is on disk when this returns."""
        unknown: list[UnitFacts | None] = [None] if self._entered and not self.units else []
        new = [*unknown, *([] if facts in self.units else [facts])]
        if new:
            self._add(*(lines.UnitsLine(units=one) for one in new))

    def note_origins(self, origins: Iterable[Origin]) -> None:
        """Records origins of the starting parameters that are new, or whose record became worse. They are on disk when this returns."""
        worse = [origin for origin in merged(self.origins, origins) if origin not in self.origins]
        if worse:
            self._add(*(lines.OriginLine(begins_from=origin) for origin in worse))

    def note_trial(self, study: str, charge: str) -> None:
        """Records that this run is a trial of the search `study`, which later commands cannot change. It is on disk when this returns."""
        trial = TrialOf(study=study, charge=charge)
        if trial not in self.trials:
            self._add(lines.TrialLine(trial_of=trial))

    def note_choices(self, names: list[str]) -> None:
        """Records values of the plan that were chosen after results had been seen."""
        self._add(lines.ChoicesLine(chosen_after_results=tuple(names)))

    def note_sent(self, names: Iterable[str]) -> None:
        """Records who will be given protected values, if that is new. It is on disk when this returns."""
        new = tuple(name for name in names if name not in self.sent_to)
        if new:
            self._add(lines.SentLine(sent_to=new))

    def note_verdict(self, verdict: Verdict) -> None:
        """Records the result of the run's audit, which is valid until the next one is recorded. It is on disk when this returns."""
        self._add(lines.VerdictLine(verdict=verdict))

    def seal_statement(self, checksum: str) -> None:
        """Records the checksum of a statement that is about to be written. It is on disk when this returns."""
        self._add(lines.SealedStatementLine(checksum=checksum))

    def note_stated(self, checksum: str) -> None:
        """Records that the statement with that checksum was written: from now on no older statement may be there."""
        self._add(lines.StatedLine(checksum=checksum))

    def seal_configs(self, checksums: Iterable[str]) -> None:
        """Records the checksums of configs that are about to be written, if they are new. They are on disk when this returns."""
        new = [checksum for checksum in checksums if checksum not in self.configs]
        if new:
            self._add(lines.SealedConfigsLine(checksums=tuple(new)))

    def sum_of(self, epoch_name: str, step: int) -> str | None:
        """Returns the checksum that was recorded for `step`, or `None` if no result of that step left the process that computed it."""
        return self._sums.get((epoch_name, step))

    def holds(self, step: int, entry: LedgerEntry) -> bool:
        """Returns whether exactly this release was entered here."""
        return (self.identity, step, entry) in self._known

    def entries(self) -> Iterator[tuple[int, LedgerEntry]]:
        """Yields `(step, entry)` in the order in which they were entered."""
        return ((step, entry) for _, step, entry in self._entered)

    def steps(self, epoch: int) -> set[int]:
        """Returns the steps of the epoch with number `epoch`."""
        return {step for _, step, entry in self._entered if entry.epoch == epoch}

    @property
    def data(self) -> list[str | None]:
        """Returns checksums of the prepared data that its steps drew from, with `None` for unknown data."""
        return list(dict.fromkeys(epoch.fingerprint.get("data") for epoch in self.noise_epochs)) or [None]

    def own_segments(self) -> Segments:
        """Returns the releases entered here, run-length encoded."""
        return encode(self._entered)

    def segments_of_state(self) -> Segments:
        """Returns `own_segments`, and those of the runs that this one was forked from: all that an audit's canaries took part in."""
        return join(self.own_segments(), *(list(origin.segments) for origin in self.origins if origin.is_fork))

    def segments(self) -> Segments:
        """Returns everything that is charged: `own_segments`, and those of the runs that this one starts from or was forked from."""
        before = charged(self.origins)
        return join(self.own_segments(), *before) if before else self.own_segments()

    def _take(self, line: Line) -> None:
        """Updates this object's fields by what one line says."""
        match line:
            case lines.EventLine():
                self._header = (line.origin, entry_in(line))
            case lines.StepLine():
                assert self._header is not None
                release = (self._header[0], line.step, self._header[1])
                self._entered.append(release)
                self._known.add(release)
            case lines.EpochLine():
                self.noise_epochs.append(line.epoch)
            case lines.SumLine():
                self._sums[line.epoch_name, line.step] = line.sum
            case lines.PlanLine():
                self.plan = line.plan
            case lines.UnitsLine():
                self.units.append(line.units)
            case lines.ChoicesLine():
                self.chosen_after_results += line.chosen_after_results
            case lines.TrialLine():
                self.trials.append(line.trial_of)
            case lines.OriginLine():
                self.origins = merged(self.origins, [line.begins_from])
            case lines.SentLine():
                self.sent_to += line.sent_to
            case lines.VerdictLine():
                self.verdict = line.verdict
            case lines.SealedStatementLine():
                self.statements = self.statements | {line.checksum}
            case lines.SealedConfigsLine():
                self.configs.update(line.checksums)
            case lines.StatedLine():
                self.statements = {line.checksum}

    def _require_follow(self, further: Iterable[Line]) -> None:
        """Raises `ConfigError` unless lines follow from the lines before them.

        It is called just before lines are written and just after they were read.
        """
        has_event, opened = self._header is not None, {(epoch.number, epoch.name) for epoch in self.noise_epochs}
        for line in further:
            has_event = has_event or isinstance(line, lines.EventLine)
            if isinstance(line, lines.StepLine):
                require(has_event, self.path, f"step {line.step} has no event before it", _FIX)
            if isinstance(line, lines.EpochLine):
                place = (line.epoch.number, line.epoch.name)
                require(place not in opened, self.path, f"noise epoch {line.epoch.number} is opened twice", _FIX)
                opened.add(place)

    def _enter(self, releases: list[tuple[str, int, LedgerEntry]]) -> None:
        header = self._header
        further: list[Line] = []
        for origin, step, entry in releases:
            if header != (origin, entry):
                header = (origin, entry)
                further.append(lines.EventLine(origin=origin, **of_entry(entry)))
            further.append(lines.StepLine(step=step))
        self._add(*further)

    def _add(self, *further: Line) -> None:
        """Writes lines and then takes what they say, in that order, so that nothing is known here that a kill could lose."""
        nodes, read = as_written(further, Line, self.path)
        self._require_follow(further)
        self._chain.append(nodes)
        for line in read:
            self._take(line)

    def close(self) -> None:
        """Closes the file handle; a later append opens it again."""
        self._chain.close()


def releases(segments: Segments) -> list[tuple[Release, int]]:
    """Returns the charges of `segments`, for an accountant.

    Under cyclic sampling a row can be drawn only in the steps of its group: the steps of the busiest group are charged. A sampler that
    draws every unit once an epoch is charged one release per epoch begun in each noise epoch (a partial epoch counts as a whole one), at
    the smallest noise of that epoch: a Gaussian one, or that of an allocation.
    """
    charges: list[tuple[Release, int]] = []
    by_epoch: dict[tuple[str | int, ...], Release] = {}
    for segment in segments:
        if segment.event is not None:
            charges.append((_of_package(segment), segment.count))
        elif is_forward(segment):
            charges.append((_of_rows(segment), _stated(segment.micro_batches, f"noise={segment.noise}", "micro-batches") * segment.count))
        elif segment.sampler in (*IN_EPOCHS, "random_allocation"):
            release, length, start = _of_epoch(segment)
            for first, count in segment.steps:
                for number in range((first - start) // length, (first + count - 1 - start) // length + 1):
                    # With sampler and kind of noise: a charge never replaces one of another event.
                    kind = (release.kind, release.is_discrete)
                    place = (segment.origin, segment.epoch, segment.epoch_name, start, length, number, *kind)
                    by_epoch[place] = min(release, by_epoch.get(place, release), key=lambda known: known.noise_multiplier)
        elif segment.sampler == "cyclic_poisson":
            cycle = _stated(segment.cycle, f"sampler={segment.sampler}", "groups")
            # In the steps of its group, a row is drawn with `cycle` times the probability.
            as_poisson = dataclasses.replace(segment, sampler="poisson", q=min(1.0, segment.q * cycle))
            steps_of_group = [0] * cycle
            for first, count in segment.steps:
                for group in range(cycle):
                    steps_of_group[group] += len(range(first + (group - first) % cycle, first + count, cycle))
            # No row can have taken part in more steps than the busiest group has.
            charges.append((_release(as_poisson), max(steps_of_group)))
        else:
            charges.append((_release(segment), segment.count))
    return events.merge(charges + [(release, 1) for release in by_epoch.values()])


def _of_epoch(segment: Segment) -> tuple[Release, int, int]:
    """Returns the charge of an epoch that draws every unit once, its number of steps, and the step from which such epochs are counted."""
    length, start = steps_per_epoch(segment.q), 0
    # Rows of one unit may fall into one batch, so its k rows move one release by up to k times the norm.
    apart, rate = rows_clipped_apart(segment), 1.0
    value = f"sampler={segment.sampler}"
    if segment.sampler == "random_allocation":
        require(
            segment.allocation == ALLOCATION,
            f"{value}, allocation={segment.allocation}",
            "dpx has no bound for units that are allocated by another function",
            _FIX,
        )
        start, stated = (
            _stated(number, value, what) for number, what in ((segment.allocation_from, "first step"), (segment.allocation_steps, "steps"))
        )
        require(stated == length, f"{value}, allocation_steps={stated}", f"q={segment.q:g} gives epochs of {length} steps", _FIX)
        require(
            all(first >= start >= 0 for first, _ in segment.steps),
            f"{value}, allocation_from={start}",
            "comes after one of its steps",
            _FIX,
        )
        require(apart == 1, f"{value}, rows_per_unit={apart}", "no bound is known for rows of a unit that are allocated apart", _FIX)
        rate = 1 / length
    noise, kind = _joint(segment) / apart, _kind(segment.sampler)
    return Release(noise_multiplier=noise, sampling_probability=rate, kind=kind, is_discrete=_is_discrete(segment)), length, start


def _of_package(segment: Segment) -> Release:
    """Returns the charge of a step whose whole event a package defined, for one example.

    The ledger holds the event, so the package is not needed.
    """
    require(
        rows_clipped_apart(segment) == 1 and all(getattr(segment, name) is None for name in AUXILIARY),
        f"the event that {segment.by} gives",
        "covers one clipped sum a step and units of one example only",
        "Use privacy.unit=row or privacy.unit_mode=sample_units, telemetry=secret and a clip that releases nothing",
    )
    return Release(noise_multiplier=segment.noise_multiplier, kind="package", event=segment.event)


def _of_rows(segment: Segment) -> Release:
    """Returns the charge of one micro-batch's draw, in a step whose rows are released one by one."""
    is_known = segment.sampler == "poisson" and segment.rows_per_unit == 1 and all(getattr(segment, name) is None for name in AUXILIARY)
    require(
        is_known,
        f"noise=forward_gaussian with sampler={segment.sampler}",
        "rows released one by one are accounted for independent draws of single rows, and no other release beside them",
        "Use sampler=poisson, privacy.rows_per_unit_max=1, telemetry=secret and clip=flat",
    )
    q = segment.q / _stated(segment.micro_batches, f"noise={segment.noise}", "micro-batches")
    return Release(noise_multiplier=segment.noise_multiplier, sampling_probability=q, kind="slot_revealed")


def _stated(number: int | None, value: str, what: str) -> int:
    """Returns a number that the segment of such a step has; raises `ConfigError` if it does not."""
    if number is None:
        raise ConfigError(value, f"is charged without its number of {what}", _FIX)
    return number


def _release(segment: Segment) -> Release:
    kind = "group" if rows_clipped_apart(segment) > 1 else segment.sampler
    require(
        kind != "group" or segment.sampler == "poisson",
        f"sampler={segment.sampler}",
        "does not have an event for units of several rows",
        "Use sampler=poisson, or privacy.unit_mode=sample_units",
    )
    return Release(
        noise_multiplier=_joint(segment),
        sampling_probability=segment.q,
        kind=_kind(kind),
        size=segment.size,
        cap=segment.cap,
        sample_size=segment.expected_batch_size if kind == "fixed_size" else None,
        rows_per_unit=rows_clipped_apart(segment),
        is_discrete=_is_discrete(segment),
    )


def _kind(name: str) -> Kind:
    """Returns the kind of a release. `Release` refuses a name that the table of events does not have."""
    return cast(Kind, name)


def _is_discrete(segment: Segment) -> bool:
    return segment.noise == "discrete_gaussian"


def _joint(segment: Segment) -> float:
    """Returns the joint noise multiplier of a step, whose releases all share one draw and so are one release."""
    return joint(segment.noise_multiplier, *(getattr(segment, name) for name in AUXILIARY))
