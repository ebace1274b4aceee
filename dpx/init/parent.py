"""Reads the run that another run starts from: its declarations, its charges and its weights. Only the weights need jax.

Its folder is checked against its ledger, as in every job. A copy of `release/` has no ledger: its statement must be the one that its
weights were released with (`dpx.statement.seals`), and its data is unknown.

Weights that a run in a folder of outputs released are recognised, so that they are not presented as public ones.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from dpx import config
from dpx.claim.caveats import chosen_late, of_a_trial, reasons_against, refuted, seeded, state_after
from dpx.config.declared_audit import Canaries
from dpx.config.declared_init import FromRun
from dpx.config.experiment import Experiment
from dpx.data import left_out
from dpx.data.declared_data import Data
from dpx.data.protected_units import unit_facts, vocabulary_source
from dpx.declaration import ConfigError, require
from dpx.durable import seal
from dpx.files.records import to_json
from dpx.files.run_folder import CONFIG, RunFolder
from dpx.files.weights import FROZEN, METADATA, PARAMS, Leaves, Shapes, by_path, checksum, checksums, facts_beside
from dpx.models.shape import AnyModel
from dpx.models.trained import Adapters, Trained
from dpx.optimizer import Optimizer
from dpx.privacy.declared_privacy import Privacy
from dpx.privacy.lines import Plan
from dpx.privacy.origins import Origin, ParentClaim, VocabularyFacts, given_by_statement, of_released
from dpx.privacy.segments import without
from dpx.statement import agreement, outside_code
from dpx.statement.seals import STATEMENT, read_run_statement, read_statement
from dpx.statement.statement_records import RunStatement, Statement, StudyStatement
from dpx.task.declared_task import Task


@dataclasses.dataclass(frozen=True)
class Parent:
    """Describes the run that another run starts from.

    `origins` are the run itself first, then its own origins; none of them is compared with other data yet. `private` is its private tree,
    `None` for a copied release. `place` is the path of its weights: a released tree, or a checkpoint at `step`. `plan` is the plan before
    its first step, from its ledger.
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
    plan: Plan | None = None

    @property
    def shapes(self) -> Shapes:
        """The shapes of the model's own parameters, as declared, without adapters."""
        return self.task.parameter_shapes(self.model, self.vocabulary_size)


def of_fork(fork: str) -> FromRun:
    """Returns the parent that `fork`, `<run folder>@<step>`, names; raises `ConfigError` for anything else."""
    run, _, at = fork.rpartition("@")
    is_form = bool(run) and at.isdecimal() and int(at) > 0
    require(is_form, f"fork={fork}", "is not of the form <run folder>@<step>", "Write fork=outputs/<run>@<step>")
    return FromRun(run=run, step=int(at))


def open_parent(init: FromRun, asked: str) -> Parent:
    """Reads everything of a run except its weights; `asked` is the name that the user gave.

    Raises `ConfigError` if the run is missing, is being trained, or its parts disagree.
    """
    release, folder = _found(init.run)
    if folder is None:
        return _copied(asked, init, release)
    with folder.read_by_another():
        entered = agreement.check(folder.path)
        if entered is None:
            return _copied(asked, init, release)
        experiment = _declared(asked, config.place_of(folder.path))
        place = _checkpoint(asked, folder, init.step) if init.step else _released(asked, release)
        stated = read_run_statement(release / STATEMENT) if (release / STATEMENT).is_file() else None
        known = [manifest for one in entered.data if one and (manifest := left_out.manifest(folder.private, one))]
        # The reasons why it has no guarantee, from its parts and from its statement.
        reasons = [] if experiment.is_private else [f"mechanism={experiment.mechanism.name} adds no noise"]
        if any(epoch.fingerprint.get("claim") != experiment.claim_checksum for epoch in entered.noise_epochs):
            reasons.append("its config.yaml is not the config that its ledger began with")
        of_mechanism, data = experiment.claim.reasons_of_mechanism, known[0] if known else None
        reasons += reasons_against(experiment.data, experiment.privacy, experiment.sampler, experiment.seed, of_mechanism, data)
        reasons += seeded(entered) + chosen_late(entered) + refuted(entered.verdict)
        # A run may be resumed by commands that do not name the search; its ledger and its statement still do.
        charges = [trial.charge for trial in entered.trials]
        charges += [stated.tuning.charge] if stated is not None and stated.tuning is not None else []
        charges += [experiment.tune.charge] if experiment.tune is not None else []
        if charges:
            reasons.append(of_a_trial(charges))
        if experiment.is_private and not entered.segments():
            reasons.append("its ledger charges nothing")
        reasons += stated.reasons if isinstance(stated, RunStatement) else ()
        audit = state_after(entered.verdict) if isinstance(experiment.audit, Canaries) else None
        sha256 = known[0].vocabulary_checksum if known else None if stated is None else stated.vocabulary.sha256
        origin = Origin(
            kind="run",
            name=experiment.name,
            identity=entered.identity,
            segments=tuple(entered.own_segments()),
            reasons=tuple(dict.fromkeys(reasons)),
            claim=_claim(experiment.data, experiment.privacy, stated, audit, entered.sent_to),
            vocabulary=VocabularyFacts(source=vocabulary_source(experiment.data.vocabulary, None), sha256=sha256),
            data=tuple(entered.data),
            files=tuple(dict.fromkeys(file for one in known for file in one.read_from)),
            is_checked=True,
        )
        trained = (experiment.model, experiment.task, experiment.trained, experiment.vocabulary_size, experiment.optimizer)
        return Parent(asked, *trained, (origin, *entered.origins), folder.private, place, init.step, entered.plan)


