"""Declares the releases that a ledger enters, and their run-length encoding, which statements hold."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Literal

from dpx.files.records import described, record

# The kinds of release that are charged per epoch.
IN_EPOCHS = ("shuffled", "deterministic", "balls_in_bins")

# The function of (secret, epoch, unit) that `sampler=random_allocation` places units by (`dpx.sampler.random_allocation`), and its version:
# epochs of any other have no bound.
ALLOCATION = "philox4x64/1"

Spans = tuple[tuple[int, int], ...]


@record
class StepCost:
    """The facts that decide the cost of a step and are the same for all steps of a run, as its plan declares them.

    The plan is in the ledger (`dpx.privacy.lines.Plan`).
    """

    noise_multiplier: float = described("Standard deviation of the noise on the sum, relative to `clipping_norm`.")
    sampler: str = described("How the units of a step were drawn, by the name in the table of events.")
    size: int | None = described("The public number N of rows or units to draw from; null for a sampler without it.", default=None)
    rows_per_unit: int = described("The most rows that one protected unit has.", default=1)
    unit_mode: str = described(
        'Whether q, `size` and the clipping norm are of rows ("group") or units ("sample_units", "one_row").', default="group"
    )
    count_noise_multiplier: float | None = described("Noise multiplier of an adaptive clip's count; null without one.", default=None)
    telemetry_noise_multiplier: float | None = described("Noise multiplier of released telemetry; null if it is secret.", default=None)
    noise: Literal["gaussian", "discrete_gaussian", "forward_gaussian"] = described(
        "Distribution of the noise: on the sum, or on each row's vector in the forward pass.", default="gaussian"
    )
    cycle: int | None = described("Number of groups that take turns under cyclic sampling; null under any other.", default=None)
    allocation: str | None = described("Keyed function, with its version, that allocates each unit to a step; null without.", default=None)
    micro_batches: int | None = described("Independent draws of a step that releases its rows one by one.", default=None)


@record
class LedgerEntry(StepCost):
    """The event of one step.

    `epoch_name` is that of the noise epoch (`dpx.privacy.lines.NoiseEpoch`): numbers start at 0 in every folder, also in a copy, but names
    are unique. `event` (`dpx.privacy.events`) and `by` (`dpx.statement.outside_code`) are set only where code of an external package
    takes part. With `noise` "forward_gaussian" a step is `micro_batches` independent draws, each at q / `micro_batches`, whose rows'
    vectors are released one by one with noise (`dpx.privacy.gaussian_losses`).
    """

    epoch: int = described("Number of the noise epoch, from 0 in every folder.")
    q: float = described("Probability with which a row or unit takes part in the step.")
    expected_batch_size: int = described("Expected number of rows or units of the step, by which its noisy sum is divided.")
    clipping_norm: float | None = described("Norm of every gradient after clipping, at most; null if each step has its own.")
    cap: int | None = described("The most rows or units that a truncated draw may have; null without a cap.", default=None)
    allocation_steps: int | None = described("Steps of an epoch in which each unit has one step; null without allocation.", default=None)
    allocation_from: int | None = described("The step from which epochs of that length are counted; null without allocation.", default=None)
    epoch_name: str = described("Random name of the noise epoch, which no other run or copy shares.", default="")
    event: str | None = described("The step's dp-accounting event as JSON text, if a package defines it.", default=None)
    by: str | None = described("The external packages that the step trusts, joined by +; null if all of it is dpx's own.", default=None)


@record
class Segment(LedgerEntry):
    """Equal events of one ledger, with the steps that they are charged for."""

    origin: str = described("Name of the ledger that the steps were first entered in.")
    steps: Spans = described("The steps, each as [first step, number of consecutive steps].")

    @property
    def count(self) -> int:
        """Returns the number of steps."""
        return sum(count for _, count in self.steps)

    @property
    def entry(self) -> LedgerEntry:
        """Returns the event of each of its steps."""
        return entry_in(self)

    def each(self) -> Iterator[int]:
        """Yields every step, in ascending order."""
        return (step for first, count in self.steps for step in range(first, first + count))


Segments = list[Segment]

_OF_ENTRY = tuple(field.name for field in dataclasses.fields(LedgerEntry))


def entry_in(longer: LedgerEntry) -> LedgerEntry:
    """Returns the event of a record, without the record's further fields."""
    return LedgerEntry(**of_entry(longer))


