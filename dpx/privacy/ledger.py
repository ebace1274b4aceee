"""What was released, durably: one line per step, synced before anything of that step can be seen.

The file is a chain (`dpx.privacy.chain`) of JSON lines. `{"origin", ...}` states the event that each of the following steps is charged, and
a step is a line with its number. `{"epoch": ...}` opens a noise epoch, `{"sum": ..., "step": ...}` holds the checksum of what that step's
noise was added to, `{"plan": ...}` what was declared before the first step, `{"units": ...}` which units the steps protect
(`dpx.privacy.unit_facts`), `{"chosen_after_results": ...}` the settings that were changed later, `{"trial_of": ...}` a search that the run
is a trial of, `{"from": ...}` a run or file that this one starts from or was forked from (`dpx.privacy.origins`), and `{"verdict": ...}`
the result of the run's own audit. `{"sealed": ...}` holds checksums of a statement or of configs that are written next, `{"stated": ...}`
that of a statement that was written (`dpx.claim.seals`).

A release is identified by (ledger it was first entered in, noise epoch by number and name, event, step): a replay with the same key gives
the same bits and is charged once; an entry in several epochs or branches is charged each time.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dpx.declaration import ConfigError, declaration, require
from dpx.privacy import events
from dpx.privacy.chain import Chain, Mark
from dpx.privacy.events import Release
from dpx.privacy.joint import joint
from dpx.privacy.origins import Origin, charged, merged
from dpx.privacy.segments import LedgerEntry, Segments, encode, is_forward, join
from dpx.privacy.segments import decode as decode
from dpx.privacy.segments import rows_clipped_apart as rows_clipped_apart
from dpx.privacy.segments import until as until
from dpx.privacy.unit_facts import UnitFacts
from dpx.sampler import IN_EPOCHS, steps_per_epoch

FORMAT = 4

# The fields of a verdict that decide, and the fields that a statement names.
_OF_VERDICT = ("passes", "primary", "others")

# Noise multipliers of the values that a step releases beside the gradient's sum.
AUXILIARY = ("count_noise_multiplier", "telemetry_noise_multiplier")


@declaration
class NoiseEpoch:
    """Steps whose noise and draws come from one root secret, from `from_step` on.

    `name` is public and random. `start` is the mark of the checkpoint it starts from, `None` for a fresh state. `secret_tag` and
    `secret_place` tell whether the secret on disk is the one that was drawn, at the place where it was drawn: in a copy of the folder the
    place differs, and two folders that resume with one key would use it on two sums. `fingerprint` identifies what must be unchanged to
    repeat a step.
    """

    number: int
    name: str
    from_step: int
    start: dict[str, Any] | None
    secret_tag: str
    secret_place: int | None
    fingerprint: dict[str, Any]
    why: str


@declaration
class TrialOf:
    """The search that a run is a trial of: the name of its study, and how it charges the choice among its trials (`dpx.tuning`)."""

    study: str
    charge: str


class Ledger:
    """An append-only ledger at `path`, created durably if missing. Raises `ConfigError` for a file that is not a ledger.

    `statements` are checksums of the statements that may lie in the run's folder, `configs` those of its configs (`dpx.claim.seals`).
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.noise_epochs: list[NoiseEpoch] = []
        self.plan: dict[str, Any] | None = None
        self.chosen_after_results: list[str] = []
        self.origins: list[Origin] = []
        self.verdict: dict[str, Any] | None = None
        # Every record of units that steps here were entered with; `None` for steps whose units were not noted.
        self.units: list[UnitFacts | None] = []
        self.trials: list[TrialOf] = []
        self.statements: set[str] = set()
        self.configs: set[str] = set()
        self._sums: dict[tuple[str, int], str] = {}
        self._header: tuple[str, LedgerEntry] | None = None
        self._entered: list[tuple[str, int, LedgerEntry]] = []
        self._known: set[tuple[str, int, LedgerEntry]] = set()
        self._chain = Chain(self.path, {"ledger": FORMAT})
        self.identity = self._chain.name
        self._read(self._chain.lines)

    @property
    def mark(self) -> Mark:
        """The mark after everything entered so far."""
        return self._chain.mark

    def missing(self, mark: Mark | None) -> str | None:
        """The reason, as text, why the ledger does not contain `mark`; `None` if it does."""
        return self._chain.missing(mark)

    def append(self, step: int, entry: LedgerEntry) -> None:
        """Enters `step`; on disk when this returns."""
        self._enter([(self.identity, step, entry)])

    def open_noise_epoch(self, epoch: NoiseEpoch) -> None:
        """Opens `epoch`: later steps belong to it; on disk when this returns."""
        self._add({"epoch": asdict(epoch)})

    def record_sum(self, epoch_name: str, step: int, checksum: str) -> None:
        """Notes what the noise of an epoch's `step` was added to; on disk when this returns."""
        self._add({"sum": checksum, "step": step, "epoch_name": epoch_name})

    def declare_plan(self, plan: dict[str, Any]) -> None:
        """Notes what was planned before the first step."""
        self._add({"plan": plan})

    def note_units(self, facts: UnitFacts) -> None:
        """Notes which units the following steps protect, if that is new; on disk when this returns."""
        unknown: list[UnitFacts | None] = [None] if self._entered and not self.units else []
        self._add_units(*unknown, *([] if facts in self.units else [facts]))

    def note_origins(self, origins: Iterable[Origin]) -> None:
        """Notes origins of the starting parameters that are new, or whose record became worse; on disk when this returns."""
        worse = [origin for origin in merged(self.origins, origins) if origin not in self.origins]
        if worse:
            self._add(*({"from": origin.as_line()} for origin in worse))

    def note_trial(self, study: str, charge: str) -> None:
        """Notes that this run is a trial of the search `study`, which later commands cannot change; on disk when this returns."""
        trial = TrialOf(study=study, charge=charge)
        if trial not in self.trials:
            self._add({"trial_of": asdict(trial)})

    def note_choices(self, names: list[str]) -> None:
        """Notes values of the plan that were chosen after results had been seen."""
        self._add({"chosen_after_results": names})

    def note_verdict(self, verdict: dict[str, Any]) -> None:
        """Notes the result of the run's audit (`dpx.audit.verdict`), which is valid until the next one is noted. On disk when this
        returns."""
        self._add({"verdict": {name: verdict[name] for name in _OF_VERDICT}})

    def seal_statement(self, checksum: str) -> None:
        """Notes the checksum of a statement that is about to be written; on disk when this returns."""
        self._add({"sealed": {"statement": checksum}})

    def note_stated(self, checksum: str) -> None:
        """Notes that the statement with that checksum was written: no older statement may be there from now on."""
        self._add({"stated": checksum})

    def seal_configs(self, checksums: Iterable[str]) -> None:
        """Notes the checksums of configs that are about to be written, if they are new; on disk when this returns."""
        new = [checksum for checksum in checksums if checksum not in self.configs]
        if new:
            self._add({"sealed": {"configs": new}})

    def sum_of(self, epoch_name: str, step: int) -> str | None:
        """The checksum that was noted for `step`; `None` if no result of that step left the process that computed it."""
        return self._sums.get((epoch_name, step))

    def holds(self, step: int, entry: LedgerEntry) -> bool:
        """Whether exactly this release was entered here."""
        return (self.identity, step, entry) in self._known

    def entries(self) -> Iterator[tuple[int, LedgerEntry]]:
        """`(step, entry)` in the order entered."""
        return ((step, entry) for _, step, entry in self._entered)

    def steps(self, epoch: int) -> set[int]:
        """Steps of the epoch with number `epoch`."""
        return {step for _, step, entry in self._entered if entry.epoch == epoch}

    @property
    def was_seeded(self) -> bool:
        """Whether some noise of this run came from a seed of the config."""
        return any(epoch.secret_place is None for epoch in self.noise_epochs)

    @property
    def data(self) -> list[str | None]:
        """Checksums of the prepared data that its steps drew from; `None` for unknown data."""
        return list(dict.fromkeys(epoch.fingerprint.get("data") for epoch in self.noise_epochs)) or [None]

    def own_segments(self) -> Segments:
        """Run-length encoding of the releases entered here."""
        return encode(self._entered)

    def segments_of_state(self) -> Segments:
        """`own_segments`, and those of the runs that this one was forked from: all that an audit's canaries took part in."""
        return join(self.own_segments(), *(list(origin.segments) for origin in self.origins if origin.is_fork))

    def segments(self) -> Segments:
        """Everything that is charged: `own_segments`, and those of the runs that this one starts from or was forked from."""
        before = charged(self.origins)
        return join(self.own_segments(), *before) if before else self.own_segments()

    def _add_units(self, *units: UnitFacts | None) -> None:
        if units:
            self._add(*({"units": None if facts is None else facts.as_json()} for facts in units))

    def _read(self, lines: Iterable[Any]) -> None:
        try:
            for line in lines:
                self._take(line)
        except Exception as error:
            raise ConfigError(self.path, "is not a ledger, or was changed by hand", "Restore the file") from error

    def _take(self, line: Any) -> None:
        if isinstance(line, dict):
            self._take_facts(line)
        elif self._header is None or isinstance(line, bool) or not isinstance(line, int):
            raise ValueError(line)
        else:
            release = (self._header[0], line, self._header[1])
            self._entered.append(release)
            self._known.add(release)

    def _take_facts(self, line: dict[str, Any]) -> None:
        if "origin" in line:
            event = dict(line)
            self._header = (event.pop("origin"), LedgerEntry(**event))
        elif "epoch" in line:
            self.noise_epochs.append(NoiseEpoch(**line["epoch"]))
        elif "sum" in line:
            self._sums[line["epoch_name"], line["step"]] = line["sum"]
        elif "plan" in line:
            self.plan = line["plan"]
        elif "units" in line:
            self.units.append(None if line["units"] is None else UnitFacts.from_json(line["units"], self.path))
        elif "chosen_after_results" in line:
            self.chosen_after_results += line["chosen_after_results"]
        elif "trial_of" in line:
            self.trials.append(TrialOf(**line["trial_of"]))
        elif "from" in line:
            self.origins = merged(self.origins, [Origin(**line["from"])])
        elif "verdict" in line:
            self.verdict = line["verdict"]
        elif "sealed" in line:
            self.statements |= {line["sealed"]["statement"]} if "statement" in line["sealed"] else set()
            self.configs.update(line["sealed"].get("configs", ()))
        elif "stated" in line:
            self.statements = {line["stated"]}
        else:
            raise ValueError(line)

    def _enter(self, releases: list[tuple[str, int, LedgerEntry]]) -> None:
        header, lines = self._header, []
        for origin, step, entry in releases:
            if header != (origin, entry):
                header = (origin, entry)
                lines.append({"origin": origin, **entry.as_json()})
            lines.append(step)
        self._add(*lines)

    def _add(self, *lines: Any) -> None:
        self._chain.append(lines)
        self._read(lines)

    def close(self) -> None:
        """Closes the file handle; a later append opens it again."""
        self._chain.close()


