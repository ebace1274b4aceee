"""Combines the parts of a run (store, claim, step and folder); trains and reports until the last step.

This module decides what of training is written to `release/`: weights, statement, config and values that the claim covers. Other losses,
norms and held-out metrics are telemetry of private text and stay under `private/`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from dpx import interruption
from dpx.audit import in_run
from dpx.audit.canaries import Planted, WithCanaries, plant
from dpx.audit.declarations import Canaries
from dpx.audit.objective import without
from dpx.claim import agreement, outside_code, seals, statement
from dpx.claim.calibration import Calibrated, plan_of
from dpx.claim.spending import Spending
from dpx.clipping.frozen import merged
from dpx.console import stage
from dpx.data import manifests
from dpx.data.store import Store
from dpx.experiment import Experiment
from dpx.init import weights
from dpx.init.start import related_again
from dpx.interruption import Interrupted
from dpx.one_process import require_one_jax_process, require_one_process
from dpx.privacy.ledger import Ledger, NoiseEpoch
from dpx.privacy.unit_facts import UnitFacts
from dpx.randomness import RootSecret
from dpx.run_folder import RunFolder, write_json
from dpx.training import features, frozen
from dpx.training.checkpoint import Checkpoints, export
from dpx.training.evaluation import BATCH_ROWS, HeldOut, held_out
from dpx.training.fingerprint import fingerprint
from dpx.training.loop import Runtime, Stopped, run
from dpx.training.metrics import MetricsWriter
from dpx.training.preparation import Ready, get_ready
from dpx.training.progress import RunProgress
from dpx.training.released import Released
from dpx.training.run_start import NoiseEpochs, RunStart, facts_of, start_run
from dpx.training.state import State
from dpx.training.update import CANARIES


@dataclasses.dataclass
class Session:
    """An open run. `open` makes it and keeps checkpoints and writers open until its context ends; `train` sets `final`."""

    folder: RunFolder
    runtime: Runtime
    noise_epochs: NoiseEpochs
    run_start: RunStart
    noise_epoch: NoiseEpoch
    evaluate: HeldOut
    checkpoints: Checkpoints
    writer: MetricsWriter
    spending: Spending
    progress: RunProgress
    objective: Any
    released: Released
    planted: Planted | None = None
    test_set: Callable[[], HeldOut] | None = None
    final: State | None = None
    verdict: dict[str, Any] | None = None
    stated: dict[str, Any] = dataclasses.field(default_factory=dict)
    _saved: int | None = None
    _metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    # The packages that the newest statement names because they were imported.
    _imported: tuple[str, ...] = ()

    @classmethod
    @contextlib.contextmanager
    def open(cls, experiment: Experiment, folder: RunFolder, job: Any = None) -> Iterator["Session"]:
        """Prepares a run of `job` in `folder` and keeps its output files open. Raises `ConfigError` before the first array of the
        model is allocated; if jax runs in several processes, before anything is prepared."""
        require_one_process()
        require_one_jax_process()
        ready = get_ready(experiment, folder)
        audit, store, step, calibrated = experiment.audit, ready.store, ready.step, ready.calibrated
        with contextlib.ExitStack() as stack:
            ledger = stack.enter_context(contextlib.closing(Ledger(folder.private / "ledger")))
            checkpoints = stack.enter_context(
                contextlib.closing(Checkpoints(folder.private / agreement.CHECKPOINTS, experiment.schedule.checkpoints_kept))
            )
            unchanged = fingerprint(experiment, store.manifest.checksum, ready.microbatch, ready.strategy, job)
            noise_epochs = NoiseEpochs(folder, experiment.seed, unchanged, ledger, plan_of(experiment, calibrated))
            manifests.keep(folder.private, store)
            run_start = start_run(noise_epochs, checkpoints, step, ready.start)
            ledger.note_origins(related_again(ledger.origins, ready.receiver, experiment.init, store, ledger.data))
            ledger.note_units(UnitFacts.from_data(experiment.data, experiment.privacy, store.manifest))
            if experiment.tune is not None:
                ledger.note_trial(experiment.name, experiment.tune.charge)
            # With another secret the coins would differ from the coins that past steps used.
            is_untouched = folder.fork is None and (run_start.noise_epoch == ledger.noise_epochs[0] or next(ledger.entries(), None) is None)
            tossing = run_start.secret if is_untouched else None
            planted = plant(folder.private, audit, store.manifest, tossing) if isinstance(audit, Canaries) else None
            writer = stack.enter_context(contextlib.closing(MetricsWriter(folder.private, run_start.first_step)))
            writer.describe(folder.config_yaml, _hparams(experiment, calibrated))
            spending = Spending(experiment.accountant, experiment.privacy, experiment.steps, ledger)
            progress = stack.enter_context(RunProgress(run_start.first_step, experiment.steps))
            drawn_from = _drawn_from(experiment, ready, run_start, planted, folder.private)
            runtime = Runtime(experiment, calibrated, drawn_from, step, ledger, ready.strategy, run_start.frozen, job)
            evaluate = held_out(ready.objective, store, experiment.schedule.evaluation_rows, BATCH_ROWS, experiment.widths)
            has_test = "test" in store.manifest.splits
            yield cls(
                folder=folder,
                runtime=runtime,
                noise_epochs=noise_epochs,
                run_start=run_start,
                noise_epoch=run_start.noise_epoch,
                evaluate=evaluate,
                checkpoints=checkpoints,
                writer=writer,
                spending=spending,
                progress=progress,
                objective=ready.objective,
                released=Released(folder.release / "telemetry.jsonl"),
                planted=planted,
                test_set=partial(held_out, ready.objective, store, None, BATCH_ROWS, experiment.widths, "test") if has_test else None,
            )

    def train(self) -> dict[str, Any]:
        """Runs to the last step and returns held-out metrics with their baselines; if the user ends it, saves and raises `Interrupted`."""
        for message in self.run_start.messages:
            self.progress.say(message)
        self.progress.stage("compiling, and evaluating the untrained model")
        untrained = self._evaluated(self.runtime.step.init(self.run_start.secret.key("untrained"), None))
        self.publish()
        self.progress.stage("compiling the step")
        with interruption.deferred():
            return self._train(untrained)

    def _train(self, untrained: dict[str, float]) -> dict[str, Any]:
        """Runs the steps and what follows the last one; if the user ends it earlier, saves everything and raises `Interrupted`."""
        experiment = self.runtime.experiment
        try:
            self.final = state = run(self.runtime, self.run_start, self._seen, self._renew)
        except Stopped as stopped:
            self._save(stopped.done, stopped.state)
            self.checkpoints.wait()
            raise Interrupted(stopped.done) from None
        # Only a run that had no step left to run was not evaluated after its last step.
        metrics = self._metrics if self.run_start.first_step < experiment.steps else self._evaluated(state)
        self.checkpoints.wait()
        self._conclude(state)
        self.publish()
        params = frozen.all_parameters(self.folder.private, self.runtime.step, without(state.params, CANARIES))
        told = weights.facts(params, weights.by_path(without(state.params, CANARIES)))
        told |= seals.beside_weights(self.folder, self.stated)
        export(self.folder.release / "params", params, facts_of(self.runtime.ledger, self.noise_epoch) | told)
        metric = experiment.task.metric
        results = {
            "steps": experiment.steps,
            "metric": metric,
            "heldout": metrics,
            "baselines": self.evaluate.baselines | {"untrained": untrained[metric]},
        } | self._tested(state)
        self.writer.hparams(_hparams(experiment, self.runtime.calibrated) | _claimed(self.stated), [f"heldout/{name}" for name in metrics])
        write_json(self.folder.private / "results.json", results)
        features.remove(self.folder.private)
        return results

    def keep_config(self) -> None:
        """Writes the config of this launch, after all of it was accepted."""
        seals.write_config(self.folder, self.runtime.ledger)

    def publish(self) -> None:
        """Writes `release/privacy.json` from the current ledger; then, and only then, the values that it charges for."""
        runtime = self.runtime
        self._imported = outside_code.imported()
        self.stated = statement.build(runtime.experiment, runtime.store.manifest, runtime.calibrated, runtime.ledger, job=runtime.job)
        seals.write_statement(self.folder, runtime.ledger, self.stated)
        self.released.publish(runtime.ledger.mark)
        self.progress.planned = self.spending.bound = self.stated["epsilon"].get(self.stated.get("accountant"))

    def _evaluated(self, state: State) -> dict[str, float]:
        """Held-out metrics of the model's own parameters."""
        return self.evaluate(without(self._merged(state), CANARIES))

    def _tested(self, state: State) -> dict[str, Any]:
        """Metrics of the test set, if it is a separate split: it is read only here, after the last step."""
        return {} if self.test_set is None else {"test": self.test_set()(without(self._merged(state), CANARIES))}

    def _merged(self, state: State) -> Any:
        """The trained and the frozen parameters, in the form that the model takes."""
        return merged(state.params, self.runtime.frozen)

    def _conclude(self, state: State) -> None:
        """The verdict of the run's audit, if it has one: from the noisy gradients and the final parameters alone."""
        runtime, planted, experiment = self.runtime, self.planted, self.runtime.experiment
        if planted is None:
            return
        assert isinstance(runtime.store, WithCanaries) and isinstance(experiment.audit, Canaries)
        self.verdict = in_run.conclude(
            self.folder.private,
            experiment.audit,
            experiment.accountant,
            experiment.privacy,
            runtime.ledger,
            self.objective,
            self._merged(state),
            runtime.store,
            planted,
            self.run_start.secret,
        )
        runtime.ledger.note_verdict(self.verdict)

    def _seen(self, step: int, state: State, metrics: dict[str, Any]) -> None:
        """After each step: metrics, then, at their intervals, evaluation and a checkpoint."""
        experiment, done = self.runtime.experiment, step + 1
        if outside_code.imported() != self._imported:
            self.publish()
        epsilon = self.spending.after(done) if self.progress.shows(done) else None
        scalars = dict(metrics) | ({"privacy/epsilon": epsilon} if epsilon is not None else {})
        if done % experiment.schedule.evaluate_every == 0 or done == experiment.steps:
            self._metrics = self._evaluated(state)
            scalars |= {f"heldout/{name}": value for name, value in self._metrics.items()}
        self.writer.write(step, scalars)
        self.released.hold(self.noise_epoch.number, step, metrics)
        accuracy = metrics[f"train/{experiment.task.metric}"]
        self.progress.step(done, metrics["train/examples_per_s"], metrics["train/loss"], accuracy, epsilon)
        if done % experiment.schedule.checkpoint_every == 0 or done == experiment.steps:
            self._save(done, state)

    def _save(self, done: int, state: State) -> None:
        """Writes the statement, then a checkpoint of the state after `done` steps, once."""
        if self._saved != done:
            self.publish()
            self.checkpoints.save(done, state, facts_of(self.runtime.ledger, self.noise_epoch))
            self._saved = done

    def _renew(self, step: int, state: State) -> tuple[NoiseEpoch, RootSecret, State]:
        """Opens a noise epoch in the middle of a run, because a replayed step gave a different sum; it is stated before it is used."""
        why = f"step {step} has another sum than before"
        self.noise_epoch, secret = self.noise_epochs.open(step, None, why)
        self.progress.say(f"{why}: fresh noise from there on, charged in addition to what was spent")
        state = state.in_a_new_noise_epoch()
        if step:
            self.checkpoints.save(step, state, facts_of(self.runtime.ledger, self.noise_epoch))
        self.publish()
        return self.noise_epoch, secret, state


