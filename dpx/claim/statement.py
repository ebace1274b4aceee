"""Builds `privacy.json`: what the run guarantees, computed from its ledger, and what it does not guarantee.

One pass: the facts of the ledger, of what the run begins from and of the packages that it trusts (`dpx.claim.spent`), the reasons
against a guarantee and its limits (`dpx.claim.caveats`), epsilon (`dpx.claim.spent`), the word of the guarantee
(`dpx.statement.outside_code`), and the record.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from dpx.claim.calibration import Calibrated, Entries, auxiliary
from dpx.claim.caveats import (
    assumptions,
    chosen_late,
    not_covered,
    reasons_against,
    refuted,
    seeded,
    state_after,
    unlike_units,
)
from dpx.claim.spent import RunFacts, Spent, Trusted, chain_facts, ledger_facts, of_one_copy, planned_end, spent_facts, unsupported
from dpx.clipping.rounding import MARGINS
from dpx.config.declared_audit import Audit, Canaries
from dpx.config.experiment_parts import Claim
from dpx.data.protected_units import unit_facts, vocabulary_source
from dpx.files.records import from_json
from dpx.mechanism.clip import Clip
from dpx.mechanism.mechanism_protocol import Mechanism
from dpx.mechanism.telemetry import Telemetry
from dpx.models.model_protocol import count
from dpx.privacy import accounting
from dpx.privacy.closed_form import joint
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import Verdict
from dpx.privacy.origins import Origin, VocabularyFacts, given_protected
from dpx.statement import outside_code
from dpx.statement.seals import FORMAT
from dpx.statement.statement_records import (
    AnyRun,
    AuditFacts,
    CanaryCounts,
    MechanismFacts,
    PlainStatement,
    PlannedEpsilon,
    RunStatement,
    Tuning,
)


def build(
    claim: Claim,
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
    facts, privacy, size = RunFacts.of(entered, begins_from), claim.privacy, calibrated.size
    end = planned_end(Entries.of(claim), calibrated, entered, facts.begins_from) if claim.is_private else []
    trusts = Trusted.by_run(outside_code.facts(claim.outside, job), end)
    common = fields_of_any(claim, manifest, calibrated, entered, facts)
    uncovered = not_covered(claim.mechanism, claim.clipping_method, claim.data, privacy)
    # Also whom an earlier command gave them, by the ledger.
    given = dict.fromkeys([*(entered.sent_to if entered is not None else ()), *claim.given_protected])
    uncovered += given_protected(given, facts.begins_from)
    common["outside_code"] = trusts.packages
    common["not_covered"] = tuple([*([] if common["tuning"] is None else [common["tuning"].meaning]), *uncovered])
    if not claim.is_private:
        reasons = (f"mechanism={claim.mechanism.name}",)
        return PlainStatement(**common, guarantee="not_private", reasons=reasons, epsilon={}, ledger=chain_facts(entered))
    against = [
        *reasons_against(claim.data, privacy, claim.sampler, claim.seed, claim.reasons_of_mechanism, manifest),
        *(seeded(entered) if claim.seed is None else []),
        *chosen_late(entered),
        *unlike_units([] if entered is None else entered.units, bool(facts.own)),
        *facts.against,
        *refuted(facts.verdict),
    ]
    premises = assumptions(claim.data, privacy, claim.train, claim.audit, manifest, size, facts)
    audit = audit_facts(claim.audit, facts.verdict)

    accountant, steps = claim.accountant, claim.steps
    spent, whole = Spent(accountant, privacy, facts.segments), Spent(accountant, privacy, end)
    own, epsilon = whole.accountants[0], {name: whole.epsilon(name) for name in whole.accountants}
    against += [] if epsilon[own] is not None else [f"accountant={own} finds no finite epsilon at this delta"]
    alone = {name: accounting.finite(value) for name, value in calibrated.epsilon.items()}
    so_far, what_ran = spent_facts(spent, facts.own), ledger_facts(entered, facts.segments, whole)
    # If the claim trusts a package, no number is stated as a bound, at the planned end or before it.
    is_proved, why_not = not (against or trusts.names), against or trusts.why_not
    at = whole.table(deltas(privacy.delta, size)) if is_proved else ()
    numbers = unsupported(claim.sampler, accountant, privacy.delta, why_not, epsilon, end)
    numbers += tuple(of_one_copy(claim.data, privacy, accountant, end))
    ancestors = ", including the runs that this one starts from" if facts.before else ""
    return RunStatement(
        **common,
        guarantee=outside_code.guarantee(True, against, trusts.names),
        reasons=tuple(against),
        assumptions=tuple(premises),
        audit=audit,
        accountant=own,
        epsilon=epsilon if is_proved else {},
        epsilon_is_of=f"the planned end, step {steps}, and everything charged in addition to the plan{ancestors}",
        epsilon_at=at,
        unsupported=numbers,
        planned=PlannedEpsilon(steps=steps, epsilon={} if trusts.names else alone),
        spent=dataclasses.replace(so_far, epsilon={}) if trusts.names else so_far,
        ledger=what_ran,
    )


def fields_of_any(claim: Claim, manifest: Any, calibrated: Calibrated, entered: Ledger | None, facts: RunFacts) -> dict[str, Any]:
    """Returns the fields of every run's statement: what was declared, and where the run began."""
    privacy = claim.privacy
    units = [unit_facts(claim.data, privacy, manifest)] if entered is None else entered.units
    # Weights have no meaning with another vocabulary.
    vocabulary = VocabularyFacts(
        source=vocabulary_source(claim.data.vocabulary, manifest), sha256=None if manifest is None else manifest.vocabulary_checksum
    ).as_released(facts.tells_words)
    # How a search charges the choice comes from the ledger, not from the command that resumes the run.
    charges = [*facts.trial_charges, *([] if claim.tune is None else [claim.tune.charge])]
    tuning = Tuning(charge=charges[0], meaning=_OF_A_TRIAL[charges[0]]) if charges else None
    fields: dict[str, Any] = {
        "format": FORMAT,
        "name": claim.name,
        "replicate": claim.replicate,
        "steps": claim.steps,
        "train": None if claim.train.is_all else claim.train.stated(claim.model),
        "init": facts.beginning,
        "vocabulary": vocabulary,
        "tuning": tuning,
    }
    if claim.is_private:
        sizes = [batch for batch, _ in calibrated.batch_stages]
        fields |= {name: getattr(privacy, name) for name in ("unit", "rows_per_unit_max", "unit_mode", "adjacency", "delta")}
        fields |= {
            "declared_size": calibrated.size,
            "sampler": dataclasses.asdict(claim.sampler) | {"expected_batch_size": {"smallest": min(sizes), "largest": max(sizes)}},
            "mechanism": mechanism_facts(
                claim.mechanism,
                claim.clip,
                claim.telemetry,
                calibrated,
                claim.model.dtype,
                lambda: count(claim.task.parameter_shapes(claim.model, claim.vocabulary_size)),
                is_seeded=claim.seed is not None,
            ),
            "units": tuple(one and one.as_released(facts.tells_words) for one in units),
        }
    return fields


