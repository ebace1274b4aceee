"""`privacy.json`: what the run guarantees, computed from its ledger, and what it does not."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dp_accounting

from dpx.audit.declarations import Canaries
from dpx.claim import rests_on
from dpx.claim.calibration import Calibrated, auxiliary, compositions, planned_from
from dpx.claim.caveats import NOT_COVERED as NOT_COVERED
from dpx.claim.caveats import assumptions, not_covered, unsupported, vocabulary_source
from dpx.clipping.rounding import MARGINS
from dpx.durable import write_durably
from dpx.experiment import Experiment
from dpx.models.shape import count
from dpx.privacy import accounting, events, ledger, loss_grid, origins
from dpx.privacy.declarations import Accountant, Privacy
from dpx.privacy.event_json import describe as describe
from dpx.privacy.event_json import restore as restore
from dpx.privacy.joint import joint
from dpx.privacy.ledger import Ledger, Runs
from dpx.privacy.origins import Origin

FORMAT = 1

CHAIN_SHOWS = (
    "the ledger is a chain of lines, and what follows from it names its line: a ledger that was lost, cut, edited or set back is found; "
    "one forged with its key, or set back together with everything that follows from it, is not"
)


def build(
    experiment: Experiment,
    manifest: Any,
    calibrated: Calibrated,
    entered: Ledger | None = None,
    verdict: dict[str, Any] | None = None,
    begins_from: Sequence[Origin] = (),
) -> dict[str, Any]:
    """Every field of the statement. `manifest` is the store's, or `None` before the data is prepared; `entered` the ledger so far;
    `verdict` what the run's own audit found (`dpx.audit.verdict`), or `None` before its end; `begins_from` where the starting parameters
    come from, as far as no ledger holds it yet.

    The headline `epsilon` is that of the planned end and of everything entered beside the plan: it holds whenever the run is looked at.
    """
    begins_from = entered.origins if entered is not None else begins_from
    reasons = (
        reasons_against(experiment, manifest)
        + seeded_before(experiment.seed, entered)
        + chosen_late(entered)
        + origins.reasons(begins_from)
        + refuted(verdict)
    )
    common = {"format": FORMAT, "name": experiment.name, "replicate": experiment.replicate, "steps": experiment.steps}
    common |= tuning_facts(experiment)
    outside = rests_on.facts(experiment)
    common |= {"rests_on": outside} if outside else {}
    if not experiment.train.is_all:
        common["train"] = experiment.train.kind
    common |= {"init": origins.facts(begins_from), "vocabulary": vocabulary_facts(experiment, manifest)}
    if not experiment.is_private:
        plain = {
            "guarantee": "not_private",
            "reasons": [f"mechanism={experiment.mechanism.name}"],
            "epsilon": {},
            "not_covered": not_covered(experiment),
        }
        return common | plain | {"ledger": chain_facts(entered)}
    runs = entered.runs() if entered is not None else ledger.join(*origins.charged(begins_from))
    whole_runs = planned_end(experiment, calibrated, entered, begins_from)
    whole = Spent(experiment.accountant, experiment.privacy, whole_runs)
    privacy, size = experiment.privacy, calibrated.size
    own, epsilon = whole.accountants[0], {name: whole.epsilon(name) for name in whole.accountants}
    if epsilon[own] is None:
        reasons.append(f"accountant={own} finds no finite epsilon at this delta")
    by = rests_on.joined(rests_on.of(experiment), rests_on.of_runs(whole_runs))
    # Where the claim is a package's word, no number stands as a bound, at the planned end or before it.
    is_proved = not (reasons or by)
    return common | {
        "guarantee": rests_on.guarantee(True, reasons, by),
        "reasons": reasons,
        "unit": privacy.unit,
        "rows_per_unit_max": privacy.rows_per_unit_max,
        "unit_mode": privacy.unit_mode,
        "adjacency": privacy.adjacency,
        "declared_size": size,
        "sampler": sampler_facts(experiment),
        "mechanism": mechanism_facts(experiment, calibrated, manifest),
        "accountant": own,
        "delta": privacy.delta,
        "epsilon": epsilon if is_proved else {},
        "epsilon_is_of": f"the planned end, step {experiment.steps}, and everything charged beside the plan"
        + (", the runs that this one starts from included" if origins.charged(begins_from) else ""),
        "epsilon_at": [] if not is_proved else whole.table(deltas(privacy.delta, size)),
        "unsupported": unsupported(
            experiment.sampler, experiment.accountant, privacy.delta, reasons or rests_on.words(by), epsilon, whole_runs
        ),
        "planned": {"steps": experiment.steps, "epsilon": {} if by else _finite(calibrated.epsilon)},
        "spent": spent_facts(experiment, runs, entered.own_runs() if entered is not None else []) | ({"epsilon": {}} if by else {}),
        "assumptions": assumptions(experiment, manifest, size, entered, begins_from),
        "audit": audit_facts(experiment, verdict),
        "not_covered": not_covered(experiment),
        "ledger": ledger_facts(entered, runs, whole),
    }


def _finite(epsilon: dict[str, float]) -> dict[str, float | None]:
    return {name: accounting.finite(value) for name, value in epsilon.items()}


def spent_facts(experiment: Experiment, runs: Runs, own: Runs) -> dict[str, Any]:
    """What the ledger holds so far, and when that is a claim; `own` are the run's own steps among `runs`."""
    spent = Spent(experiment.accountant, experiment.privacy, runs)
    return {
        "steps": len({step for run in own for step in _steps(run)}),
        "charged_steps": spent.steps,
        "epsilon": {name: spent.epsilon(name) for name in spent.accountants},
        "valid_only_if": "the run stopped here for a reason that depends neither on the data nor on what was seen of the run",
    }