def of_entry(entry: LedgerEntry) -> dict[str, Any]:
    """Returns the fields of an event by name, without the further fields of a longer record."""
    return {name: getattr(entry, name) for name in _OF_ENTRY}


def encode(releases: Iterable[tuple[str, int, LedgerEntry]]) -> Segments:
    """Returns charged releases `(origin, step, entry)`, each once, as one segment for each event."""
    by_event: dict[tuple[str, LedgerEntry], set[int]] = {}
    for origin, step, entry in releases:
        by_event.setdefault((origin, entry), set()).add(step)
    return [Segment(origin=origin, **of_entry(entry), steps=_spans(sorted(steps))) for (origin, entry), steps in by_event.items()]


def _spans(steps: list[int]) -> Spans:
    spans: list[tuple[int, int]] = []
    for step in steps:
        if spans and step == sum(spans[-1]):
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((step, 1))
    return tuple(spans)


def decode(segments: Iterable[Segment]) -> Iterator[tuple[str, int, LedgerEntry]]:
    """Yields the releases that `encode` was given, each once."""
    for segment in segments:
        entry = segment.entry
        yield from ((segment.origin, step, entry) for step in segment.each())


def join(*branches: Iterable[Segment]) -> Segments:
    """Joins the charges of several branches: releases that they share (from a common parent) count once."""
    by_event: dict[tuple[str, LedgerEntry], list[tuple[int, int]]] = {}
    for segments in branches:
        for segment in segments:
            by_event.setdefault((segment.origin, segment.entry), []).extend(segment.steps)
    joined = []
    for (origin, entry), spans in by_event.items():
        # Of spans, not of steps: a plan has a few spans for many thousands of steps.
        union: list[tuple[int, int]] = []
        for first, count in sorted(spans):
            if union and first <= sum(union[-1]):
                before, most = union[-1]
                union[-1] = (before, max(most, first + count - before))
            elif count:
                union.append((first, count))
        if union:
            joined.append(Segment(origin=origin, **of_entry(entry), steps=tuple(union)))
    return joined


def without(segments: Iterable[Segment], *others: Iterable[Segment]) -> Segments:
    """Returns the charges that none of `others` holds."""
    held = {release for other in others for release in decode(other)}
    return encode(release for release in decode(segments) if release not in held)


def rows_clipped_apart(entry: StepCost) -> int:
    """Returns the number of clipped gradients of one step that one unit can be in: one if units were drawn."""
    return entry.rows_per_unit if entry.unit_mode == "group" else 1


def is_forward(entry: StepCost) -> bool:
    """Returns whether a step added its noise to each row's vector in the forward pass, and none to a sum."""
    return entry.noise == "forward_gaussian"


def left(plan: Segments, entered: Segments, ignored: Collection[str] = ("by",)) -> Segments:
    """Returns the steps of `plan` that `entered` does not hold with the same values of every field except the `ignored` ones."""
    names = [name for name in ("origin", *_OF_ENTRY) if name not in ignored]

    def facts(segment: Segment) -> tuple[Any, ...]:
        return tuple(getattr(segment, name) for name in names)

    held: dict[tuple[Any, ...], set[int]] = {}
    for segment in entered:
        held.setdefault(facts(segment), set()).update(segment.each())
    remaining = [(segment, [step for step in segment.each() if step not in held.get(facts(segment), ())]) for segment in plan]
    return [dataclasses.replace(segment, steps=_spans(steps)) for segment, steps in remaining if steps]


def until(segments: Segments, end: int) -> Segments:
    """Returns `segments` without the steps from `end` on."""
    kept = []
    for segment in segments:
        spans = tuple((first, min(count, end - first)) for first, count in segment.steps if first < end)
        if spans:
            kept.append(dataclasses.replace(segment, steps=spans))
    return kept


def steps_per_epoch(sampling_probability: float) -> int:
    """Returns ceil(1/q), whatever the rounding of the last bits of q = B/N."""
    return math.ceil(1 / sampling_probability * (1 - 1e-12))
