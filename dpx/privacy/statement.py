"""`privacy.json`: what the run guarantees, computed from its ledger, and what it does not."""

import dataclasses
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_accounting
from dp_accounting import dp_event

from dpx.audit.declarations import Canaries
from dpx.clipping.rounding import MARGINS
from dpx.declaration import Refused
from dpx.experiment import Experiment
from dpx.mechanism import grid
from dpx.mechanism.declarations import REACH, Quantile, ReleasedTelemetry
from dpx.models.shape import count
from dpx.privacy import accounting, approximations, events, ledger
from dpx.privacy.calibration import ASSUMED_ADJACENCY, Calibrated, assumed, beside, compositions
from dpx.privacy.declarations import GdpClt
from dpx.privacy.joint import joint
from dpx.privacy.ledger import Ledger, Runs
from dpx.randomness import sync_directory

FORMAT = 1

NOT_COVERED = (
    "choosing hyperparameters, checkpoints or repeats by looking at the protected data: only this run's own steps are charged",
    "other runs on the same data: charge several ledgers jointly",
    "documents of the public and held-out splits",
    "everything under private/: exact losses, norms, draws and logs depend on the data without noise",
    "timing, memory use and the number of microbatches, which follow the draw",
)

MARGIN_COVERS = "the rounding margin is proved for gradients that cancel moderately (see dpx.clipping.rounding) and measured beyond that"
FLOATS = f"floating point: noise is float32, so the low-order bits of an output are not those of a real Gaussian; {MARGIN_COVERS}"
FLOATS_ON_A_GRID = (
    "floating point: each microbatch is clipped and added up in float32 before it is rounded to the grid, from where on all is integers; "
    + MARGIN_COVERS
)

TWO_PASSES = (
    "clipping=ghost takes every gradient twice, once for its norm and once for the sum: that both round alike within the margin is "
    "measured (see dpx.clipping.rounding), not proved"
)


def not_covered(experiment: Experiment) -> list[str]:
    """What the guarantee says nothing about."""
    twice = [TWO_PASSES] if experiment.is_private and experiment.clipping.method == "ghost" else []
    return [*NOT_COVERED, FLOATS if grid.spacing(experiment) is None else FLOATS_ON_A_GRID, *twice]