def ledger_facts(entered: Ledger | None, runs: Runs, whole: "Spent") -> dict[str, Any]:
    """What ran, the events that the headline composes, and the line all this follows from."""
    identity = entered.identity if entered is not None else None
    return {"runs": runs, "rates_rounded_up": whole.rounding(), "events": whole.events(), "identity": identity, **chain_facts(entered)}


def planned_end(experiment: Experiment, calibrated: Calibrated, entered: Ledger | None, begins_from: Sequence[Origin] = ()) -> Runs:
    """What the ledger will hold at the planned end: what it holds, and the steps of its newest noise epoch that are still to come.

    Of a run without a ledger, its whole plan and what it begins from.
    """
    assert calibrated.noise_multiplier is not None
    origin, epoch = (entered.identity, entered.epochs[-1] if entered.epochs else None) if entered else ("planned", None)
    to_come = planned_from(experiment, calibrated.batch_runs, calibrated.size, calibrated.noise_multiplier, origin, epoch)
    return ledger.join(*([entered.runs()] if entered else origins.charged(begins_from)), to_come)


def require_bound(experiment: Experiment, calibrated: Calibrated, begins_from: Sequence[Origin]) -> None:
    """Raises `Refused` where the run's accountant has no bound for its own steps and those of what it begins from together."""
    if experiment.is_private and origins.charged(begins_from):
        Spent(experiment.accountant, experiment.privacy, planned_end(experiment, calibrated, None, begins_from))


def planned_epsilon(experiment: Experiment, calibrated: Calibrated, begins_from: Sequence[Origin]) -> dict[str, float | None]:
    """Epsilon, by accountant, of a run that has not begun and of what it begins from, together."""
    if not experiment.is_private or not origins.charged(begins_from):
        return dict(calibrated.epsilon)
    whole = Spent(experiment.accountant, experiment.privacy, planned_end(experiment, calibrated, None, begins_from))
    return {name: whole.epsilon(name) for name in whole.accountants}


def chain_facts(entered: Ledger | None) -> dict[str, Any]:
    """Which line of the ledger a statement follows from, and what such marks can show."""
    if entered is None or entered.mark is None:
        return {"mark": None, "chain": "unchained: nothing can be held against this ledger"}
    late = "begun late: lines from before there were chains could not be checked. " if entered.was_unchained else ""
    return {"mark": entered.mark.as_json(), "chain": late + CHAIN_SHOWS}


def chosen_late(entered: Ledger | None) -> list[str]:
    """Why a composition stands on nothing: parts of the plan that were chosen when results had been seen."""
    names = entered.chosen_after_results if entered is not None else []
    why = "composition of releases that are chosen so is proved under a budget declared beforehand alone (Rogers et al. 2016)"
    return [f"plan: {', '.join(names)} changed after results had been seen, by a fork or with the data; {why}"] if names else []