def _found(named: str) -> tuple[Path, RunFolder | None]:
    """Returns (its release/, its folder) of a run that is named by folder, by name, or by a copy of its release/.

    The folder is `None` for a copy.
    """
    place = Path(named)
    if (place / "release").is_dir():
        return place / "release", RunFolder(place)
    if place.name == "release" and (place.parent / "private").is_dir():
        return place, RunFolder(place.parent)
    if (place / PARAMS).is_dir() or (place / STATEMENT).is_file():
        return place, None
    require(
        not place.is_dir(), f"init.run={named}", "contains neither a run nor a release", "Name a run's folder, or a copy of its release/"
    )
    try:
        _, folder = config.load(named)
    except ConfigError as refused:
        raise ConfigError(f"init.{refused.value}", refused.reason, refused.fix) from None
    return folder / "release", RunFolder(folder)


def _copied(asked: str, init: FromRun, release: Path) -> Parent:
    """Returns the parent of which only a copy of its `release/` exists."""
    require(
        init.step is None, f"init.step={init.step}", "a copied release/ holds no checkpoints", "Remove init.step, or name the run's folder"
    )
    place = _released(asked, release)
    require((release / STATEMENT).is_file(), asked, "contains weights but not their statement", "Copy the whole release/ folder")
    agreement.check_copy(release)
    statement, experiment = read_statement(release / STATEMENT, agreement.OR_COPY), _declared(asked, release / CONFIG)
    # The statement of a search's winner lists no steps of the run itself.
    of_run = None if isinstance(statement, StudyStatement) else statement
    private = statement if isinstance(statement, RunStatement) else None
    reasons = list(statement.reasons)
    if of_run is not None and of_run.tuning is not None:
        reasons.append(of_a_trial([of_run.tuning.charge]))
    segments = () if private is None else private.ledger.segments
    if outside_code.packages_of_guarantee(statement.guarantee) is not None and not segments:
        reasons.append(
            "its statement lists no steps whose cost can be composed with others (the statement of a search's winner, for example)"
        )
    audit = None if private is None or private.audit is None else private.audit.verdict
    mark = None if of_run is None else of_run.ledger.mark
    named = (None if private is None else private.ledger.identity) or (None if mark is None else mark.chain)
    # As in its ledger, what its origins charged is charged by them, so that a word about their data holds for their charges too.
    further = [] if isinstance(statement, StudyStatement) else [of_released(one) for one in statement.init.origins]
    own = without(segments, *(one.segments for one in further)) if further else segments
    origin = Origin(
        kind="run",
        name=experiment.name,
        identity=named or f"unnamed {seal(to_json(statement))}",
        segments=tuple(own),
        reasons=tuple(reasons),
        claim=_claim(experiment.data, experiment.privacy, statement, audit, given_by_statement(statement.not_covered)),
        vocabulary=VocabularyFacts() if of_run is None else of_run.vocabulary,
    )
    trained = (experiment.model, experiment.task, experiment.trained, experiment.vocabulary_size, experiment.optimizer)
    return Parent(asked, *trained, (origin, *further), None, place, None)


def _declared(asked: str, place: Path) -> Experiment:
    require(place.is_file(), asked, "contains no config.yaml", "Name the folder of a run that has begun")
    experiment, _ = config.build(config.read(place))
    return experiment


def _released(asked: str, release: Path) -> Path:
    fix = "Let it train to its end, or add init.step=<step> to begin from a checkpoint"
    require((release / PARAMS).is_dir(), asked, "contains no released parameters", fix)
    return release / PARAMS


