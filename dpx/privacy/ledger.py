"""What was released, durably: one line per step, synced before anything of that step can be seen.

The file is text. Its first line names the ledger; a line of JSON states the event that the following steps cost, and each step is one
line with its number. A line counts once its line feed is on disk, so a torn tail is a step that nobody saw.

A release is identified by (ledger it was first entered in, noise epoch, event, step): replayed with the same epoch it is the
same bits and charged once; entered in several epochs or branches it is charged each time.
"""

import json
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

import dp_accounting

from dpx.declaration import Refused, declaration, require
from dpx.privacy import events
from dpx.privacy.events import Release
from dpx.privacy.joint import joint
from dpx.randomness import sync_directory
from dpx.sampler import IN_PASSES, steps_per_pass

FORMAT = 1

# Noise multipliers of what a step releases beside the gradient's sum.
BESIDE = ("count_noise_multiplier", "telemetry_noise_multiplier")


@declaration
class LedgerEntry:
    """The event of one step. `noise_multiplier` is relative to `clipping_norm`, on the sum; `None` where the norm is each step's own.

    `count_noise_multiplier` and `telemetry_noise_multiplier` are those of what is released beside the sum (`dpx.privacy.joint`).
    `size`, `cap` and `rows_per_unit` are for the samplers and units that need them (`dpx.privacy.events.Release`). `unit_mode` says
    whether q, `size` and the clipping norm are of rows ("group") or of whole units of up to `rows_per_unit` rows ("sample_units").
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
    noise: Literal["gaussian", "discrete_gaussian"] = "gaussian"
    cycle: int | None = None


Runs = list[dict[str, Any]]


class Ledger:
    """An append-only ledger at `path`, created durably when absent. Raises `Refused` for a file that is no ledger."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._handle: int | None = None
        self._header: tuple[str, LedgerEntry] | None = None
        self._entered: list[tuple[str, int, LedgerEntry]] = []
        self._last: dict[int, int] = {}
        if not self.path.exists():
            self._create()
        self._read()

    def append(self, step: int, entry: LedgerEntry) -> None:
        """Enters `step`; on disk when this returns."""
        self._write([(self.identity, step, entry)])

    def inherit(self, parent: "Ledger") -> None:
        """Takes over every release in `parent`, steps after a fork's checkpoint included, under their own names."""
        known = set(self._entered)
        self._write([release for release in parent._entered if release not in known])

    def entries(self) -> Iterator[tuple[int, LedgerEntry]]:
        """`(step, entry)` in the order entered, inherited ones included."""
        return ((step, entry) for _, step, entry in self._entered)

    def last_step(self, epoch: int) -> int | None:
        """The highest step of this ledger's own `epoch`; inherited entries do not count."""
        return self._last.get(epoch)

    def runs(self) -> Runs:
        """Run-length encoding of `charged` releases: what the statement carries."""
        return encode(self._entered)

    def _create(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with open(draft, "w") as file:
            file.write(json.dumps({"ledger": secrets.token_hex(8), "format": FORMAT}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self.path)
        sync_directory(self.path.parent)

    def _read(self) -> None:
        *whole, torn = self.path.read_bytes().split(b"\n")
        self._length = self.path.stat().st_size - len(torn)
        try:
            first = json.loads(whole[0])
            self.identity = str(first["ledger"])
            require(
                first["format"] == FORMAT,
                self.path.name,
                f"is in format {first['format']}, not {FORMAT}",
                "Use the version of dpx that wrote it",
            )
            for line in whole[1:]:
                self._take(json.loads(line))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            if isinstance(error, Refused):
                raise
            raise Refused(self.path.name, "is not a ledger, or was changed by hand", "Restore the file") from error

    def _take(self, line: Any) -> None:
        if isinstance(line, dict):
            self._header = (line.pop("origin"), LedgerEntry(**line))
            return
        if self._header is None or isinstance(line, bool) or not isinstance(line, int):
            raise ValueError(line)
        self._remember(self._header[0], line, self._header[1])

    def _remember(self, origin: str, step: int, entry: LedgerEntry) -> None:
        self._entered.append((origin, step, entry))
        if origin == self.identity:
            self._last[entry.epoch] = max(step, self._last.get(entry.epoch, -1))

    def _write(self, releases: Iterable[tuple[str, int, LedgerEntry]]) -> None:
        """All of `releases` in one synced write; after a failure the next write starts from the last whole line."""
        releases, header, lines = list(releases), self._header, []
        for origin, step, entry in releases:
            if header != (origin, entry):
                header = (origin, entry)
                lines.append(json.dumps({"origin": origin, **asdict(entry)}))
            lines.append(str(step))
        data = "".join(line + "\n" for line in lines).encode()
        if self._handle is None:
            self._handle = os.open(self.path, os.O_WRONLY)
            os.ftruncate(self._handle, self._length)
        try:
            written = os.pwrite(self._handle, data, self._length)
            if written != len(data):
                raise OSError(28, "No space left on device", str(self.path))
            os.fsync(self._handle)
        except OSError:
            self.close()
            raise
        self._length, self._header = self._length + len(data), header
        for release in releases:
            self._remember(*release)

    def close(self) -> None:
        """Gives the file handle back; a later append opens it again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __del__(self):
        self.close()


def encode(releases: Iterable[tuple[str, int, LedgerEntry]]) -> Runs:
    """Charged releases, each once, as one dictionary per event with `steps` = `[[first, count], ...]`."""
    by_event: dict[tuple[str, LedgerEntry], set[int]] = {}
    for origin, step, entry in releases:
        by_event.setdefault((origin, entry), set()).add(step)
    return [{"origin": origin, **asdict(entry), "steps": _spans(sorted(steps))} for (origin, entry), steps in by_event.items()]


def _spans(steps: list[int]) -> list[list[int]]:
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == sum(spans[-1]):
            spans[-1][1] += 1
        else:
            spans.append([step, 1])
    return spans


def decode(runs: Runs) -> Iterator[tuple[str, int, LedgerEntry]]:
    """The releases that `encode` was given, each once."""
    names = {field.name for field in fields(LedgerEntry)}
    for run in runs:
        entry = LedgerEntry(**{name: value for name, value in run.items() if name in names})
        for first, count in run["steps"]:
            yield from ((run["origin"], step, entry) for step in range(first, first + count))


def join(*branches: Runs) -> Runs:
    """Several branches as one claim: releases they share (a common parent's) count once."""
    return encode(release for runs in branches for release in decode(runs))


def releases(runs: Runs) -> list[tuple[Release, int]]:
    """What an accountant is charged for `runs`.

    Under cyclic sampling a row is drawn from only when its group comes round: the busiest group's steps are charged. A sampler without
    amplification costs one Gaussian release per pass over the data that was started, in each noise epoch
    (a partial pass counts whole), at the smallest noise of that pass.
    """
    charges: list[tuple[Release, int]] = []
    passes: dict[tuple[str, int, int], Release] = {}
    for run in runs:
        if run["sampler"] in IN_PASSES:
            _enter_passes(run, passes)
        elif run["sampler"] == "cyclic_poisson":
            charges.append((_release(run | _as_poisson(run)), _most_of_a_group(run)))
        else:
            charges.append((_release(run), sum(count for _, count in run["steps"])))
    return events.merge(charges + [(release, 1) for release in passes.values()])


def _as_poisson(run: dict[str, Any]) -> dict[str, Any]:
    """When its group comes round, a row is drawn with `cycle` times the probability."""
    return {"sampler": "poisson", "q": min(1.0, run["q"] * run["cycle"])}


def _most_of_a_group(run: dict[str, Any]) -> int:
    """How often the busiest of the groups came round: no row can have taken part more often."""
    seen = [0] * run["cycle"]
    for first, count in run["steps"]:
        for group in range(run["cycle"]):
            seen[group] += len(range(first + (group - first) % run["cycle"], first + count, run["cycle"]))
    return max(seen)


def _enter_passes(run: dict[str, Any], passes: dict[tuple[str, int, int], Release]) -> None:
    # Rows of one unit may fall into one batch, so its k rows move one release by up to k times the norm.
    release = Release(noise_multiplier=_joint(run) / rows_clipped_apart(run), kind=run["sampler"], is_discrete=_is_discrete(run))
    length = steps_per_pass(run["q"])
    for first, count in run["steps"]:
        for number in range(first // length, (first + count - 1) // length + 1):
            place = (run["origin"], run["epoch"], number)
            passes[place] = min(release, passes.get(place, release), key=lambda known: known.noise_multiplier)


def rows_clipped_apart(run: dict[str, Any]) -> int:
    """Into how many clipped gradients one unit can fall: one where whole units were drawn and clipped."""
    return 1 if run.get("unit_mode") == "sample_units" else run["rows_per_unit"]


def _release(run: dict[str, Any]) -> Release:
    kind = "group" if rows_clipped_apart(run) > 1 else run["sampler"]
    require(
        kind != "group" or run["sampler"] == "poisson",
        f"sampler={run['sampler']}",
        "has no event for units of several rows",
        "Use sampler=poisson, or privacy.unit_mode=sample_units",
    )
    return Release(
        noise_multiplier=_joint(run),
        sampling_probability=run["q"],
        kind=kind,
        size=run["size"],
        cap=run["cap"],
        sample_size=run["expected_batch_size"] if kind == "fixed_size" else None,
        rows_per_unit=rows_clipped_apart(run),
        is_discrete=_is_discrete(run),
    )


def _is_discrete(run: dict[str, Any]) -> bool:
    return run.get("noise") == "discrete_gaussian"


def _joint(run: dict[str, Any]) -> float:
    """Everything that a step releases shares its draw, so it is one release."""
    return joint(run["noise_multiplier"], *(run.get(name) for name in BESIDE))


def charges(runs: Runs, adjacency: str = "zero_out", accountant: str = "pld") -> dp_accounting.DpEvent:
    """The composed dp-accounting event of everything in `runs`; raises `Refused` where no bound is known."""
    return events.composed(releases(runs), adjacency, accountant)
