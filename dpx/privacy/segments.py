"""Releases as a ledger enters them, and their run-length encoding, which statements carry."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, fields
from typing import Any, Literal

from dpx.declaration import declaration, require

# One dictionary per event, with the steps that it cost.
Segments = list[dict[str, Any]]

# Fields of an entry that exist only where they say something: if code from outside the tree takes part, and for rows released one by one.
_ONLY_IF_SET = ("event", "by", "micro_batches")


@declaration
class LedgerEntry:
    """The event of one step. `noise_multiplier` is relative to `clipping_norm`, on the sum; `None` if each step has its own norm.

    `count_noise_multiplier` and `telemetry_noise_multiplier` are those of the values released beside the sum (`dpx.privacy.joint`). `size`,
    `cap` and `rows_per_unit` are for the samplers and units that need them (`dpx.privacy.events.Release`). `unit_mode` says whether q,
    `size` and the clipping norm are of rows ("group") or of whole units of up to `rows_per_unit` rows ("sample_units"). `epoch_name` is
    that of the noise epoch (`NoiseEpoch`): numbers start at 0 in every folder, also in a copy, but names are unique. `event` is the
    whole step's event if an external package defines one (`dpx.privacy.event_json`), and `by` names the packages that the step trusts
    (`dpx.claim.outside_code`); `None` if all of it is dpx's own. With `noise` "forward_gaussian" a step is `micro_batches` independent
    draws, each at q / `micro_batches`, whose rows' vectors are released one by one with noise (`dpx.privacy.revealed`).
    """

    epoch: int
    q: float
    noise_multiplier: float
    sampler: str
    expected_batch_size: int
    clipping_norm: float | None
    size: int | None = None
    cap: int | None = None
    rows_per_unit: int = 1
    unit_mode: str = "group"
    count_noise_multiplier: float | None = None
    telemetry_noise_multiplier: float | None = None
    noise: Literal["gaussian", "discrete_gaussian", "forward_gaussian"] = "gaussian"
    cycle: int | None = None
    epoch_name: str = ""
    event: str | None = None
    by: str | None = None
    micro_batches: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Every field by name, without the `_ONLY_IF_SET` ones that are not set."""
        return {name: value for name, value in asdict(self).items() if value is not None or name not in _ONLY_IF_SET}


def encode(releases: Iterable[tuple[str, int, LedgerEntry]]) -> Segments:
    """Charged releases, each once, as one dictionary per event with `steps` = `[[first, count], ...]`."""
    by_event: dict[tuple[str, LedgerEntry], set[int]] = {}
    for origin, step, entry in releases:
        by_event.setdefault((origin, entry), set()).add(step)
    return [{"origin": origin, **entry.as_json(), "steps": _spans(sorted(steps))} for (origin, entry), steps in by_event.items()]


def _spans(steps: list[int]) -> list[list[int]]:
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == sum(spans[-1]):
            spans[-1][1] += 1
        else:
            spans.append([step, 1])
    return spans


def decode(segments: Segments) -> Iterator[tuple[str, int, LedgerEntry]]:
    """The releases that `encode` was given, each once. Raises `ConfigError` for entries of another version of dpx that this one does not
    know: they may be releases with a cost."""
    names = {field.name for field in fields(LedgerEntry)}
    for segment in segments:
        unknown = sorted(segment.keys() - names - {"origin", "steps"})
        value = f"a ledger's {', '.join(unknown)}"
        require(not unknown, value, "unknown here, so that its cost is too", "Use the version of dpx that wrote it")
        entry = LedgerEntry(**{name: value for name, value in segment.items() if name in names})
        for first, count in segment["steps"]:
            yield from ((segment["origin"], step, entry) for step in range(first, first + count))


def join(*branches: Segments) -> Segments:
    """Several branches as one claim: releases that they share (those of a common parent) count once."""
    return encode(release for segments in branches for release in decode(segments))


def rows_clipped_apart(segment: dict[str, Any]) -> int:
    """The number of clipped gradients that one unit can be in: one if whole units were drawn and clipped."""
    return 1 if segment.get("unit_mode") == "sample_units" else segment["rows_per_unit"]


def is_forward(segment: dict[str, Any]) -> bool:
    """Whether a step added its noise to each row's vector in the forward pass, and none to a sum."""
    return segment.get("noise") == "forward_gaussian"


def left(plan: Segments, entered: Segments, ignored: Collection[str] = ("by",)) -> Segments:
    """The steps of `plan` that `entered` does not hold with the same values of every field except the `ignored` ones."""

    def facts(segment: dict[str, Any]) -> frozenset[Any]:
        return frozenset((key, value) for key, value in segment.items() if key != "steps" and key not in ignored and value is not None)

    held: dict[frozenset[Any], set[int]] = {}
    for segment in entered:
        held.setdefault(facts(segment), set()).update(_each(segment))
    remaining = [(segment, [step for step in _each(segment) if step not in held.get(facts(segment), ())]) for segment in plan]
    return [segment | {"steps": _spans(steps)} for segment, steps in remaining if steps]


def _each(segment: dict[str, Any]) -> Iterator[int]:
    return (step for first, count in segment["steps"] for step in range(first, first + count))


def until(segments: Segments, end: int) -> Segments:
    """`segments` without the steps from `end` on."""
    kept = []
    for segment in segments:
        spans = [[first, min(count, end - first)] for first, count in segment["steps"] if first < end]
        if spans:
            kept.append(segment | {"steps": spans})
    return kept