def build(
    experiment: Experiment, manifest: Any, calibrated: Calibrated, entered: Ledger | None = None, verdict: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Every field of the statement. `manifest` is the store's, or `None` before the data is prepared; `entered` the ledger so far;
    `verdict` what the run's own audit found (`dpx.audit.verdict`), or `None` before its end."""
    reasons = reasons_against(experiment, manifest) + refuted(verdict)
    common = {"format": FORMAT, "name": experiment.name, "replicate": experiment.replicate, "steps": experiment.steps}
    common |= tuning_facts(experiment)
    if not experiment.is_private:
        return common | {"guarantee": "not_private", "reasons": ["mechanism=none"], "epsilon": {}, "not_covered": not_covered(experiment)}
    runs = entered.runs() if entered is not None else []
    spent = Spent(experiment, runs)
    privacy, size = experiment.privacy, calibrated.size
    own = spent.accountants[0]
    if spent.epsilon(own) is None:
        reasons.append(f"accountant={own} finds no finite epsilon at this delta")
    return common | {
        "guarantee": "none" if reasons else "dp",
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
        "epsilon": {} if reasons else {name: spent.epsilon(name) for name in spent.accountants},
        "epsilon_at": [] if reasons else spent.table(deltas(privacy.delta, size)),
        "unsupported": unsupported(experiment, reasons, spent, runs),
        "planned": {"steps": experiment.steps, "epsilon": {name: accounting.finite(value) for name, value in calibrated.epsilon.items()}},
        "spent": {
            "steps": len({step for run in runs for step in _steps(run)}),
            "charged_steps": spent.steps,
            "epsilon": {name: spent.epsilon(name) for name in spent.accountants},
        },
        "assumptions": assumptions(experiment, manifest, size),
        "audit": audit_facts(experiment, verdict),
        "not_covered": not_covered(experiment),
        "ledger": {
            "runs": runs,
            "rates_rounded_up": spent.rounding(),
            "events": spent.events(),
            "identity": entered.identity if entered is not None else None,
        },
    }


_OF_A_TRIAL = {
    "uncharged": "one trial of a search; the choice of its settings and the choice among the trials are not charged, here or elsewhere",
    "composition": "one trial of a search; its settings follow from other trials, so the statement of the whole study is the claim",
    "repeat_and_select": "one trial of a search that releases its winner alone, under the statement of the whole study",
}


def tuning_facts(experiment: Experiment) -> dict[str, Any]:
    """`tuning` of a run that is a trial of a search: how the choice is charged, in a word and in a sentence."""
    if experiment.tune is None:
        return {}
    return {"tuning": {"charge": experiment.tune.charge, "meaning": _OF_A_TRIAL[experiment.tune.charge]}}


class Spent:
    """Epsilon of what the ledger holds, composed once per accountant."""

    def __init__(self, experiment: Experiment, runs: Runs):
        self._delta, self._adjacency = experiment.privacy.delta, experiment.privacy.adjacency
        self._exact = ledger.releases(runs)
        self._charges = accounting.bucketed(self._exact)
        self.steps = sum(count for run in runs for _, count in run["steps"])
        self._composed = compositions(experiment, self._charges)
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
        return counts | {"epsilon_error_at_most": accounting.finite(error), "pld_grid": accounting.grid(self._charges)}

    def events(self) -> list[dict[str, Any]]:
        """The dp-accounting events composed by the run's own accountant: class, arguments and count."""
        own = self.accountants[0]
        return [{"event": describe(events.event(release, self._adjacency, own)), "count": count} for release, count in self._charges]


def describe(event: dp_accounting.DpEvent) -> dict[str, Any]:
    """A dp-accounting event as JSON: its class under `class`, its arguments by name."""
    named = event.to_named_tuple()
    described: dict[str, Any] = {"class": named.class_name}
    for name in named._fields:
        if name not in ("module_name", "class_name"):
            value = getattr(event, name)
            described[name] = describe(value) if isinstance(value, dp_accounting.DpEvent) else value
    return described


def restore(described: dict[str, Any]) -> dp_accounting.DpEvent:
    """The event that `describe` was given."""
    arguments = {name: restore(value) if isinstance(value, dict) else value for name, value in described.items() if name != "class"}
    return getattr(dp_event, described["class"])(**arguments)


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
        (_vocabulary_source(experiment, manifest) == "protected", "vocabulary: fitted on protected text without noise"),
        (
            data.pairs == "cross_document" and privacy.unit != "row",
            f"pairs: data.pairs=cross_document puts text of one {privacy.unit} into rows of another",
        ),
        (
            experiment.sampler.name in ("truncated_poisson", "fixed_size")
            and manifest is not None
            and data.declared_size not in (None, privacy.population(manifest)),
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


def _vocabulary_source(experiment: Experiment, manifest: Any) -> str:
    if manifest is not None:
        return manifest.vocabulary_source
    vocabulary = experiment.data.vocabulary
    return "file" if vocabulary.path else {"public": "public_split", "protected": "protected"}[vocabulary.fit_on]


def sampler_facts(experiment: Experiment) -> dict[str, Any]:
    """The sampler that really runs, with its parameters."""
    sizes = sorted({experiment.batch_schedule.at(step) for step in range(experiment.steps)})
    return dataclasses.asdict(experiment.sampler) | {"expected_batch_size": {"smallest": sizes[0], "largest": sizes[-1]}}


def mechanism_facts(experiment: Experiment, calibrated: Calibrated, manifest: Any = None) -> dict[str, Any]:
    """Clip, noise and generator."""
    sigma = calibrated.noise_multiplier
    sizes = [batch for batch, _ in calibrated.batch_runs]
    aside = {name: z for name, z in beside(experiment).items() if z is not None}
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
    seeded = experiment.seed is not None
    if grid.spacing(experiment) is None:
        generator, strength, margin = "threefry2x32 keys derived by keyed BLAKE2b from one root secret", 64, 0.0
    else:
        generator, strength = "SHAKE-256 streams whose keys are derived by keyed BLAKE2b from one root secret", 256
        vocabulary = experiment.model.vocabulary_size or (manifest.vocabulary_size if manifest else experiment.data.vocabulary.size)
        parameters = count(experiment.task.parameter_shapes(experiment.model, vocabulary))
        margin = grid.sensitivity(experiment, parameters) / experiment.clip.clipping_norm - 1
    reach = REACH if grid.spacing(experiment) is None else None
    strength = 0 if seeded else strength
    return {"grid_margin": margin, "generator": generator, "generator_strength_bits": strength, "noise_reach_in_deviations": reach}


def releases(experiment: Experiment) -> list[str]:
    """What a run gives away under the claim."""
    found = ["the parameters of every step"]
    if isinstance(experiment.clip, Quantile):
        found.append("the clipping norm of every step, which follows noisy counts of examples within it (release/telemetry.jsonl)")
    if isinstance(experiment.telemetry, ReleasedTelemetry):
        found.append("noisy loss and accuracy of every step (release/telemetry.jsonl)")
    return found


def assumptions(experiment: Experiment, manifest: Any, size: int) -> list[str]:
    """What must hold for the guarantee to mean what it says."""
    privacy = experiment.privacy
    sources = {
        "public_split": "the vocabulary is fitted on documents of the public split, which are not protected",
        "file": "the vocabulary file does not depend on the protected text",
        "protected": "the vocabulary was fitted on protected text",
    }
    size_known = {
        "zero_out": f"the number of {privacy.drawn}s ({size}) is public; the neighbour has one unit's content zeroed out",
        "add_remove": f"the declared number of {privacy.drawn}s ({size}) is public and does not depend on the data",
        "replace_one": f"the number of {privacy.drawn}s ({size}) is public; the neighbour has one unit replaced",
    }
    found = [sources[_vocabulary_source(experiment, manifest)], size_known[privacy.adjacency]]
    found.append("every choice made in this config was made without looking at the protected text")
    found.append("the root secret stays in private/ and is not given away with the model")
    if experiment.data.pairs != "none" and privacy.unit == "row":
        found.append("one protected row is one pair of segments: text that appears in several rows is protected row by row only")
    if privacy.rows_per_example > 1:
        most = privacy.rows_per_unit_max
        found.append(f"what is drawn and clipped is a whole {privacy.unit}: the sum of the gradients of its rows, {most} at most")
    if isinstance(experiment.audit, Canaries):
        places = experiment.audit.places(privacy)
        found.append(f"{places} of the {size} {privacy.drawn}s are places of canaries, which hold no protected text")
    if privacy.delta >= 1 / size:
        found.append(f"privacy.allow_large_delta: delta {privacy.delta} is not below 1/N = {1 / size:.3g}")
    return found


def unsupported(experiment: Experiment, reasons: list[str], spent: Spent, runs: Runs) -> list[dict[str, Any]]:
    """Numbers that are not bounds for this run, each with the reason why."""
    found: list[dict[str, Any]] = []
    if reasons:
        found += [{"name": f"epsilon/{name}", "value": spent.epsilon(name), "reason": "; ".join(reasons)} for name in spent.accountants]
    if experiment.sampler.assumed is not None:
        found += _under_assumed_sampler(experiment, runs)
    if isinstance(experiment.accountant, GdpClt):
        known = [run | {"sampler": "poisson"} for run in runs]
        value = approximations.gdp_clt_epsilon(ledger.releases(known), experiment.privacy.delta)
        why = "the central limit of Gaussian DP is an approximation and can under-report"
        found.append({"name": "epsilon/gdp_clt", "value": accounting.finite(value), "reason": why})
    return found


def _under_assumed_sampler(experiment: Experiment, runs: Runs) -> list[dict[str, Any]]:
    ran, name = experiment.sampler.name, experiment.sampler.assumed
    charges = accounting.bucketed(ledger.releases(assumed(experiment, runs)))
    why = f"sampler.assumed={name} under {ASSUMED_ADJACENCY}, but {ran} ran"
    found = []
    for accountant in ("pld", "rdp"):
        try:
            value = accounting.compose(charges, accountant, ASSUMED_ADJACENCY).epsilon(experiment.privacy.delta) if charges else 0.0
        except Refused:
            # Renyi accounting knows no unit of several rows; what is unsupported anyway is then left out.
            continue
        found.append({"name": f"epsilon/{accountant}/{name}", "value": accounting.finite(value), "reason": why})
    return found


def write(path: str | os.PathLike[str], document: dict[str, Any]) -> None:
    """Replaces `path` atomically; a reader sees the old statement or the new one."""
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(draft, "w") as file:
            json.dump(document, file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    sync_directory(path.parent)


def recompute(document: dict[str, Any], epsilon_of: Callable[[dp_accounting.DpEvent], float]) -> float:
    """`epsilon_of` the composed event that the statement lists: needs nothing of dpx but the JSON."""
    parts: list[dp_accounting.DpEvent] = [
        dp_accounting.SelfComposedDpEvent(restore(item["event"]), item["count"]) for item in document["ledger"]["events"]
    ]
    return epsilon_of(dp_accounting.ComposedDpEvent(parts))