def releases(segments: Segments) -> list[tuple[Release, int]]:
    """The charges of `segments`, for an accountant.

    Under cyclic sampling a row can be drawn only in the steps of its group: the steps of the busiest group are charged. A sampler without
    amplification is charged one Gaussian release per epoch begun in each noise epoch (a partial epoch counts as a whole one),
    at the smallest noise of that epoch.
    """
    charges: list[tuple[Release, int]] = []
    by_epoch: dict[tuple[str, int, str, int], Release] = {}
    for segment in segments:
        if segment.get("event") is not None:
            charges.append((_of_package(segment), sum(count for _, count in segment["steps"])))
        elif is_forward(segment):
            charges.append((_of_rows(segment), segment["micro_batches"] * sum(count for _, count in segment["steps"])))
        elif segment["sampler"] in IN_EPOCHS:
            _enter_epochs(segment, by_epoch)
        elif segment["sampler"] == "cyclic_poisson":
            # In the steps of its group, a row is drawn with `cycle` times the probability.
            as_poisson = segment | {"sampler": "poisson", "q": min(1.0, segment["q"] * segment["cycle"])}
            charges.append((_release(as_poisson), _most_of_a_group(segment)))
        else:
            charges.append((_release(segment), sum(count for _, count in segment["steps"])))
    return events.merge(charges + [(release, 1) for release in by_epoch.values()])


