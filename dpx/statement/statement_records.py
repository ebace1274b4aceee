"""Defines the records of `privacy.json`: the statement of a run, of a run without privacy, and of a search.

A new field needs changes in three places: here, where the statement is built (`dpx.claim.statement`), and, by command, in the schema and
the page of fields (`dpx/docs/records.md`).
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from dpx.declaration import require
from dpx.files.records import FIX, described, record
from dpx.privacy.declared_privacy import UnitFacts
from dpx.privacy.hash_chain import Mark
from dpx.privacy.lines import AuditBound
from dpx.privacy.origins import Beginning, VocabularyFacts
from dpx.privacy.segments import Segment
from dpx.statement import outside_code

# Epsilon by accountant; null if no finite bound is known.
Epsilons = dict[str, float | None]


@record
class OutsideCode:
    """Describes a package whose code takes part in the run."""

    package: str = described("Name of the package.")
    version: str = described("Version of the package.")
    parts: dict[str, str] = described("Its class at each config key; empty for a package that is only imported.")


@record
class Tuning:
    """Describes the search that the run is a trial of."""

    charge: str = described("How the search charges the choice among its trials.")
    meaning: str = described("One sentence on what the charge means for this run.")


@record
class NotABound:
    """Holds a number that is not a bound for this run."""

    name: str = described("Name of the number, as `epsilon/<accountant>`.")
    value: float | None = described("The number; null where it is infinite.")
    reason: str = described("Why it is not a bound.")


@record
class EpsilonAt:
    """Holds epsilon at another delta."""

    delta: float = described("The delta.")
    epsilon: Epsilons = described("Epsilon by accountant.")


@record
class PlannedEpsilon:
    """Describes the run's own plan and its epsilon."""

    steps: int = described("The planned number of steps.")
    epsilon: Epsilons = described("Epsilon of these steps alone, by accountant.")


@record
class SpentEpsilon:
    """Describes the charges that the ledger holds so far, and their epsilon."""

    steps: int = described("Steps that have run.")
    charged_steps: int = described("Steps that are charged, those of other runs and repeated ones included.")
    epsilon: Epsilons = described("Epsilon of the charged steps, by accountant.")
    valid_only_if: str = described("When that is a claim.")


@record
class CountedEvent:
    """Holds an event of dp-accounting and the number of times that it is composed."""

    event: dict[str, Any] = described("The event: its class and its arguments by name.")
    count: int = described("How many times it is composed.")


@record
class RatesRoundedUp:
    """Describes a ramp of sampling rates that was rounded up to fewer rates."""

    distinct: int = described("Number of distinct releases.")
    composed: int = described("Number of releases that were composed.")
    accountant: str = described("Accountant of the error.")
    epsilon_error_at_most: float | None = described("What rounding up can add to epsilon.")
    pld_grid: float = described("Discretisation of the privacy loss distributions.")


@record
class ChainFacts:
    """Describes the line of the ledger that a statement follows from."""

    mark: Mark | None = described("The line; null before the run has begun.")
    chain: str = described("What a comparison with that line can show.")


@record
class LedgerFacts(ChainFacts):
    """Describes the steps that ran, in enough detail to compute epsilon again with dp-accounting alone."""

    segments: tuple[Segment, ...] = described("What is charged so far, run-length encoded.")
    events: tuple[CountedEvent, ...] = described("The events that the headline composes: those of the planned end.")
    rates_rounded_up: RatesRoundedUp | None = described("How a ramp of rates was rounded; null if every rate is composed without rounding.")
    identity: str | None = described("Name of the run's ledger; null before it has begun.")


@record
class MechanismFacts:
    """Describes the clipping, the noise and its generator."""

    name: str = described("Name of the mechanism.")
    clip: str = described("Kind of clip.")
    clipping_norm: float | None = described("The clipping norm, at first if it changes.")
    noise_multiplier: float | None = described("Standard deviation of the noise on the sum, relative to the clipping norm.")
    noise_batch_ratio: float | None = described("The noise multiplier divided by the largest expected batch size.")
    rounding_margin: float = described("Share of the clipping norm that is kept free for rounding.")
    releases: tuple[str, ...] = described("What the run releases under the claim.")
    joint_noise_multiplier: float | None = described(
        "Noise multiplier of all releases of a step together; null for the sum alone.", default=None
    )
    count_noise_multiplier: float | None = described(
        "Noise multiplier of an adaptive clip's count; null without such a clip.", default=None
    )
    telemetry_noise_multiplier: float | None = described(
        "Noise multiplier of released telemetry; null if the telemetry is secret.", default=None
    )
    micro_batches: int | None = described("Independent draws of a step with noise in the forward pass; else null.", default=None)
    noised: str | None = described("What the noise is added to, as text; null for the sum of gradients.", default=None)
    carriers: dict[str, Any] | None = described(
        "How `mechanism=rgp` was declared, whose low-rank carriers are clipped and noised instead of weight matrices; null without them.",
        default=None,
    )
    grid_margin: float = described("What a grid adds to the sensitivity, relative to the clipping norm.")
    generator: str = described("The random generator of the noise.")
    generator_strength_bits: int = described("Strength of the generator in bits; 0 with a fixed seed.")
    noise_reach_in_deviations: float | None = described("The farthest that the noise can reach; null if it is unbounded.")


