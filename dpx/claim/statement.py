"""Builds `privacy.json`: what the run guarantees, computed from its ledger, and what it does not guarantee."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from dpx.claim.calibration import Calibrated, auxiliary
from dpx.claim.caveats import (
    assumptions,
    chosen_late,
    not_covered,
    reasons_against,
    refuted,
    seeded,
    state_after,
    unlike_units,
    unsupported,
    vocabulary_source,
)
from dpx.claim.spent import Spent, chain_facts, ledger_facts, planned_end, spent_facts
from dpx.clipping.rounding import MARGINS
from dpx.config.declared_audit import Canaries
from dpx.config.experiment import Experiment
from dpx.data.protected_units import unit_facts
from dpx.files.records import from_json
from dpx.models.shape import count
from dpx.privacy import accounting, ledger, origins
from dpx.privacy.closed_form import joint
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import Verdict
from dpx.privacy.origins import Origin, VocabularyFacts
from dpx.privacy.unit_facts import UnitFacts
from dpx.statement import outside_code
from dpx.statement.seals import FORMAT
from dpx.statement.statement_records import (
    AnyRun,
    AuditFacts,
    CanaryCounts,
    MechanismFacts,
    OutsideCode,
    PlainStatement,
    PlannedEpsilon,
    RunStatement,
    Tuning,
)


def build(
    experiment: Experiment,
    manifest: Any,
    calibrated: Calibrated,
    entered: Ledger | None = None,
    begins_from: Sequence[Origin] = (),
    job: Any = None,
) -> AnyRun:
    """Returns the statement of a run, with every field.

    `manifest` is the store's, or `None` before the data is prepared; `entered` is the ledger so far, with the result of the run's own
    audit; `begins_from` are the origins of the starting parameters that are not in a ledger yet; `job` is the job that runs the experiment.

    The headline `epsilon` covers the planned end and everything entered in addition to the plan: it is valid at any time during the run.
    """
    begins_from = entered.origins if entered is not None else begins_from
    verdict = entered.verdict if entered is not None else None
    reasons = (
        reasons_against(experiment, manifest)
        + (seeded(entered) if experiment.seed is None else [])
        + chosen_late(entered)
        + unlike_units(entered)
        + origins.reasons(begins_from)
        + refuted(verdict)
    )
    tuning = tuning_facts(experiment, entered)
    common: dict[str, Any] = _of_any_run(experiment, manifest, begins_from, job) | {"tuning": tuning}
    common["not_covered"] = tuple([*([] if tuning is None else [tuning.meaning]), *not_covered(experiment)])
    if not experiment.is_private:
        reasons = [f"mechanism={experiment.mechanism.name}"]
        return PlainStatement(**common, guarantee="not_private", reasons=tuple(reasons), epsilon={}, ledger=chain_facts(entered))
    privacy = experiment.privacy
    return RunStatement(
        **common,
        **{name: getattr(privacy, name) for name in ("unit", "rows_per_unit_max", "unit_mode", "adjacency", "delta")},
        declared_size=calibrated.size,
        sampler=sampler_facts(experiment),
        mechanism=mechanism_facts(experiment, calibrated),
        assumptions=tuple(assumptions(experiment, manifest, calibrated.size, entered, begins_from)),
        audit=audit_facts(experiment, verdict),
        units=units_of(experiment, manifest, entered, begins_from),
        **_claim(experiment, calibrated, entered, begins_from, reasons, job),
    )


def _of_any_run(experiment: Experiment, manifest: Any, begins_from: Sequence[Origin], job: Any) -> dict[str, Any]:
    """Returns the fields of a statement that runs with and without noise share."""
    return {
        "format": FORMAT,
        "name": experiment.name,
        "replicate": experiment.replicate,
        "steps": experiment.steps,
        "outside_code": tuple(OutsideCode(**facts) for facts in outside_code.facts(experiment, job)),
        "train": None if experiment.train.is_all else experiment.train.kind,
        "init": origins.facts(begins_from),
        "vocabulary": vocabulary_facts(experiment, manifest, begins_from),
    }


def units_of(experiment: Experiment, manifest: Any, entered: Ledger | None, begins_from: Sequence[Origin]) -> tuple[UnitFacts | None, ...]:
    """Returns the records of what the charged steps protect (`dpx.privacy.unit_facts`); without a ledger, the record of the run itself."""
    own = [unit_facts(experiment.data, experiment.privacy, manifest)] if entered is None else entered.units
    return tuple(one and one.as_released(origins.have_public_words(begins_from)) for one in own)


def _claim(
    experiment: Experiment, calibrated: Calibrated, entered: Ledger | None, begins_from: Sequence[Origin], reasons: list[str], job: Any
) -> dict[str, Any]:
    """Returns the fields of guarantee and epsilon: at the planned end, at several deltas, and for what the ledger holds so far."""
    privacy = experiment.privacy
    segments = entered.segments() if entered is not None else ledger.join(*origins.charged(begins_from))
    spent = Spent(experiment.accountant, privacy, segments)
    whole_segments = planned_end(experiment, calibrated, entered, begins_from)
    whole = Spent(experiment.accountant, privacy, whole_segments)
    own, epsilon = whole.accountants[0], {name: whole.epsilon(name) for name in whole.accountants}
    if epsilon[own] is None:
        reasons = [*reasons, f"accountant={own} finds no finite epsilon at this delta"]
    by = outside_code.joined(outside_code.packages_of(experiment, job), outside_code.packages_of_segments(whole_segments))
    # If the claim trusts a package, no number is stated as a bound, at the planned end or before it.
    is_proved = not (reasons or by)
    ancestors = ", including the runs that this one starts from" if origins.charged(begins_from) else ""
    why_not = reasons or outside_code.sentences(by)
    so_far = spent_facts(spent, entered.own_segments() if entered is not None else [])
    alone = {name: accounting.finite(value) for name, value in calibrated.epsilon.items()}
    return {
        "guarantee": outside_code.guarantee(True, reasons, by),
        "reasons": tuple(reasons),
        "accountant": own,
        "epsilon": epsilon if is_proved else {},
        "epsilon_is_of": f"the planned end, step {experiment.steps}, and everything charged in addition to the plan{ancestors}",
        "epsilon_at": whole.table(deltas(privacy.delta, calibrated.size)) if is_proved else (),
        "unsupported": unsupported(experiment.sampler, experiment.accountant, privacy.delta, why_not, epsilon, whole_segments),
        "planned": PlannedEpsilon(steps=experiment.steps, epsilon={} if by else alone),
        "spent": dataclasses.replace(so_far, epsilon={}) if by else so_far,
        "ledger": ledger_facts(entered, segments, whole),
    }


_OF_A_TRIAL = {
    "uncharged": "one trial of a search; the choice of its settings and the choice among the trials are not charged, here or elsewhere",
    "composition": "one trial of a search; its settings follow from other trials, so the statement of the whole study is the claim",
    "repeat_and_select": "one trial of a search that releases only its winner, under the statement of the whole study",
}


def vocabulary_facts(experiment: Experiment, manifest: Any, begins_from: Sequence[Origin]) -> VocabularyFacts:
    """Returns the source of the vocabulary and, if it is public, its checksum: weights have no meaning with another vocabulary."""
    source = vocabulary_source(experiment.data.vocabulary, manifest)
    own = VocabularyFacts(source=source, sha256=manifest.vocabulary_checksum if manifest is not None else None)
    return own.as_released(origins.have_public_words(begins_from))


def tuning_facts(experiment: Experiment, entered: Ledger | None) -> Tuning | None:
    """Returns the field `tuning` of a run that is a trial of a search, which says how the choice is charged; `None` for any other run.

    It comes from the ledger, not from the command that resumes the run.
    """
    charges = [trial.charge for trial in entered.trials] if entered is not None else []
    charges += [experiment.tune.charge] if experiment.tune is not None else []
    return Tuning(charge=charges[0], meaning=_OF_A_TRIAL[charges[0]]) if charges else None


def deltas(delta: float, size: int) -> list[float]:
    """Returns the declared delta, round values of delta, and the values that other work uses: 1/N, 1/(2N), N^-1.1."""
    return sorted({delta, 1e-5, 1e-6, 1e-8, 1e-10, 1 / size, 1 / (2 * size), float(size) ** -1.1} - {1.0})


def audit_facts(experiment: Experiment, verdict: Verdict | None) -> AuditFacts | None:
    """Returns the declaration of the audit in the run, its result, and the privacy cost of publishing that; `None` without an audit."""
    audit = experiment.audit
    if not isinstance(audit, Canaries):
        return None
    return AuditFacts(
        canaries=CanaryCounts(gradients=audit.gradients, sequences=audit.sequences),
        primary=dataclasses.asdict(audit.primary),
        verdict=state_after(verdict),
        lower_bound=None if verdict is None else verdict.primary,
        released="the verdict and the primary bound: functions of noisy sums charged above and of coins tossed without the data, at no "
        "further cost. Every other bound, the coins, the canaries' texts and the scores stay under private/",
    )


def sampler_facts(experiment: Experiment) -> dict[str, Any]:
    """Returns the sampler that really runs, with its parameters."""
    sizes = sorted({experiment.batch_schedule.at(step) for step in range(experiment.steps)})
    return dataclasses.asdict(experiment.sampler) | {"expected_batch_size": {"smallest": sizes[0], "largest": sizes[-1]}}


def mechanism_facts(experiment: Experiment, calibrated: Calibrated) -> MechanismFacts:
    """Returns the clipping norm, the noise and the generator.

    Raises `ConfigError` for facts about a package's noise that no statement holds.
    """
    sigma = calibrated.noise_multiplier
    sizes = [batch for batch, _ in calibrated.batch_stages]
    aside = {name: z for name, z in auxiliary(experiment.clip, experiment.telemetry).items() if z is not None}
    facts = aside | {
        "joint_noise_multiplier": joint(sigma, *aside.values()) if aside and sigma is not None else None,
        "name": experiment.mechanism.name,
        "clip": experiment.clip.kind,
        "clipping_norm": experiment.clip.clipping_norm,
        "noise_multiplier": sigma,
        "noise_batch_ratio": None if sigma is None else sigma / max(sizes),
        "rounding_margin": MARGINS[experiment.model.dtype],
        **_noise_facts(experiment),
        "releases": releases(experiment),
    }
    fix = "Return the fields of dpx.mechanism.Mechanism.noise_facts alone"
    return from_json(MechanismFacts, facts, f"mechanism={experiment.mechanism.name}: noise_facts", fix)


def _noise_facts(experiment: Experiment) -> dict[str, Any]:
    """Returns the facts of the noise: its generator, its range, and what a grid adds to the sensitivity, relative to the clipping norm."""

    def count_parameters() -> int:
        return count(experiment.task.parameter_shapes(experiment.model, experiment.vocabulary_size))

    facts = experiment.mechanism.noise_facts(experiment.clip.clipping_norm, count_parameters)
    return facts if experiment.seed is None else facts | {"generator_strength_bits": 0}


def releases(experiment: Experiment) -> list[str]:
    """Returns the list of values that a run releases under the claim."""
    return ["the parameters of every step", *experiment.clip.published(), *experiment.telemetry.published()]
