"""The run that another run starts from: its declarations, its charges, and the path of its weights. No jax.

Its folder is checked against its ledger, as in every job. A copy of `release/` has no ledger: its statement must be the one that its
weights were released with (`dpx.claim.seals`), and its data is unknown.
"""

import dataclasses
from pathlib import Path
from typing import Any

from dpx import config
from dpx.claim import agreement, outside_code
from dpx.claim.caveats import vocabulary_source
from dpx.claim.reasons import audit_state, chosen_late, of_a_trial, reasons_against, refuted, seeded
from dpx.claim.seals import STATEMENT, seal
from dpx.data import manifests
from dpx.data.declarations import Data
from dpx.declaration import ConfigError, require
from dpx.experiment import Experiment
from dpx.init.declarations import FromRun
from dpx.init.weights import PARAMS, Shapes
from dpx.models.shape import AnyModel
from dpx.models.trained import Trained
from dpx.optimizer import Optimizer
from dpx.privacy import ledger
from dpx.privacy.declarations import Privacy
from dpx.privacy.ledger import Ledger
from dpx.privacy.origins import Origin, of_released
from dpx.privacy.unit_facts import UnitFacts
from dpx.run_folder import CONFIG, RunFolder, read_json
from dpx.task.declarations import Task
from dpx.training.fingerprint import claim_checksum


@dataclasses.dataclass(frozen=True)
class Parent:
    """`origins`: the run itself first, then its own origins; none of them is compared with other data yet.

    `private` is its private tree, `None` for a copied release. `place` is the path of its weights: a released tree, or a checkpoint at
    `step`. `plan` is the plan before its first step, from its ledger.
    """

    asked: str
    model: AnyModel
    task: Task
    train: Trained
    vocabulary_size: int
    optimizer: Optimizer
    origins: tuple[Origin, ...]
    private: Path | None
    place: Path
    step: int | None
    plan: dict[str, Any] | None = None

    @property
    def shapes(self) -> Shapes:
        """Shapes of the model's own parameters, as declared, without adapters."""
        return self.task.parameter_shapes(self.model, self.vocabulary_size)


def of_fork(fork: str) -> FromRun:
    """The parent that `fork`, `<run folder>@<step>`, names; raises `ConfigError` for anything else."""
    run, _, at = fork.rpartition("@")
    is_form = bool(run) and at.isdecimal() and int(at) > 0
    require(is_form, f"fork={fork}", "not of the form <run folder>@<step>", "Write fork=outputs/<run>@<step>")
    return FromRun(run=run, step=int(at))


def open_parent(init: FromRun, asked: str) -> Parent:
    """Reads everything of a run except its weights; `asked` is the name that the user gave. Raises `ConfigError` if the run is missing, is
    being trained, or its parts disagree."""
    release, folder = _found(init.run)
    if folder is None:
        return _copied(asked, init, release)
    with folder.read_by_another():
        entered = agreement.check(folder.path)
        if entered is None:
            return _copied(asked, init, release)
        experiment = _declared(asked, config.place_of(folder.path))
        place = _checkpoint(asked, folder, init.step) if init.step else _released(asked, release)
        document = read_json(release / STATEMENT) if (release / STATEMENT).is_file() else {}
        known = [manifest for one in entered.data if one and (manifest := manifests.manifest(folder.private, one))]
        origin = Origin(
            kind="run",
            name=experiment.name,
            identity=entered.identity,
            segments=entered.own_segments(),
            reasons=_reasons(experiment, known, entered, document),
            claim=_claim(experiment.data, experiment.privacy, document, audit_state(experiment.audit, entered.verdict)),
            vocabulary={"source": vocabulary_source(experiment.data.vocabulary, None), "sha256": _vocabulary(known, document)},
            data=entered.data,
            is_checked=True,
        )
        trained = (experiment.model, experiment.task, experiment.trained, experiment.vocabulary_size, experiment.optimizer)
        return Parent(asked, *trained, (origin, *entered.origins), folder.private, place, init.step, entered.plan)


def _found(named: str) -> tuple[Path, RunFolder | None]:
    """(its release/, its folder) of a run that is named by folder, by name, or by a copy of its release/; the folder is `None` for a
    copy."""
    place = Path(named)
    if (place / "release").is_dir():
        return place / "release", RunFolder(place)
    if place.name == "release" and (place.parent / "private").is_dir():
        return place, RunFolder(place.parent)
    if (place / PARAMS).is_dir() or (place / STATEMENT).is_file():
        return place, None
    require(not place.is_dir(), f"init.run={named}", "holds no run and no release", "Name a run's folder, or a copy of its release/")
    try:
        _, folder = config.load(named)
    except ConfigError as refused:
        raise ConfigError(f"init.{refused.value}", refused.reason, refused.fix) from None
    return folder / "release", RunFolder(folder)