@record
class CanaryCounts:
    """Counts the canaries, which take part in the run by secret coins."""

    gradients: int = described("Gradient canaries.")
    sequences: int = described("Sequences.")


@record
class AuditFacts:
    """Describes the audit in the run."""

    canaries: CanaryCounts = described("How many canaries take part.")
    primary: dict[str, Any] = described("The bound that decides, as declared beforehand.")
    verdict: Literal["pending", "passes", "fails"] = described("Result of the audit so far.")
    lower_bound: AuditBound | None = described("The primary bound; null before the verdict.")
    released: str = described("What of the audit is released, and why that costs nothing.")


@record
class _OfAnyRun:
    """Holds the fields that the statements of runs with and without privacy share."""

    format: int = described("Format number of this file.")
    name: str = described("Name of the experiment.")
    replicate: int = described("Number of the repeat.")
    steps: int = described("The planned number of steps.")
    outside_code: tuple[OutsideCode, ...] = described("Packages outside dpx whose code takes part.")
    train: str | None = described("Which part of the model is trained, with the number of rows of new tokens among it; null for all of it.")
    init: Beginning = described("Where the starting parameters come from.")
    vocabulary: VocabularyFacts = described("The vocabulary, without which weights have no meaning.")
    tuning: Tuning | None = described("The search that the run is a trial of; null for any other run.")
    guarantee: str = described("`dp`, `none`, `dp_by_<package>` where a package's code is trusted, or `not_private`.")
    reasons: tuple[str, ...] = described("Reasons against a guarantee; empty for a run with one.")
    epsilon: Epsilons = described("The headline: proved epsilon at `delta`, by accountant; empty without a proof.")
    not_covered: tuple[str, ...] = described("What the guarantee does not cover, in sentences.")


@record
class PlainStatement(_OfAnyRun):
    """States the facts of a run without privacy."""

    kind: Literal["run_without_privacy"] = "run_without_privacy"
    ledger: ChainFacts = described("The line of the ledger that the statement follows from.")


@record
class RunStatement(_OfAnyRun):
    """States the guarantee of a private run."""

    kind: Literal["run"] = "run"
    unit: str = described("What one protected unit is.")
    rows_per_unit_max: int = described("The most rows that one unit has.")
    unit_mode: str = described(
        'Whether steps draw rows ("group"), whole units ("sample_units") or units of which one row is read ("one_row").'
    )
    adjacency: str = described("The neighbouring relation.")
    delta: float = described("The delta of the headline.")
    declared_size: int = described("The public number N of rows or units.")
    sampler: dict[str, Any] = described("The sampler that really runs, with its parameters.")
    mechanism: MechanismFacts = described("Clip, noise and generator.")
    assumptions: tuple[str, ...] = described("What must be true for the guarantee to hold, in sentences.")
    audit: AuditFacts | None = described("The audit in the run; null without one.")
    units: tuple[UnitFacts | None, ...] = described("What the charged steps protect; null for steps whose units were not recorded.")
    accountant: str = described("The accountant whose epsilon is the headline.")
    epsilon_is_of: str = described("What the headline covers.")
    epsilon_at: tuple[EpsilonAt, ...] = described("Epsilon at several deltas.")
    unsupported: tuple[NotABound, ...] = described("Numbers that are not bounds for this run.")
    planned: PlannedEpsilon = described("The run's own plan.")
    spent: SpentEpsilon = described("What the ledger holds so far.")
    ledger: LedgerFacts = described("What ran, and the events that the headline composes.")


@record
class CountedTrials:
    """Describes the trials of a search whose number is public."""

    kind: Literal["counted"] = "counted"
    declared: int = described("The declared number.")
    begun: int = described("Number of trials that have begun.")
    charged_by_plan_alone: tuple[str, ...] = described("Trials whose ledger is missing, by folder.")


@record
class DrawnTrials:
    """Describes the distribution of a secret number of trials."""

    kind: Literal["drawn"] = "drawn"
    mean: float = described("Mean of the distribution.")
    shape: str = described("Shape of the distribution.")


@record
class Score:
    """Describes the score by which the trials are compared."""

    name: str = described("The metric.")
    of: str = described("What is scored.")
    reads: str = described("Which rows it reads.")
    charged: bool = described("Whether it is charged.")


