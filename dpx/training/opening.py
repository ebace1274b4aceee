"""Opens a run, from top to bottom: the data and the noise, the step, the initial weights, its ledger and its outputs.

Everything that can be refused is refused before the first array of the model exists.

Compiled programs are kept on disk, so that points of a sweep that share shapes, and a run that is resumed, compile once. The folder is
`$DPX_CACHE/compiled` or `~/.cache/dpx/compiled`, and losing it costs seconds. A program is found by all that decides on it: its operations,
the versions of jax and XLA, its flags and the device. The same program has the same bits, whether compiled or read.
"""

import contextlib
import dataclasses
import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from dpx.audit import in_run
from dpx.audit.canaries import audited, require_same_audit
from dpx.claim.calibration import Entries, calibrate, plan_of
from dpx.claim.caveats import real_draws
from dpx.claim.spent import Spending, planned_end, require_bound
from dpx.config.declared_audit import Audit, Canaries
from dpx.config.declared_init import Init
from dpx.config.experiment import Experiment
from dpx.config.experiment_parts import Receiver
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
from dpx.init.start import RANDOM, Start, related_again, require_one_start, same_weights, start, start_of_fork
from dpx.privacy.cache import folder
from dpx.privacy.ledger import Ledger
from dpx.processes import supervisor, team
from dpx.processes.mesh import Mesh
from dpx.processes.place import require_processes
from dpx.statement import agreement
from dpx.task.objective import objective as make_objective
from dpx.training import features, follower
from dpx.training.callbacks import Callbacks
from dpx.training.evaluation import early_stopping, evaluations_of
from dpx.training.fingerprint import code_of_parts, fingerprint
from dpx.training.loggers import Begun, Services
from dpx.training.loop import Run
from dpx.training.metrics import MetricsWriter, Released, RunProgress
from dpx.training.microbatch import Workload, resolve_microbatch
from dpx.training.profiling import profiling
from dpx.training.run_start import NoiseEpochs, allowed_again, start_run
from dpx.training.step import make_step
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
    # A program for another processor may use instructions that this one lacks.
    facts = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        facts += [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    processor = f"{platform.machine()}-{hashlib.blake2b(repr(facts).encode(), digest_size=4).hexdigest()}"
    # What is read is run, so no other account may write it.
    with contextlib.suppress(OSError):
        make_private(folder() / "compiled")
        own = folder() / "compiled" / processor
        make_folder(own)
        config.update("jax_compilation_cache_dir", str(own))


@contextlib.contextmanager
def open_run(experiment: Experiment, folder: RunFolder, job: Any = None) -> Iterator[Run]:
    """Prepares a run of `job` in `folder` and keeps its ledger, checkpoints and output files open until the context ends.

    It runs in process 0, which tells any others what to do. Raises `ConfigError` before the first array of the model is allocated.
    """
    private, schedule, of_run = folder.private, experiment.schedule, (experiment.accountant, experiment.privacy)
    mesh = _start_jax(experiment.mesh, folder)
    # The data, the noise and the initial weights.
    experiment.mechanism.require_library(private)
    known = agreement.before_training(folder.path)
    data = prepare(experiment.data, experiment.privacy, say_stage)
    stage("solving for the noise and its epsilon" if experiment.is_private else "planning")
    entries, population = Entries.of(experiment.claim), experiment.privacy.population(data.manifest)
    calibrated = calibrate(experiment.claim, population, known.plan if known else None)
    begins_from = _begin_from(experiment.init, experiment.receiver, experiment.audit, data, folder, known)
    require_bound(*of_run, planned_end(entries, calibrated, None) if experiment.is_private else [], begins_from.origins)

    # The step, on which all processes agree.
    objective = make_objective(experiment.model, experiment.task, experiment.vocabulary_size, data.manifest)
    workload = Workload.of(experiment.one_step, objective, experiment.data.sequence_length, experiment.mesh)
    microbatch = resolve_microbatch(experiment.microbatch, workload, private)
    strategy = experiment.mechanism.load_strategy(experiment.steps, private)
    facts = follower.facts_of_run(experiment.mesh, calibrated, microbatch, strategy)
    team().tell("open", **facts)
    step = make_step(experiment.one_step, audited(objective, experiment.audit, experiment.clip.clipping_norm), mesh, microbatch)
    opened = follower.agree_on_opened(team(), experiment.claim_checksum, facts, data.manifest.checksum)

    with supervisor.told(team(), experiment.mesh.deadline_s, experiment.mesh.restarts), contextlib.ExitStack() as stack:
        stack.callback(team().tell, "close")
        # The ledger, and where in it the run starts.
        ledger = stack.enter_context(contextlib.closing(Ledger(private / "ledger")))
        checkpoints = stack.enter_context(contextlib.closing(Checkpoints(private / agreement.CHECKPOINTS, schedule.checkpoints_kept)))
        unchanged = fingerprint(experiment.computation, code_of_parts(experiment, job), data.manifest.checksum, microbatch, strategy)
        allow = allowed_again(*of_run, entries.planned, calibrated, ledger)
        noise_epochs = NoiseEpochs(folder, experiment.seed, unchanged, ledger, plan_of(experiment.claim, calibrated), allow)
        left_out.keep_manifest(private, data)
        for line in [*real_draws(experiment.data, experiment.privacy, population), *left_out.keep(private, data)]:
            stage(line)
        start = start_run(noise_epochs, checkpoints, step, begins_from)
        ledger.note_origins(related_again(ledger.origins, experiment.receiver, experiment.init, data, ledger.data))
        ledger.note_units(unit_facts(experiment.data, experiment.privacy, data.manifest))
        if experiment.tune is not None:
            ledger.note_trial(experiment.name, experiment.tune.charge)
        ledger.note_sent(experiment.given_protected)
        # What its steps read: the data, with an audit's canaries, or features in place of texts.
        heldout, test = evaluations_of(objective, data, schedule.evaluation_rows, experiment.widths, mesh)
        if isinstance(experiment.audit, Canaries):
            audited_run = objective, data, start.secret, start.noise_epoch, folder.fork is not None
            store, conclude = in_run.begun(private, experiment.audit, *of_run, ledger, *audited_run)
            team().tell("plant")
        else:
            conclude, parameters = None, (start.state.params, start.frozen)
            store, heldout = features.in_place_of_texts(objective, *parameters, data, heldout, experiment.widths, mesh, private)
        follower.agree_on_start(team(), opened, start.first_step, start.noise_epoch.number, start.secret.tag, private)
        profiled = stack.enter_context(contextlib.closing(profiling(experiment.profile, private, experiment.mesh.devices)))
        yield Run(
            experiment=experiment,
            job=job,
            folder=folder,
            calibrated=calibrated,
            store=store,
            step=profiled.watched(step),
            strategy=strategy,
            frozen=start.frozen,
            profiling=profiled,
            ledger=ledger,
            noise_epochs=noise_epochs,
            start=start,
            checkpoints=checkpoints,
            heldout=heldout,
            test=test,
            conclude=conclude,
            early_stopping=stack.enter_context(early_stopping(schedule, experiment.gain_in, private, start.first_step)),
            writer=stack.enter_context(contextlib.closing(MetricsWriter(private, start.first_step, experiment.logger))),
            progress=stack.enter_context(RunProgress(start.first_step, experiment.steps)),
            spending=Spending(*of_run, experiment.steps, ledger),
            released=Released(folder.release / "telemetry.jsonl"),
            callbacks=Callbacks(experiment.callbacks, folder.path.name, experiment.steps),
            services=stack.enter_context(contextlib.closing(Services(experiment.logger, Begun(folder, ledger.identity)))),
        )


def _start_jax(mesh: Mesh, folder: RunFolder) -> jax.sharding.Mesh:
    """Starts jax in all processes of this job, connects their devices and returns them.

    Raises `ConfigError` before that for another number of processes than the mesh declares.
    """
    team().require_joined()
    require_processes(mesh, team().count)
    # Devices are found by all processes at once.
    team().tell("begin", config_yaml=folder.config_yaml, folder=str(folder.path), fork=folder.fork)
    team().require_jax()
    devices = mesh.make()
    connect(team(), devices, mesh.deadline_s)
    keep_compiled_programs()
    return devices


def _begin_from(init: Init, receiver: Receiver, audit: Audit, store: Store, folder: RunFolder, known: Ledger | None) -> Start:
    """Returns the start of a run that has no checkpoint yet; a run with a checkpoint resumes without its initial weights.

    Its data from which it has not drawn yet are checked against the user's statement that its data are disjoint.
    """
    require_one_start(init, folder.fork)
    begun = known if known is not None and known.noise_epochs else None
    if begun is not None and any(path.name.isdigit() for path in folder.private.glob(f"{agreement.CHECKPOINTS}/*")):
        if store.manifest.checksum in begun.data:
            return RANDOM
        noted = related_again(begun.origins, receiver, init, store, begun.data)
        return dataclasses.replace(RANDOM, messages=tuple(contradictions(noted, store, folder.private, folder.private)))
    if folder.fork is not None:
        forked = start_of_fork(folder.fork, receiver, store, folder.private)
        assert forked.private is not None
        require_same_audit(folder.fork, forked.private, audit)
        return forked
    begins_from = start(init, receiver, store, {folder.path.parent, Path("outputs")}, folder.private)
    require(
        begun is None or same_weights(begins_from.origins, begun.origins),
        folder.path,
        "the run or file that it started from now holds other weights, and it has no checkpoint yet",
        "Restore them, or add replicate=1 for a new run",
    )
    return begins_from