def seeded_before(seed: int | None, entered: Ledger | None) -> list[str]:
    """Why a fork without a seed has no guarantee where its parent had one."""
    if entered is None or seed is not None or not entered.was_seeded:
        return []
    return ["fixed_seed: this run was forked from one whose noise can be recomputed from its config"]


_OF_A_TRIAL = {
    "uncharged": "one trial of a search; the choice of its settings and the choice among the trials are not charged, here or elsewhere",
    "composition": "one trial of a search; its settings follow from other trials, so the statement of the whole study is the claim",
    "repeat_and_select": "one trial of a search that releases its winner alone, under the statement of the whole study",
}


def vocabulary_facts(experiment: Experiment, manifest: Any) -> dict[str, Any]:
    """Where the vocabulary comes from, and a checksum of it: weights mean nothing under another one."""
    source = vocabulary_source(experiment.data.vocabulary, manifest)
    return {"source": source, "sha256": manifest.vocabulary_checksum if manifest is not None else None}


def tuning_facts(experiment: Experiment) -> dict[str, Any]:
    """`tuning` of a run that is a trial of a search: how the choice is charged, in a word and in a sentence."""
    if experiment.tune is None:
        return {}
    return {"tuning": {"charge": experiment.tune.charge, "meaning": _OF_A_TRIAL[experiment.tune.charge]}}


class Spent:
    """Epsilon of what the ledger holds, composed once per accountant."""

    def __init__(self, accountant: Accountant, privacy: Privacy, runs: Runs):
        self._delta, self._adjacency = privacy.delta, privacy.adjacency
        self._exact = ledger.releases(runs)
        self._charges = accounting.bucketed(self._exact)
        self.steps = sum(count for run in runs for _, count in run["steps"])
        self._composed = compositions(accountant, privacy, self._charges)
        self.accountants = list(self._composed)

    def epsilon(self, accountant: str, delta: float | None = None) -> float | None:
        """`None` where no finite bound is known."""
        delta = self._delta if delta is None else delta
        if not self._charges:
            return 0.0
        if delta < accounting.SMALLEST_DELTA[accountant]:
            return None
        return accounting.finite(self._composed[accountant].epsilon(delta))

    def table(self, at: list[float]) -> list[dict[str, Any]]:
        """Epsilon by accountant at several deltas."""
        return [{"delta": delta, "epsilon": {name: self.epsilon(name, delta) for name in self.accountants}} for delta in at]

    def rounding(self) -> dict[str, Any] | None:
        """What rounding a ramp of sampling rates up costs in epsilon at most; `None` where every rate is composed as it is."""
        if len(self._charges) == len(self._exact):
            return None
        error = accounting.rounding_error(self._exact, self._delta, self._adjacency)
        counts = {"distinct": len(self._exact), "composed": len(self._charges)}
        return counts | {"epsilon_error_at_most": accounting.finite(error), "pld_grid": loss_grid.grid(self._charges, self._adjacency)}

    def events(self) -> list[dict[str, Any]]:
        """The dp-accounting events composed by the run's own accountant: class, arguments and count."""
        own = self.accountants[0]
        return [{"event": describe(events.event(release, self._adjacency, own)), "count": count} for release, count in self._charges]


def _steps(run: dict[str, Any]) -> set[int]:
    return {step for first, count in run["steps"] for step in range(first, first + count)}


def deltas(delta: float, size: int) -> list[float]:
    """The declared delta among round ones and those that other work uses: 1/N, 1/(2N), N^-1.1."""
    return sorted({delta, 1e-5, 1e-6, 1e-8, 1e-10, 1 / size, 1 / (2 * size), float(size) ** -1.1} - {1.0})


def reasons_against(experiment: Experiment, manifest: Any) -> list[str]:
    """Why no guarantee stands, whatever the noise."""
    data, privacy = experiment.data, experiment.privacy
    checks: list[tuple[bool, str]] = [
        (experiment.seed is not None, "fixed_seed: the noise can be recomputed from the config"),
        (vocabulary_source(data.vocabulary, manifest) == "protected", "vocabulary: fitted on protected text without noise"),
        (
            data.pairs == "cross_document" and privacy.unit != "row",
            f"pairs: data.pairs=cross_document puts text of one {privacy.unit} into rows of another",
        ),
        (
            experiment.sampler.depends_on_size and manifest is not None and data.declared_size not in (None, privacy.population(manifest)),
            f"sampler: {experiment.sampler.name} is accounted at data.declared_size={data.declared_size}, "
            f"not the true number of {privacy.drawn}s",
        ),
    ]
    return [reason for holds, reason in checks if holds]