@record
class StudySpent:
    """Describes the privacy cost of the trials so far."""

    trials: int = described("Trials that began.")
    epsilon: Epsilons = described("Epsilon of what they spent, by accountant.")
    valid_only_if: str = described("When that is a claim.")


@record
class BudgetFacts:
    """Describes the budget that was declared before the first trial."""

    kind: str = described("The filter that enforces it.")
    epsilon: float = described("Epsilon of the budget.")
    order: float | None = described("Renyi order of the budget; null for zCDP.")
    limit: float = described("Limit of the budget, in the unit of the privacy filter.")


@record
class DrawsFrom:
    """Describes the distribution of the trials of a repeated mechanism, which was fixed before the first trial."""

    sampler: dict[str, Any] = described("Sampler that draws the settings of the trials.")
    space: dict[str, Any] = described("The search space.")


@record
class StudyLedger:
    """Describes the charges of the search."""

    segments: tuple[Segment, ...] | None = described("What the trials are charged; null for a repeated mechanism.", default=None)
    repeated: tuple[CountedEvent, ...] | None = described("The events of one repetition; null of any other search.", default=None)


@record
class RecordMark:
    """Identifies a line of the record of a search."""

    chain: str = described("Name of the record.")
    position: int | None = described("Number of the line; null where it would tell the secret number of trials.")
    digest: str = described("Digest of the line.")


@record
class RecordFacts:
    """Describes the line of the search's record that its statement follows from."""

    mark: RecordMark = described("The line.")


@record
class StudyStatement:
    """States the guarantee of a whole search: that of its winner."""

    kind: Literal["study"] = "study"
    format: int = described("Format number of this file.")
    study: str = described("Name of the study.")
    charge: str = described("How the choice among the trials is charged.")
    trials: CountedTrials | DrawnTrials = described("The number of trials, or the distribution of a secret one.")
    guarantee: str = described("As in the statement of a run.")
    reasons: tuple[str, ...] = described("Reasons against a guarantee; empty for a run with one.")
    unit: str = described("What one protected unit is.")
    adjacency: str = described("The neighbouring relation.")
    delta: float = described("The delta of the headline.")
    units: tuple[UnitFacts | None, ...] = described("What the charged steps protect.")
    epsilon: Epsilons = described("The headline, by accountant; empty without a proof.")
    unsupported: tuple[NotABound, ...] = described("Numbers that are not bounds.")
    spent: StudySpent | None = described("What the trials have spent so far; null if the search does not state it.")
    budget: BudgetFacts | None = described("The declared budget; null without one.")
    score: Score = described("What the trials are compared by.")
    winner: str | None = described("Folder of the winner; null before there is one.")
    assumptions: tuple[str, ...] = described("What must be true for the guarantee to hold, in sentences.")
    not_covered: tuple[str, ...] = described("What the guarantee does not cover, in sentences.")
    draws_from: DrawsFrom | None = described("What the trials were drawn from; null if the claim does not depend on it.")
    ledger: StudyLedger = described("What the search is charged.")
    record: RecordFacts = described("The line of the search's record that this follows from.")


AnyRun = RunStatement | PlainStatement
Statement = RunStatement | PlainStatement | StudyStatement


def headline(statement: AnyRun) -> float | None:
    """Returns epsilon at the declared delta by the run's own accountant; `None` without a proof."""
    return statement.epsilon.get(statement.accountant) if isinstance(statement, RunStatement) else None


def require_sound(statement: Statement, source: Any, fix: str = FIX) -> None:
    """Raises `ConfigError`, naming `source`, for a statement that contradicts itself.

    It is called just before a statement is written and just after it was read.
    """
    is_dp = statement.guarantee == "dp"
    require(is_dp or not statement.epsilon, source, f"states an epsilon with guarantee={statement.guarantee}", fix)
    is_claimed = outside_code.packages_of_guarantee(statement.guarantee) is not None
    require(is_claimed != bool(statement.reasons), source, "states a guarantee and reasons against it, or neither", fix)
    _require_epsilons(statement.epsilon, source, fix)
    if isinstance(statement, RunStatement):
        charged = sum(segment.count for segment in statement.ledger.segments)
        stated = statement.spent.charged_steps
        require(charged == stated, source, f"lists {charged} charged steps and states {stated}", fix)
        _require_epsilons(statement.spent.epsilon, source, fix)


def _require_epsilons(epsilon: Mapping[str, float | None], source: Any, fix: str) -> None:
    wrong = [name for name, value in epsilon.items() if value is not None and not 0 <= value < math.inf]
    require(not wrong, source, f"states an epsilon ({', '.join(wrong)}) that is negative or infinite", fix)
