"""Opens a run, from top to bottom: the data and the noise, the step, the initial weights, its ledger and its outputs.

Everything that can be refused is refused before the first array of the model exists.

Lets jax keep compiled programs on disk, so that points of a sweep that share shapes, and a run that is resumed, compile once.

The folder is `$DPX_CACHE/compiled` or `~/.cache/dpx/compiled`, and losing it costs seconds. A program is found by all that decides on it:
its operations, the versions of jax and XLA, its flags and the device. The same program has the same bits, whether compiled or read.
"""

import contextlib
import dataclasses
import hashlib
import os
import platform
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax

from dpx.audit import in_run
from dpx.audit.canaries import require_same_audit
from dpx.audit.canary_objective import audited
from dpx.claim.calibration import Calibrated, as_planned, calibrate, plan_of, planned_segments
from dpx.claim.claim_checksum import claim_checksum
from dpx.claim.spent import Spending, planned_end, require_bound
from dpx.config.declared_audit import Canaries
from dpx.config.declared_init import Init
from dpx.config.experiment import Experiment
from dpx.console import stage
from dpx.data import left_out
from dpx.data.prepare import prepare, say_stage
from dpx.data.protected_units import unit_facts
from dpx.data.store import Store
from dpx.declaration import require
from dpx.durable import make_folder, make_private
from dpx.files.orbax_checkpoints import Checkpoints
from dpx.files.run_folder import RunFolder
from dpx.init.relation import contradictions
from dpx.init.start import RANDOM, Receiver, Start, receiver_of, related_again, require_one_start, same_weights, start, start_of_fork
from dpx.privacy.cache import folder
from dpx.privacy.ledger import Ledger
from dpx.processes import supervisor, team
from dpx.processes.mesh import Mesh
from dpx.processes.place import require_processes
from dpx.statement import agreement
from dpx.task.objective import objective as make_objective
from dpx.training import evaluation, features, one_run_of_all
from dpx.training.evaluation import evaluations_of
from dpx.training.fingerprint import fingerprint
from dpx.training.loop import Runtime
from dpx.training.lossy_file import Released
from dpx.training.metrics import MetricsWriter, RunProgress
from dpx.training.microbatch import Workload, resolve_microbatch
from dpx.training.profiling import profiling
from dpx.training.run_start import NoiseEpochs, allowed_again, start_run
from dpx.training.session import Outputs, Session
from dpx.training.step import Step, make_step
from dpx.training.together import connect

_OF_THE_USER = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")


def keep_compiled_programs() -> None:
    """Keeps programs that take more than a second to compile (`JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS`) from now on.

    A setting of the user wins. Nothing is kept by several processes of one job, or if the folder cannot be made.
    """
    # Its attributes are made when jax is imported.
    config: Any = jax.config
    if config.jax_compilation_cache_dir or any(name in os.environ for name in _OF_THE_USER) or not team().is_alone:
        return
    # What is read is run, so no other account may write it.
    with contextlib.suppress(OSError):
        make_private(folder() / "compiled")
        own = folder() / "compiled" / _processor()
        make_folder(own)
        config.update("jax_compilation_cache_dir", str(own))