def _of_package(segment: dict[str, Any]) -> Release:
    """The charge of a step whose whole event a package defined, for one example; the ledger holds the event, so the package is not
    needed."""
    require(
        rows_clipped_apart(segment) == 1 and all(segment.get(name) is None for name in AUXILIARY),
        f"the event that {segment.get('by')} gives",
        "is that of one clipped sum and of units that are one example",
        "Use privacy.unit=row or privacy.unit_mode=sample_units, telemetry=secret and a clip that releases nothing",
    )
    return Release(noise_multiplier=segment["noise_multiplier"], kind="package", event=segment["event"])


def _of_rows(segment: dict[str, Any]) -> Release:
    """One micro-batch's draw of a step whose rows are released one by one."""
    is_known = segment["sampler"] == "poisson" and segment["rows_per_unit"] == 1 and all(segment.get(name) is None for name in AUXILIARY)
    require(
        is_known,
        f"noise=forward_gaussian with sampler={segment['sampler']}",
        "rows released one by one are accounted for independent draws of single rows, and no other release beside them",
        "Use sampler=poisson, privacy.rows_per_unit_max=1, telemetry=secret and clip=flat",
    )
    q = segment["q"] / segment["micro_batches"]
    return Release(noise_multiplier=segment["noise_multiplier"], sampling_probability=q, kind="slot_revealed")