def _copied(asked: str, init: FromRun, release: Path) -> Parent:
    """The parent of which only a copy of its `release/` exists."""
    require(init.step is None, f"init.step={init.step}", "a copied release/ holds no checkpoints", "Leave it out, or name the run's folder")
    place = _released(asked, release)
    require((release / STATEMENT).is_file(), asked, "holds weights without their statement", "Copy the whole release/ folder")
    agreement.check_copy(release)
    document, experiment = read_json(release / STATEMENT), _declared(asked, release / CONFIG)
    try:
        origins = (_stated_origin(experiment.name, experiment.data, experiment.privacy, document), *_stated_further(document))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(release / STATEMENT, "holds no statement of a run that can be read", agreement.OR_COPY) from error
    trained = (experiment.model, experiment.task, experiment.trained, experiment.vocabulary_size, experiment.optimizer)
    return Parent(asked, *trained, origins, None, place, None)


def _stated_origin(name: str, data: Data, privacy: Privacy, document: dict[str, Any]) -> Origin:
    """The origin that the statement of a run describes."""
    is_claimed = outside_code.packages_of_guarantee(str(document.get("guarantee"))) is not None
    reasons = list(document.get("reasons") or ([] if is_claimed else [f"guarantee: {document.get('guarantee')}"]))
    if "tuning" in document:
        reasons.append(of_a_trial([document["tuning"].get("charge")]))
    stated = document.get("ledger", {})
    segments = ledger.join(stated.get("segments") or [])
    if is_claimed and not segments:
        reasons.append("its statement lists no steps whose cost could be added to others, as that of a search's winner")
    return Origin(
        kind="run",
        name=name,
        identity=stated.get("identity") or (stated.get("mark") or {}).get("chain") or f"unnamed {seal(document)}",
        segments=segments,
        reasons=reasons,
        claim=_claim(data, privacy, document, (document.get("audit") or {}).get("verdict")),
        vocabulary=document.get("vocabulary") or {"source": "unknown", "sha256": None},
    )


def _stated_further(document: dict[str, Any]) -> list[Origin]:
    """The earlier runs and files that a statement names."""
    return [of_released(node) for node in (document.get("init") or {}).get("origins", [])]


def _declared(asked: str, place: Path) -> Experiment:
    require(place.is_file(), asked, "holds no config.yaml", "Name the folder of a run that has begun")
    experiment, _ = config.build(config.read(place))
    return experiment


def _released(asked: str, release: Path) -> Path:
    fix = "Let it train to its end, or add init.step=<step> to begin from a checkpoint"
    require((release / PARAMS).is_dir(), asked, "holds no released parameters", fix)
    return release / PARAMS


def _checkpoint(asked: str, folder: RunFolder, step: int) -> Path:
    there = sorted(int(path.name) for path in (folder.private / agreement.CHECKPOINTS).glob("[0-9]*") if path.name.isdigit())
    value = asked if asked.startswith("fork=") else f"init.step={step}"
    require(step in there, value, f"{folder.path} has no checkpoint at step {step}", f"Use one of {there}")
    return folder.private / agreement.CHECKPOINTS / str(step)


def _reasons(experiment: Experiment, known: list[Any], entered: Ledger, document: dict[str, Any]) -> list[str]:
    """The reasons why the parent has no guarantee: from its parts and from its statement."""
    manifest = known[0] if known else None
    reasons = [] if experiment.is_private else [f"mechanism={experiment.mechanism.name} adds no noise"]
    began_with = [epoch.fingerprint.get("claim") for epoch in entered.noise_epochs]
    if any(claim != claim_checksum(experiment) for claim in began_with):
        reasons.append("its config.yaml is not the config that its ledger began with")
    reasons += reasons_against(experiment, manifest) + seeded(entered) + chosen_late(entered) + refuted(entered.verdict)
    # A run may be resumed by commands that do not name the search; its ledger and its statement still do.
    charges = [trial.charge for trial in entered.trials] + ([document["tuning"].get("charge")] if "tuning" in document else [])
    charges += [experiment.tune.charge] if experiment.tune is not None else []
    if charges:
        reasons.append(of_a_trial(charges))
    if experiment.is_private and not entered.segments():
        reasons.append("its ledger charges nothing")
    stated = document.get("reasons", []) if document.get("guarantee") != "not_private" else []
    return list(dict.fromkeys([*reasons, *stated]))


def _claim(data: Data, privacy: Privacy, document: dict[str, Any], audit: str | None) -> dict[str, Any]:
    """What the parent states and declares about its units; `audit` is the state of its audit, `None` without an audit."""
    stated = {name: document[name] for name in ("guarantee", "epsilon", "steps") if name in document}
    declared = {"unit": privacy.unit, "adjacency": privacy.adjacency, "delta": privacy.delta}
    audited = {"audit": audit} if audit else {}
    return stated | declared | audited | {"units": UnitFacts.from_data(data, privacy).as_json()}


def _vocabulary(known: list[Any], document: dict[str, Any]) -> str | None:
    """A checksum of its vocabulary, from its data's manifest or else its statement."""
    return known[0].vocabulary_checksum if known else (document.get("vocabulary") or {}).get("sha256")
