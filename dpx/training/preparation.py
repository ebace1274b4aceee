"""Prepares a run before any array of its model exists: data, noise, microbatch, and its starting point."""

import dataclasses
from pathlib import Path
from typing import Any

from dpx.audit.canaries import require_same_audit
from dpx.audit.declarations import Canaries
from dpx.audit.objective import LENGTH, Audited
from dpx.claim import agreement
from dpx.claim.calibration import Calibrated, as_planned, calibrate
from dpx.claim.spent import require_bound
from dpx.console import stage
from dpx.data.prepare import prepare, say_stage
from dpx.data.store import Store
from dpx.declaration import require
from dpx.experiment import Experiment
from dpx.init.declarations import Init
from dpx.init.relation import contradictions
from dpx.init.start import RANDOM, Receiver, Start, receiver_of, related_again, require_one_start, same_weights, start, start_of_fork
from dpx.privacy.ledger import Ledger
from dpx.run_folder import RunFolder
from dpx.task.objective import objective as make_objective
from dpx.training.microbatch import Workload, resolve_microbatch
from dpx.training.step import Step, make_step


@dataclasses.dataclass(frozen=True)
class Ready:
    """A prepared run. `objective` is the model's own, `step` trains it with what an audit adds; `microbatch` is the number of examples on
    one device; `strategy` is the mechanism's, `None` if it needs no strategy."""

    store: Store
    calibrated: Calibrated
    receiver: Receiver
    start: Start
    objective: Any
    microbatch: int
    strategy: Any
    step: Step


def get_ready(experiment: Experiment, folder: RunFolder) -> Ready:
    """Prepares data, solves for the noise and builds the step; raises `ConfigError` for settings that cannot be combined."""
    experiment.mechanism.require_library(folder.private)
    known = agreement.before_training(folder.path)
    store = prepare(experiment.data, experiment.privacy, say_stage)
    stage("solving for the noise and its epsilon" if experiment.is_private else "planning")
    calibrated = calibrate(experiment, experiment.privacy.population(store.manifest))
    calibrated = as_planned(experiment, calibrated, known.plan if known else None)
    mesh = experiment.mesh.make()
    vocabulary_size = experiment.model.vocabulary_size or store.manifest.vocabulary_size
    receiver = receiver_of(experiment, vocabulary_size)
    begins_from = _start(experiment.init, receiver, store, folder, known)
    require_bound(experiment, calibrated, begins_from.origins)
    objective = make_objective(experiment.model, experiment.task, vocabulary_size, store.manifest)
    microbatch = resolve_microbatch(experiment.microbatch, Workload.from_experiment(experiment, objective), folder.private)
    audit, trained = experiment.audit, objective
    if isinstance(audit, Canaries):
        trained = Audited(objective, audit.gradients, LENGTH * experiment.clip.clipping_norm)
    if folder.fork and begins_from.private is not None:
        require_same_audit(folder.fork, begins_from.private, audit)
    strategy = experiment.mechanism.load_strategy(experiment.steps, folder.private)
    step = make_step(experiment, trained, mesh, microbatch)
    return Ready(store, calibrated, receiver, begins_from, objective, microbatch, strategy, step)


def _start(init: Init, receiver: Receiver, store: Store, folder: RunFolder, known: Ledger | None) -> Start:
    """The start of a run that has no checkpoint yet; a run with a checkpoint resumes without its initial weights."""
    require_one_start(init, folder.fork)
    has_begun = known is not None and bool(known.noise_epochs)
    has_checkpoint = any(path.name.isdigit() for path in folder.private.glob(f"{agreement.CHECKPOINTS}/*"))
    if has_begun and has_checkpoint:
        return _going_on(init, receiver, store, folder, known)
    if folder.fork is not None:
        return start_of_fork(folder.fork, receiver, store, folder.private)
    if init.is_random:
        return RANDOM
    begins_from = start(init, receiver, store, {folder.path.parent, Path("outputs")}, folder.private)
    require(
        not has_begun or same_weights(begins_from.origins, known.origins if known else ()),
        folder.path,
        "the run or file that it started from now holds other weights, and it has no checkpoint yet",
        "Restore them, or add replicate=1 for a new run",
    )
    return begins_from


def _going_on(init: Init, receiver: Receiver, store: Store, folder: RunFolder, known: Ledger | None) -> Start:
    """The start of a run that has a checkpoint: weights are not read again, but data from which it has not drawn yet are checked against
    the user's statement that its data are disjoint."""
    if known is None or store.manifest.checksum in known.data:
        return RANDOM
    noted = related_again(known.origins, receiver, init, store, known.data)
    return dataclasses.replace(RANDOM, messages=tuple(contradictions(noted, store, folder.private, folder.private)))