def refuted(verdict: dict[str, Any] | None) -> list[str]:
    """What the run's own audit proved against the claim."""
    bounds = [] if verdict is None else [bound for bound in (verdict["primary"], *verdict["others"]) if bound["refutes"]]
    return [
        f"audit: a lower bound of {bound['epsilon']:.3f} at delta {bound['delta']:.3g} ({bound['estimator']}, {bound['score']}) "
        f"exceeds the claim of {bound['claim']:.3f}"
        for bound in bounds[:1]
    ]


def audit_facts(experiment: Experiment, verdict: dict[str, Any] | None) -> dict[str, Any]:
    """The audit in the run: what was declared, what came of it, and what publishing that costs."""
    if not isinstance(experiment.audit, Canaries):
        return {"canaries": "none"}
    declared = dataclasses.asdict(experiment.audit)
    named = ("score", "estimator", "guesses", "correct", "delta", "error", "epsilon", "claim")
    return {
        "canaries": {name: declared[name] for name in ("gradients", "sequences")},
        "primary": declared["primary"],
        "verdict": "pending" if verdict is None else "fails" if refuted(verdict) else "passes",
        "lower_bound": None if verdict is None else {name: verdict["primary"][name] for name in named},
        "released": "the verdict and the primary bound: functions of noisy sums charged above and of coins tossed without the data, at no "
        "further cost. Every other bound, the coins, the canaries' texts and the scores stay under private/",
    }


def sampler_facts(experiment: Experiment) -> dict[str, Any]:
    """The sampler that really runs, with its parameters."""
    sizes = sorted({experiment.batch_schedule.at(step) for step in range(experiment.steps)})
    return dataclasses.asdict(experiment.sampler) | {"expected_batch_size": {"smallest": sizes[0], "largest": sizes[-1]}}


def mechanism_facts(experiment: Experiment, calibrated: Calibrated, manifest: Any = None) -> dict[str, Any]:
    """Clip, noise and generator."""
    sigma = calibrated.noise_multiplier
    sizes = [batch for batch, _ in calibrated.batch_runs]
    aside = {name: z for name, z in auxiliary(experiment.clip, experiment.telemetry).items() if z is not None}
    together = {"joint_noise_multiplier": None if sigma is None else joint(sigma, *aside.values())} | aside if aside else {}
    return together | {
        "name": experiment.mechanism.name,
        "clip": experiment.clip.kind,
        "clipping_norm": experiment.clip.clipping_norm,
        "noise_multiplier": sigma,
        "noise_batch_ratio": None if sigma is None else sigma / max(sizes),
        "rounding_margin": MARGINS[experiment.model.dtype],
        **_noise_facts(experiment, manifest),
        "releases": releases(experiment),
    }


def _noise_facts(experiment: Experiment, manifest: Any) -> dict[str, Any]:
    """What the noise is drawn with, how far it reaches, and what a grid adds to the sensitivity, relative to the clipping norm."""

    def count_parameters() -> int:
        vocabulary = experiment.model.vocabulary_size or (manifest.vocabulary_size if manifest else experiment.data.vocabulary.size)
        return count(experiment.task.parameter_shapes(experiment.model, vocabulary))

    facts = experiment.mechanism.noise_facts(experiment.clip.clipping_norm, count_parameters)
    return facts if experiment.seed is None else facts | {"generator_strength_bits": 0}


def releases(experiment: Experiment) -> list[str]:
    """What a run gives away under the claim."""
    return ["the parameters of every step", *experiment.clip.releases(), *experiment.telemetry.releases()]


def write(path: Path, document: dict[str, Any]) -> None:
    """Replaces `path` atomically and durably; a reader sees the old statement or the new one."""
    write_durably(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def recompute(document: dict[str, Any], epsilon_of: Callable[[dp_accounting.DpEvent], float]) -> float:
    """`epsilon_of` the composed event that the statement lists: needs nothing of dpx but the JSON."""
    parts: list[dp_accounting.DpEvent] = [
        dp_accounting.SelfComposedDpEvent(restore(item["event"]), item["count"]) for item in document["ledger"]["events"]
    ]
    return epsilon_of(dp_accounting.ComposedDpEvent(parts))