def _checkpoint(asked: str, folder: RunFolder, step: int) -> Path:
    there = sorted(int(path.name) for path in (folder.private / agreement.CHECKPOINTS).glob("[0-9]*") if path.name.isdigit())
    value = asked if asked.startswith("fork=") else f"init.step={step}"
    require(step in there, value, f"{folder.path} has no checkpoint at step {step}", f"Use one of {there}")
    return folder.private / agreement.CHECKPOINTS / str(step)


def _claim(data: Data, privacy: Privacy, stated: Statement | None, audit: str | None, given: tuple[str, ...]) -> ParentClaim:
    """Returns what the parent states and declares about its units; `audit` is the state of its audit, `None` without an audit, and `given`
    are those who were given its metrics without noise."""
    return ParentClaim(
        guarantee=None if stated is None else stated.guarantee,
        epsilon=None if stated is None else stated.epsilon,
        steps=None if stated is None or isinstance(stated, StudyStatement) else stated.steps,
        unit=privacy.unit,
        adjacency=privacy.adjacency,
        delta=privacy.delta,
        audit=audit,
        units=unit_facts(data, privacy),
        given_protected=given,
    )


def require_no_known_release(asked: str, leaves: Leaves, outputs: Iterable[Path]) -> None:
    """Raises `ConfigError` if `leaves` hold a parameter that a run in one of the folders `outputs` trained and released.

    A run that would release it if it won its search counts too, and a run that began from exactly these leaves does not: what it left
    unchanged was known before it read its data.
    """
    held = {digest: path for path, digest in checksums(leaves).items()}
    places = ("*/release", "*/private/withheld", "studies/*/release/winner")
    released = {metadata.parent for folder in outputs for place in places for metadata in folder.glob(f"{place}/{PARAMS}/{METADATA}")}
    for params in sorted(released):
        known = facts_beside(params)
        # The folder of the run; for a search's winner or withheld weights, the folder that holds the weights.
        place = params.parents[1] if params.parent.name == "release" else params.parent
        run = place if place != params.parent else params.parents[2]
        digests = {path: (known.get("weights") or {}).get(path, "") for path in known.get("trained", ())}
        path = next((path for path, digest in digests.items() if digest in held), None)
        if path is None or _first_weights(params.parent) == checksum(leaves):
            continue
        raise ConfigError(
            asked,
            f"contains, as {held[digests[path]]}, the array {path} that the run {run.name} released",
            f"Begin from that run, so that its cost is included: init=run init.run={place}",
        )


def _first_weights(release: Path) -> str | None:
    """Returns the checksum of the weights that a run began from, by its statement; `None` if no sound statement tells them."""
    try:
        statement = read_statement(release / STATEMENT)
    except ConfigError:
        return None
    origins = getattr(getattr(statement, "init", None), "origins", ())
    return getattr(origins[0], "weights", None) if origins else None


def parameters_of(parent: Parent, train: Trained) -> Leaves:
    """Returns the weights that the parent released, or its checkpoint merged with its frozen parameters.

    Adapters are kept if `train` has the same ones; else they are merged into the weights that they adapt. Raises `ConfigError` if a file is
    cut short or is not what was released.
    """
    import jax
    import numpy as np

    from dpx.audit.canaries import CANARIES
    from dpx.clipping.readers import merged
    from dpx.files.orbax_checkpoints import read_together
    from dpx.models.lora import merge_adapters
    from dpx.models.trainable import whole

    if not parent.step:
        tree = read_together(parent.place)
    else:
        assert parent.private is not None
        tree = {name: leaf for name, leaf in read_together(parent.place, "params").items() if name != CANARIES}
        if not parent.train.is_all:
            stored = parent.private / FROZEN
            require(stored.is_dir(), stored, "the parent's frozen parameters are missing", "Restore it, or begin from its released weights")
            tree = jax.tree.map(np.asarray, whole(merged(tree, read_together(stored))))
    if isinstance(tree.get("layers"), dict) and "lora" in tree["layers"] and not is_adapted_alike(parent.train, train):
        tree = jax.tree.map(np.asarray, merge_adapters(tree))
    return by_path(tree)


def is_adapted_alike(one: Trained, other: Trained) -> bool:
    """Returns whether two runs have adapters of the same form."""
    if not isinstance(one, Adapters) or not isinstance(other, Adapters):
        return False
    # The dropout rate is stored beside the factors: factors of a run with another rate would also load that rate.
    forms = [(each.rank, each.alpha, sorted(each.targets), each.dropout) for each in (one, other)]
    return forms[0] == forms[1]