_OF_A_TRIAL = {
    "uncharged": "one trial of a search; the choice of its settings and the choice among the trials are not charged, here or elsewhere",
    "composition": "one trial of a search; its settings follow from other trials, so the statement of the whole study is the claim",
    "repeat_and_select": "one trial of a search that releases only its winner, under the statement of the whole study",
}


def deltas(delta: float, size: int) -> list[float]:
    """Returns the declared delta, round values of delta, and the values that other work uses: 1/N, 1/(2N), N^-1.1."""
    return sorted({delta, 1e-5, 1e-6, 1e-8, 1e-10, 1 / size, 1 / (2 * size), float(size) ** -1.1} - {1.0})


def audit_facts(audit: Audit, verdict: Verdict | None) -> AuditFacts | None:
    """Returns the declaration of the audit in the run, its result, and the privacy cost of publishing that; `None` without an audit."""
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


def mechanism_facts(
    mechanism: Mechanism,
    clip: Clip,
    telemetry: Telemetry,
    calibrated: Calibrated,
    dtype: str,
    count_parameters: Callable[[], int],
    is_seeded: bool = False,
) -> MechanismFacts:
    """Returns the clipping norm, the noise and the generator. `dtype` is that of the model's computation.

    Raises `ConfigError` for facts about a package's noise that no statement holds.
    """
    sigma = calibrated.noise_multiplier
    sizes = [batch for batch, _ in calibrated.batch_stages]
    aside = {name: z for name, z in auxiliary(clip, telemetry).items() if z is not None}
    facts = aside | {
        "joint_noise_multiplier": joint(sigma, *aside.values()) if aside and sigma is not None else None,
        "name": mechanism.name,
        "clip": clip.kind,
        "clipping_norm": clip.clipping_norm,
        "noise_multiplier": sigma,
        "noise_batch_ratio": None if sigma is None else sigma / max(sizes),
        "rounding_margin": MARGINS[dtype],
        **mechanism.noise_facts(clip.clipping_norm, count_parameters),
        "releases": releases(clip, telemetry),
    }
    if is_seeded:
        facts["generator_strength_bits"] = 0
    fix = "Return the fields of dpx.mechanism.Mechanism.noise_facts alone"
    return from_json(MechanismFacts, facts, f"mechanism={mechanism.name}: noise_facts", fix)


def releases(clip: Clip, telemetry: Telemetry) -> list[str]:
    """Returns the list of values that a run releases under the claim."""
    return ["the parameters of every step", *clip.published, *telemetry.published]