def _most_of_a_group(segment: dict[str, Any]) -> int:
    """The number of steps of the busiest group: no row can have taken part in more."""
    steps_of_group = [0] * segment["cycle"]
    for first, count in segment["steps"]:
        for group in range(segment["cycle"]):
            steps_of_group[group] += len(range(first + (group - first) % segment["cycle"], first + count, segment["cycle"]))
    return max(steps_of_group)


def _enter_epochs(segment: dict[str, Any], by_epoch: dict[tuple[str, int, str, int], Release]) -> None:
    # Rows of one unit may fall into one batch, so its k rows move one release by up to k times the norm.
    release = Release(
        noise_multiplier=_joint(segment) / rows_clipped_apart(segment), kind=segment["sampler"], is_discrete=_is_discrete(segment)
    )
    length = steps_per_epoch(segment["q"])
    for first, count in segment["steps"]:
        for number in range(first // length, (first + count - 1) // length + 1):
            place = (segment["origin"], segment["epoch"], segment.get("epoch_name", ""), number)
            by_epoch[place] = min(release, by_epoch.get(place, release), key=lambda known: known.noise_multiplier)


def _release(segment: dict[str, Any]) -> Release:
    kind = "group" if rows_clipped_apart(segment) > 1 else segment["sampler"]
    require(
        kind != "group" or segment["sampler"] == "poisson",
        f"sampler={segment['sampler']}",
        "has no event for units of several rows",
        "Use sampler=poisson, or privacy.unit_mode=sample_units",
    )
    return Release(
        noise_multiplier=_joint(segment),
        sampling_probability=segment["q"],
        kind=kind,
        size=segment["size"],
        cap=segment["cap"],
        sample_size=segment["expected_batch_size"] if kind == "fixed_size" else None,
        rows_per_unit=rows_clipped_apart(segment),
        is_discrete=_is_discrete(segment),
    )


def _is_discrete(segment: dict[str, Any]) -> bool:
    return segment.get("noise") == "discrete_gaussian"


def _joint(segment: dict[str, Any]) -> float:
    """The joint noise multiplier of a step: all its releases share its draw, so they are one release."""
    return joint(segment["noise_multiplier"], *(segment.get(name) for name in AUXILIARY))
