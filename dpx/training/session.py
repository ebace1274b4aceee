"""Trains an open run and reports until the last step.

This module decides what is written to `release/`: weights, statement, config and values that the statement covers. Other losses,
norms and held-out metrics are telemetry of private text and stay under `private/`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from dpx.audit.canary_objective import CANARIES, without
from dpx.claim import statement
from dpx.claim.spent import Spending
from dpx.clipping.trained_and_frozen import merged
from dpx.files import weights
from dpx.files.orbax_checkpoints import Checkpoints, State
from dpx.files.results import Results, write_results
from dpx.files.run_folder import RunFolder, read_json, write_json
from dpx.privacy.ledger import NoiseEpoch
from dpx.privacy.lines import decisive
from dpx.processes import interruption
from dpx.processes.interruption import Interrupted
from dpx.randomness import RootSecret
from dpx.statement import outside_code, seals
from dpx.statement.statement_records import AnyRun, RunStatement, headline
from dpx.training import features, together
from dpx.training.evaluation import EarlyStopping, Ended, Evaluations
from dpx.training.loop import Runtime, Stopped, run
from dpx.training.lossy_file import Released
from dpx.training.metrics import MetricsWriter, RunProgress, varied_first
from dpx.training.profiling import CHECKPOINT, EVALUATION
from dpx.training.run_start import NoiseEpochs, RunStart, facts_of

# Under private/: the task's metric of the weights that a run began with, on held-out rows.
START = "start.json"


class Outputs(NamedTuple):
    """The places to which a run reports: private measurements, the terminal, epsilon as it is spent, and released values."""

    writer: MetricsWriter
    progress: RunProgress
    spending: Spending
    released: Released


@dataclasses.dataclass
class Newest:
    """The newest held-out metrics, and the packages that the newest statement names because they were imported."""

    heldout: dict[str, float] = dataclasses.field(default_factory=dict)
    imported: tuple[str, ...] = ()


class Trained(NamedTuple):
    """A finished run.

    It holds `results` as in `private/results.json`, the privacy statement, the verdict of the declared audit (`None` without one) and the
    last state.
    """

    results: Results
    stated: AnyRun
    verdict: dict[str, Any] | None
    state: State


@dataclasses.dataclass
class Session:
    """An open run (`dpx.training.opening`). If it has an audit, `conclude` makes the verdict from the final parameters."""

    folder: RunFolder
    runtime: Runtime
    noise_epochs: NoiseEpochs
    run_start: RunStart
    checkpoints: Checkpoints
    evaluations: Evaluations
    outputs: Outputs
    conclude: Callable[[Any], dict[str, Any]] | None
    # Of a run that may end before its last step; `None` if it may not.
    early_stopping: EarlyStopping | None = None
    newest: Newest = dataclasses.field(default_factory=Newest)

    def train(self) -> Trained:
        """Runs to the last step. If the user ends the run earlier, it saves everything and raises `Interrupted`."""
        outputs, runtime = self.outputs, self.runtime
        outputs.writer.describe(self.folder.config_yaml, self._hparams(None))
        for message in self.run_start.messages:
            outputs.progress.say(message)
        outputs.progress.stage("compiling, and evaluating the untrained model")
        start = self.run_start
        untrained = self._evaluated(together.init(runtime.step, start.secret, start.noise_epoch, "untrained"), together.UNTRAINED)
        self._note_start()
        self.publish()
        outputs.progress.stage("compiling the step")
        with interruption.deferred():
            return self._train(untrained)

    def _train(self, untrained: dict[str, float]) -> Trained:
        """Runs the steps and the work after the last one; `untrained` are the metrics before the first."""
        experiment, ledger, early = self.runtime.experiment, self.runtime.ledger, self.early_stopping
        state, done = self._steps()
        if summary := self.runtime.profiling.summary():
            self.outputs.progress.say(summary)
        # Only a run that had no step left to run was not evaluated after its last step.
        metrics = self.newest.heldout if self.run_start.first_step < done else self._evaluated(state)
        self.checkpoints.wait()
        if early is not None and early.best is not None:
            state, metrics = early.state(done, state, self.runtime.step.form()), early.best.metrics
        verdict = None
        if self.conclude is not None:
            verdict = self.conclude(together.whole(self._merged(state)))
            ledger.note_verdict(decisive(verdict))
        stated = self.publish()
        beside = facts_of(ledger) | seals.beside_weights(self.folder, stated)
        place = self.folder.release / "params"
        together.write_weights(
            place, state, self.runtime.step, self.folder.private, lambda params, trained: beside | weights.facts(params, trained)
        )
        seals.write(self.folder.release)
        metric = experiment.task.metric
        results = Results(
            steps=done,
            metric=metric,
            heldout=metrics,
            baselines=self.evaluations.heldout.baselines | {"untrained": untrained[metric]} | self._noted_start(),
            test=self._tested(state),
            rows=self.evaluations.heldout.rows,
            test_rows=self.runtime.store.manifest.rows.get("test"),
            best_step=early.best.steps_done if early is not None and early.best is not None else None,
        )
        self.outputs.writer.hparams(self._hparams(stated), [f"heldout/{name}" for name in metrics])
        write_results(self.folder.private, results)
        features.remove(self.folder.private)
        return Trained(results, stated, verdict, state)

    def _steps(self) -> tuple[State, int]:
        """Runs the steps; returns the last state and the number of steps, fewer than declared where the run ends early."""
        start, schedule, steps = self.run_start, self.runtime.experiment.schedule, self.runtime.experiment.steps
        if self.early_stopping is not None and self.early_stopping.is_over(start.first_step):
            return start.state, start.first_step
        try:
            return run(self.runtime, start, self._seen, self._renew), steps
        except Ended as ended:
            return ended.state, ended.done
        except Stopped as stopped:
            if not self._is_due(stopped.done, schedule.checkpoint_every):
                self._save(stopped.done, stopped.state)
            self.checkpoints.wait()
            raise Interrupted(stopped.done) from None

    def keep_config(self) -> None:
        """Writes the config of this launch, after all of it was accepted."""
        seals.write_config(self.folder, self.runtime.ledger)

    def publish(self) -> AnyRun:
        """Writes `release/privacy.json` from the current ledger and returns it.

        Only then it publishes the values that the statement charges for.
        """
        runtime, outputs = self.runtime, self.outputs
        self.newest.imported = outside_code.imported()
        stated = statement.build(runtime.experiment, runtime.store.manifest, runtime.calibrated, runtime.ledger, job=runtime.job)
        seals.write_statement(self.folder, runtime.ledger, stated)
        outputs.released.publish(runtime.ledger.mark)
        outputs.progress.planned = outputs.spending.bound = headline(stated)
        return stated

    def _hparams(self, stated: AnyRun | None) -> dict[str, Any]:
        """Returns the settings that the papers vary, all that the optimiser declares, and the keys of the command line, which come first;
        with a statement also what it claims."""
        experiment = self.runtime.experiment
        columns = {
            "model": experiment.model.name,
            "steps": experiment.steps,
            "batch_size": experiment.batch_schedule.at(experiment.steps - 1),
            "learning_rate": experiment.lr_schedule.learning_rate,
            **_shown(experiment.optimizer.knobs),
            "clipping_norm": experiment.clip.clipping_norm,
            "noise_multiplier": self.runtime.calibrated.noise_multiplier or 0.0,
            "mechanism": experiment.mechanism.name,
            "replicate": experiment.replicate,
        }
        return varied_first(columns | ({} if stated is None else _claimed(stated)), self.folder.private, self.folder.config_yaml)

    def _evaluated(self, state: State, which: str = together.STATE) -> dict[str, float]:
        """Returns held-out metrics of the model's own parameters."""
        with self.runtime.profiling.host(EVALUATION):
            return together.evaluate(which, self.evaluations.heldout, without(self._merged(state), CANARIES))

    def _note_start(self) -> None:
        """Measures the weights that the run begins with, if they are not drawn at random: a run that is resumed no longer has them."""
        experiment = self.runtime.experiment
        if not experiment.init.is_random and self.run_start.first_step == 0:
            write_json(self.folder.private / START, {"start": self._evaluated(self.run_start.state)[experiment.task.metric]})

    def _noted_start(self) -> dict[str, float]:
        place = self.folder.private / START
        return read_json(place) if place.is_file() else {}

    def _tested(self, state: State) -> dict[str, float] | None:
        """Returns metrics of the test set, or `None` if the data has no separate test split.

        The test set is read only here, after the last step.
        """
        test = self.evaluations.test
        return None if test is None else together.tested(test, without(self._merged(state), CANARIES))

    def _merged(self, state: State) -> Any:
        """Returns the trained and the frozen parameters, in the form that the model takes."""
        return merged(state.params, self.runtime.frozen)

    def _seen(self, step: int, state: State, metrics: dict[str, Any]) -> None:
        """Reports a step's metrics and then, at their intervals, evaluates and saves a checkpoint."""
        experiment, outputs, done, early = self.runtime.experiment, self.outputs, step + 1, self.early_stopping
        if outside_code.imported() != self.newest.imported:
            self.publish()
        epsilon = outputs.spending.after(done) if outputs.progress.shows(done) else None
        scalars = dict(metrics) | ({"privacy/epsilon": epsilon} if epsilon is not None else {})
        if self._is_due(done, experiment.schedule.evaluate_every):
            self.newest.heldout = self._evaluated(state)
            if early is not None:
                early.note(done, self.newest.heldout, state)
            scalars |= {f"heldout/{name}": value for name, value in self.newest.heldout.items()}
        outputs.writer.write(done, scalars)
        outputs.released.hold(self.runtime.ledger.noise_epochs[-1].number, done, metrics)
        accuracy = metrics.get(f"train/{experiment.task.metric}")
        outputs.progress.step(done, metrics["train/examples_per_s"], metrics.get("train/loss"), accuracy, epsilon)
        ends = early if early is not None and done < experiment.steps and early.is_over(done) else None
        if self._is_due(done, experiment.schedule.checkpoint_every) or ends:
            self._save(done, state)
        if ends:
            outputs.progress.say(f"no gain in {ends.allowed} evaluations: the run ends after {done} of {experiment.steps} steps")
            raise Ended(done, state)

    def _is_due(self, done: int, every: int) -> bool:
        """Returns whether work that is done every `every` steps, and after the last step, is due after `done` steps."""
        return done % every == 0 or done == self.runtime.experiment.steps

    def _save(self, done: int, state: State) -> None:
        """Writes the statement, then a checkpoint of the state after `done` steps."""
        with self.runtime.profiling.host(CHECKPOINT):
            self.publish()
            self.checkpoints.save(done, state, facts_of(self.runtime.ledger))

    def _renew(self, step: int, state: State, why: str) -> tuple[NoiseEpoch, RootSecret, State]:
        """Opens a noise epoch in the middle of a run, because the sum of `step` may not have its noise; it is stated before it is used."""
        noise_epoch, secret = self.noise_epochs.open(step, None, why)
        self.outputs.progress.say(f"{why}: fresh noise from there on, charged in addition to what was spent")
        state = together.in_a_new_noise_epoch(state)
        if step:
            self.checkpoints.save(step, state, facts_of(self.runtime.ledger))
        self.publish()
        return noise_epoch, secret, state


def _claimed(stated: AnyRun) -> dict[str, Any]:
    """Returns epsilon by the run's own accountant, for the table of settings, only if the statement has one."""
    delta = stated.delta if isinstance(stated, RunStatement) else None
    return {"guarantee": stated.guarantee, "epsilon": headline(stated), "delta": delta}


def _shown(knobs: dict[str, Any]) -> dict[str, Any]:
    """Returns the values that TensorBoard's table can hold: numbers, flags and texts; `null` is left out."""
    return {name: value if isinstance(value, int | float | str) else str(value) for name, value in knobs.items() if value is not None}