def _processor() -> str:
    """Returns a name of the processor's model and features: a program for another one may use instructions that this one lacks."""
    facts = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        facts += [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return f"{platform.machine()}-{hashlib.blake2b(repr(facts).encode(), digest_size=4).hexdigest()}"


@contextlib.contextmanager
def open_run(experiment: Experiment, folder: RunFolder, job: Any = None) -> Iterator[Session]:
    """Prepares a run of `job` in `folder` and keeps its ledger, checkpoints and output files open until the context ends.

    Raises `ConfigError` before the first array of the model is allocated. In a job of several processes, this is process 0, which tells
    the others what to do (`dpx.training.follower`).
    """
    _start_jax(experiment.mesh, folder)
    keep_compiled_programs()
    ready = _get_ready(experiment, folder)
    store, step, private = ready.store, ready.step, folder.private
    with contextlib.ExitStack() as stack:
        stack.callback(team().tell, "close")
        stack.enter_context(supervisor.told(team(), experiment.mesh.deadline_s, experiment.mesh.restarts))
        ledger = stack.enter_context(contextlib.closing(Ledger(private / "ledger")))
        schedule, mesh = experiment.schedule, experiment.mesh.make()
        checkpoints = stack.enter_context(contextlib.closing(Checkpoints(private / agreement.CHECKPOINTS, schedule.checkpoints_kept)))
        unchanged = fingerprint(experiment, store.manifest.checksum, ready.microbatch, ready.strategy, job)
        claimed = experiment.accountant, experiment.privacy
        allow = allowed_again(*claimed, partial(planned_segments, experiment), ready.calibrated, ledger)
        noise_epochs = NoiseEpochs(folder, experiment.seed, unchanged, ledger, plan_of(experiment, ready.calibrated), allow)
        _describe_data(private, store)
        run_start = start_run(noise_epochs, checkpoints, step, ready.start)
        ledger.note_origins(related_again(ledger.origins, ready.receiver, experiment.init, store, ledger.data))
        ledger.note_units(unit_facts(experiment.data, experiment.privacy, store.manifest))
        if experiment.tune is not None:
            ledger.note_trial(experiment.name, experiment.tune.charge)
        conclude = None
        if isinstance(experiment.audit, Canaries):
            of_run = ready.objective, store, run_start.secret, run_start.noise_epoch, folder.fork is not None
            store, conclude = in_run.begun(private, experiment.audit, *claimed, ledger, *of_run)
            team().tell("plant")
        one_run_of_all.agree_on_start(
            team(), ready.opened, run_start.first_step, run_start.noise_epoch.number, run_start.secret.tag, private
        )
        outputs = Outputs(
            writer=stack.enter_context(contextlib.closing(MetricsWriter(private, run_start.first_step))),
            progress=stack.enter_context(RunProgress(run_start.first_step, experiment.steps)),
            spending=Spending(experiment.accountant, experiment.privacy, experiment.steps, ledger),
            released=Released(folder.release / "telemetry.jsonl"),
        )
        evaluations = evaluations_of(ready.objective, ready.store, schedule.evaluation_rows, experiment.widths, mesh)
        if conclude is None and team().is_alone and features.are_constant(ready.objective, run_start.state.params):
            stage("reading every text once: the head alone is trained")
            store = features.of_store(ready.objective, run_start.frozen, store, experiment.widths, mesh, private)
            heldout = features.of_heldout(ready.objective, run_start.frozen, evaluations.heldout)
            evaluations = evaluations._replace(heldout=heldout)
        measured = stack.enter_context(contextlib.closing(profiling(experiment.profile, private, experiment.mesh.devices)))
        of_step = {"step": measured.watched(step), "strategy": ready.strategy, "frozen": run_start.frozen, "profiling": measured}
        runtime = Runtime(experiment=experiment, calibrated=ready.calibrated, store=store, ledger=ledger, job=job, **of_step)
        early = stack.enter_context(evaluation.opened(schedule, experiment.gain_in, private, run_start.first_step))
        yield Session(folder, runtime, noise_epochs, run_start, checkpoints, evaluations, outputs, conclude, early)


def _describe_data(private: Path, store: Store) -> None:
    """Writes to `private` what the data are and what is left out of them, and says the latter."""
    left_out.keep_manifest(private, store)
    left_out.keep(private, store)
    for line in left_out.lines(private):
        stage(line)


def _start_jax(mesh: Mesh, folder: RunFolder) -> None:
    """Starts jax in all processes of this job, and connects their devices.

    Raises `ConfigError` before that for another number of processes than the mesh declares.
    """
    team().require_joined()
    require_processes(mesh, team().count)
    # Devices are found by all processes at once.
    team().tell("begin", config_yaml=folder.config_yaml, folder=str(folder.path), fork=folder.fork)
    team().require_jax()
    connect(team(), mesh.make(), mesh.deadline_s)


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A prepared run.

    `objective` is the model's own, `step` trains it with what an audit adds; `microbatch` is the number of examples on one device;
    `strategy` is the mechanism's, `None` if it needs no strategy. `opened` is the checksum on which several processes agreed.
    """

    store: Store
    calibrated: Calibrated
    receiver: Receiver
    start: Start
    objective: Any
    microbatch: int
    strategy: Any
    step: Step
    opened: str


def _get_ready(experiment: Experiment, folder: RunFolder) -> _Ready:
    """Prepares data, solves for the noise and builds the step; raises `ConfigError` for settings that cannot be combined."""
    experiment.mechanism.require_library(folder.private)
    known = agreement.before_training(folder.path)
    store = prepare(experiment.data, experiment.privacy, say_stage)
    stage("solving for the noise and its epsilon" if experiment.is_private else "planning")
    calibrated = calibrate(experiment, experiment.privacy.population(store.manifest))
    calibrated = as_planned(experiment, calibrated, known.plan if known else None)
    mesh = experiment.mesh.make()
    receiver = receiver_of(experiment)
    begins_from = _start(experiment.init, receiver, store, folder, known)
    own = planned_end(experiment, calibrated, None) if experiment.is_private else []
    require_bound(experiment.accountant, experiment.privacy, own, begins_from.origins)
    objective = make_objective(experiment.model, experiment.task, experiment.vocabulary_size, store.manifest)
    microbatch = resolve_microbatch(experiment.microbatch, Workload.from_experiment(experiment, objective), folder.private)
    trained = audited(objective, experiment.audit, experiment.clip.clipping_norm)
    if folder.fork and begins_from.private is not None:
        require_same_audit(folder.fork, begins_from.private, experiment.audit)
    strategy = experiment.mechanism.load_strategy(experiment.steps, folder.private)
    facts = one_run_of_all.facts_of_run(experiment.mesh, calibrated, microbatch, strategy)
    team().tell("open", **facts)
    step = make_step(experiment, trained, mesh, microbatch)
    opened = "" if team().is_alone else one_run_of_all.opened(claim_checksum(experiment), facts, store.manifest.checksum)
    one_run_of_all.require_agreement(team(), opened, one_run_of_all.OPENED)
    return _Ready(store, calibrated, receiver, begins_from, objective, microbatch, strategy, step, opened)


def _start(init: Init, receiver: Receiver, store: Store, folder: RunFolder, known: Ledger | None) -> Start:
    """Returns the start of a run that has no checkpoint yet; a run with a checkpoint resumes without its initial weights."""
    require_one_start(init, folder.fork)
    has_begun = known is not None and bool(known.noise_epochs)
    has_checkpoint = any(path.name.isdigit() for path in folder.private.glob(f"{agreement.CHECKPOINTS}/*"))
    if has_begun and has_checkpoint:
        return _going_on(init, receiver, store, folder, known)
    if folder.fork is not None:
        return start_of_fork(folder.fork, receiver, store, folder.private)
    begins_from = start(init, receiver, store, {folder.path.parent, Path("outputs")}, folder.private)
    require(
        not has_begun or same_weights(begins_from.origins, known.origins if known else ()),
        folder.path,
        "the run or file that it started from now holds other weights, and it has no checkpoint yet",
        "Restore them, or add replicate=1 for a new run",
    )
    return begins_from


def _going_on(init: Init, receiver: Receiver, store: Store, folder: RunFolder, known: Ledger | None) -> Start:
    """Returns the start of a run that has a checkpoint.

    Weights are not read again, but data from which it has not drawn yet are checked against the user's statement that its data are
    disjoint.
    """
    if known is None or store.manifest.checksum in known.data:
        return RANDOM
    noted = related_again(known.origins, receiver, init, store, known.data)
    return dataclasses.replace(RANDOM, messages=tuple(contradictions(noted, store, folder.private, folder.private)))
