"""Declares the lines of a ledger: one record for each kind of line, distinguished by `kind` alone.

To enter something new, declare its line here, add it to `Line` and handle it in `Ledger` (`dpx.privacy.ledger`).
"""

import dataclasses
from typing import Any, Literal

from dpx.files.records import described, from_json, record
from dpx.privacy.declared_privacy import UnitFacts
from dpx.privacy.hash_chain import Mark
from dpx.privacy.origins import Origin
from dpx.privacy.segments import LedgerEntry, StepCost


@record
class StartFacts:
    """The checkpoint that a noise epoch starts from."""

    ledger: Mark = described("The ledger line that the checkpoint follows from.")
    epoch: str = described("Name of the noise epoch of the checkpoint's last step.")
    values: dict[str, str] = described("Checksum of each part of the state.")


@record
class NoiseEpoch:
    """Steps whose noise and draws come from one root secret, from `from_step` on.

    `secret_tag` and `secret_place` tell whether the secret on disk is the one that was drawn, at the place where it was drawn: in a copy of
    the folder the place differs, and two folders that resume with one key would use it on two sums.
    """

    number: int = described("Number of the epoch, from 0 in every folder.")
    name: str = described("Public random name of the epoch.")
    from_step: int = described("The first step of the epoch.")
    start: StartFacts | None = described("The checkpoint it starts from; null for a fresh state.")
    secret_tag: str = described("Tag of the root secret, by which a lost or changed one is found.")
    secret_place: int | None = described("Place of the root secret on disk, by which a copy is found; null for a secret from a seed.")
    fingerprint: dict[str, Any] = described("What must be unchanged to repeat a step.")
    why: str = described("Why the epoch was opened.")


@record
class TrialOf:
    """The search that a run is a trial of (`dpx.claim.study`)."""

    study: str = described("Name of the study.")
    charge: str = described("How the study charges the choice among its trials.")


@record
class Part:
    """One part of a config as plain data: the part of a package may have further fields."""

    values: dict[str, Any] = described("Every field with its value.")
    at_default: tuple[str, ...] = described("The fields that have their default value.")


@record
class PlanParts:
    """The parts of a config that decide the privacy statement."""

    noise: Part = described("How the noise was declared.")
    privacy: Part = described("Delta, unit and neighbouring relation.")
    accountant: Part = described("The accountant of the headline.")
    audit: Part = described("The audit in the run.")


@record
class Plan:
    """The declarations that decide the cost of every step, made before the first step; all null for a run without privacy."""

    step: StepCost | None = described("What all steps share.", default=None)
    steps: int | None = described("The planned number of steps.", default=None)
    batch_sizes: tuple[tuple[int, int], ...] = described(
        "[expected batch size, number of steps] of each stretch of the schedule.", default=()
    )
    declared: PlanParts | None = described("The parts of the config that decide the claim.", default=None)


@record
class AuditBound:
    """A lower bound on epsilon by an audit, beside the claimed epsilon at the same delta; infinite values are null on disk."""

    score: str = described("What the canaries were scored by.")
    estimator: str = described("How the bound follows from the guesses.")
    guesses: int = described("Number of canaries that were guessed to be in or out.")
    correct: int = described("Number of guesses that were right.")
    delta: float = described("Delta of the bound and of the claim.")
    error: float | None = described("Probability that the bound is wrong; null of an estimate, which proves nothing.")
    epsilon: float | None = described("The lower bound.")
    claim: float | None = described("Epsilon that is claimed at this delta.")
    guarantee: bool = described("Whether the bound holds for this number of guesses; if not, it decides nothing.")
    refutes: bool = described("Whether the bound exceeds the claim, so that the claim is false.")


@record
class Verdict:
    """The bounds that decide the result of an audit, which passes if none exceeds the claimed epsilon."""

    passes: bool = described("Whether no bound exceeds the claim.")
    primary: AuditBound = described("The bound that was declared beforehand.")
    others: tuple[AuditBound, ...] = described("All other bounds, which share one small probability of error.")


def decisive(document: dict[str, Any]) -> Verdict:
    """Returns the bounds that decide, from the complete result of an audit (`dpx.audit.in_run`)."""
    return from_json(Verdict, {field.name: document[field.name] for field in dataclasses.fields(Verdict)}, "audit")


@record
class EventLine(LedgerEntry):
    """The event that is charged for each of the following steps."""

    kind: Literal["event"] = "event"
    origin: str = described("Name of the ledger that the steps were first entered in.")


@record
class StepLine:
    """One step, charged by the last `EventLine`."""

    kind: Literal["step"] = "step"
    step: int = described("Number of the step.")


@record
class EpochLine:
    """The opening of a noise epoch."""

    kind: Literal["epoch"] = "epoch"
    epoch: NoiseEpoch = described("The epoch.")


@record
class SumLine:
    """The checksum of the sum to which a step's noise was added."""

    kind: Literal["sum"] = "sum"
    sum: str = described("The checksum.")
    step: int = described("Number of the step.")
    epoch_name: str = described("Name of its noise epoch.")


@record
class PlanLine:
    """The plan that was declared before the first step."""

    kind: Literal["plan"] = "plan"
    plan: Plan = described("The plan.")


@record
class UnitsLine:
    """The units that the following steps protect."""

    kind: Literal["units"] = "units"
    units: UnitFacts | None = described("The record of the units; null of steps whose units were not noted.")


@record
class ChoicesLine:
    """The settings of the plan that were changed after results had been seen."""

    kind: Literal["chosen_after_results"] = "chosen_after_results"
    chosen_after_results: tuple[str, ...] = described("Names of the settings.")


@record
class TrialLine:
    """The search of which the run is a trial."""

    kind: Literal["trial_of"] = "trial_of"
    trial_of: TrialOf = described("The search.")


@record
class OriginLine:
    """A run or a file that this run starts from or was forked from."""

    kind: Literal["begins_from"] = "begins_from"
    begins_from: Origin = described("The run or file, with its charges.")


@record
class SentLine:
    """Who is given protected values from here on: metrics that were computed without noise."""

    kind: Literal["sent"] = "sent"
    sent_to: tuple[str, ...] = described("Names of the services and callbacks.")


@record
class VerdictLine:
    """The result of the run's own audit, which is valid until the next one."""

    kind: Literal["verdict"] = "verdict"
    verdict: Verdict = described("The bounds that decide.")


@record
class SealedStatementLine:
    """The checksum of a statement that is written next."""

    kind: Literal["sealed_statement"] = "sealed_statement"
    checksum: str = described("Checksum of the statement.")


@record
class SealedConfigsLine:
    """The checksums of configs that are written next."""

    kind: Literal["sealed_configs"] = "sealed_configs"
    checksums: tuple[str, ...] = described("Their checksums.")


@record
class StatedLine:
    """The checksum of a statement that was written: from now on no older one may lie in the folder."""

    kind: Literal["stated"] = "stated"
    checksum: str = described("Checksum of the statement.")


Line = (
    EventLine
    | StepLine
    | EpochLine
    | SumLine
    | PlanLine
    | UnitsLine
    | ChoicesLine
    | TrialLine
    | OriginLine
    | SentLine
    | VerdictLine
    | SealedStatementLine
    | SealedConfigsLine
    | StatedLine
)