def _drawn_from(experiment: Experiment, ready: Ready, run_start: RunStart, planted: Planted | None, private: Path) -> Store:
    """The rows that steps draw: with the canaries of an audit, or as features computed once if only the head is trained."""
    if planted and isinstance(experiment.audit, Canaries):
        return WithCanaries(ready.store, planted, experiment.audit, experiment.privacy)
    if not features.are_constant(ready.objective, run_start.state.params):
        return ready.store
    stage("reading every text once: the head alone is trained")
    return features.of_store(ready.objective, run_start.frozen, ready.store, experiment.widths, experiment.mesh.make(), private)


def _claimed(stated: dict[str, Any]) -> dict[str, Any]:
    """The claim next to the knobs: epsilon, by the run's own accountant, only if the statement has one."""
    epsilon = stated["epsilon"].get(stated.get("accountant"))
    return {"guarantee": stated["guarantee"], "epsilon": epsilon, "delta": stated.get("delta")}


def _hparams(experiment: Experiment, calibrated: Calibrated) -> dict[str, Any]:
    """The knobs that the papers vary."""
    return {
        "model": experiment.model.name,
        "steps": experiment.steps,
        "batch_size": experiment.batch_schedule.at(experiment.steps - 1),
        "learning_rate": experiment.lr_schedule.learning_rate,
        "beta1": experiment.optimizer.beta1,
        "beta2": experiment.optimizer.beta2,
        "weight_decay": experiment.optimizer.weight_decay,
        "clipping_norm": experiment.clip.clipping_norm,
        "noise_multiplier": calibrated.noise_multiplier or 0.0,
        "mechanism": experiment.mechanism.name,
        "replicate": experiment.replicate,
    }
