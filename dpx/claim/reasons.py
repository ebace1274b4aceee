"""Lists the reasons why a run has no guarantee, whatever its noise."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from dpx.audit.declarations import Audit, Canaries
from dpx.claim.caveats import vocabulary_source
from dpx.experiment import Experiment
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import Verdict
from dpx.privacy.unit_facts import UnitFacts, unlike

AuditState = Literal["pending", "passes", "fails"]


def reasons_against(experiment: Experiment, manifest: Any) -> list[str]:
    """Returns the reasons why the run has no guarantee, whatever its noise."""
    data, privacy = experiment.data, experiment.privacy
    checks: list[tuple[bool, str]] = [
        (experiment.seed is not None, "fixed_seed: the noise can be recomputed from the config"),
        (vocabulary_source(data.vocabulary, manifest) == "protected", "vocabulary: fitted on protected text without noise"),
        (data.learns_labels, "labels: the list of labels was learnt from the protected rows (data.source.labels=null)"),
        (
            data.pairs == "cross_document" and privacy.unit != "row",
            f"pairs: data.pairs=cross_document puts text of one {privacy.unit} into rows of another",
        ),
        (
            experiment.sampler.depends_on_size and manifest is not None and data.declared_size not in (None, privacy.population(manifest)),
            f"sampler: {experiment.sampler.name} is accounted at data.declared_size={data.declared_size}, "
            f"not the true number of {privacy.drawn}s",
        ),
        (
            bool(privacy.assumed),
            f"assumed: the values of {', '.join(privacy.assumed)} are not known (privacy.assumed)",
        ),
    ]
    of_mechanism = experiment.mechanism.reasons_against(experiment.train, lambda: experiment.task.parameter_shapes(experiment.model, 1))
    return [reason for holds, reason in checks if holds] + of_mechanism


def refuted(verdict: Verdict | None) -> list[str]:
    """Returns the reason against the claim that the run's own audit proved."""
    bounds = [] if verdict is None else [bound for bound in (verdict.primary, *verdict.others) if bound.refutes]
    return [
        f"audit: a lower bound of {bound.epsilon:.3f} at delta {bound.delta:.3g} ({bound.estimator}, {bound.score}) "
        f"exceeds the claim of {bound.claim:.3f}"
        for bound in bounds[:1]
    ]


def audit_state(audit: Audit, verdict: Verdict | None) -> AuditState | None:
    """Returns the state of a run's own audit: `pending`, `passes` or `fails`; `None` for a run without an audit."""
    if not isinstance(audit, Canaries):
        return None
    return state_after(verdict)


def state_after(verdict: Verdict | None) -> AuditState:
    """Returns the state of an audit with the verdict `verdict`, or without a verdict yet."""
    return "pending" if verdict is None else "fails" if refuted(verdict) else "passes"


def chosen_late(entered: Ledger | None) -> list[str]:
    """Returns the reasons why a composition is not proved: parts of the plan that were chosen after results had been seen."""
    return late_choices(entered.chosen_after_results if entered is not None else [])


def late_choices(names: list[str]) -> list[str]:
    """Returns the reasons of `chosen_late` for the settings `names`."""
    why = "the composition of releases that are chosen after results is proved only under a budget declared beforehand (Rogers et al. 2016)"
    return [f"plan: {', '.join(names)} changed after results had been seen, by a fork or with the data; {why}"] if names else []


def of_a_trial(charges: Iterable[str]) -> str:
    """Returns the reasons why a run that begins from a trial has no guarantee.

    `charges` are those of the searches that contain the trial.
    """
    named = ", ".join(f"tune.charge={charge}" for charge in dict.fromkeys(charges))
    return f"it is one trial of a search ({named}), and its ledger does not include the choice among the trials"


def unlike_units(entered: Ledger | None) -> list[str]:
    """Returns the reasons why the charges of one ledger do not protect one unit: its steps were entered with different records of their
    units."""
    if entered is None:
        return []
    return [unlike_in_words(entered.units)] if len(entered.units) > 1 else []


def unlike_in_words(units: Sequence[UnitFacts | None]) -> str:
    """Returns the reason why the costs of steps under these records do not add up."""
    differing = "; ".join(unlike(units))
    return f"units: the costs of steps can be composed for one unit only, and these steps may protect different units: {differing}"


def seeded(entered: Ledger | None) -> list[str]:
    """Returns the reason why a run has no guarantee if its ledger shows noise from a seed, whatever its config says now."""
    return ["fixed_seed: noise of this run was drawn from a seed of its config"] if entered is not None and entered.was_seeded else []
