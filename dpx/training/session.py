"""Trains an open run: what looks at each of its steps, how it is saved and stated, and how it ends.

This module decides what is written to `release/`: weights, statement, config and values that the statement covers. Other losses,
norms and held-out metrics are telemetry of private text and stay under `private/`.
"""

from functools import partial
from typing import Any, NamedTuple

from dpx.audit.canaries import CANARIES, without
from dpx.claim import statement
from dpx.clipping.readers import merged
from dpx.declaration import require
from dpx.files import weights
from dpx.files.orbax_checkpoints import State
from dpx.files.results import Results, write_results
from dpx.files.run_folder import read_json, write_json
from dpx.privacy.lines import NoiseEpoch, decisive
from dpx.processes import interruption
from dpx.processes.interruption import Interrupted
from dpx.randomness import RootSecret
from dpx.statement import outside_code, seals
from dpx.statement.statement_records import AnyRun, RunStatement, headline
from dpx.training import features, together
from dpx.training.evaluation import Ended
from dpx.training.loop import Observer, Run, Stopped, run_steps
from dpx.training.metrics import varied_first
from dpx.training.profiling import CHECKPOINT, EVALUATION
from dpx.training.run_start import facts_of

# Under private/: the task's metric of the weights that a run began with, on held-out rows.
START = "start.json"


class Outcome(NamedTuple):
    """What a finished run hands to its job; nothing in the trainer reads it.

    It holds `results` as in `private/results.json`, the privacy statement, the verdict of the declared audit (`None` without one) and the
    last state.
    """

    results: Results
    stated: AnyRun
    verdict: dict[str, Any] | None
    state: State


def train(run: Run) -> Outcome:
    """Trains to the last step, and releases the weights. If the user ends the run earlier, it is saved, and `Interrupted` is raised."""
    start = run.start
    run.writer.describe(run.folder.config_yaml, _hparams(run, None))
    for message in start.messages:
        run.progress.say(message)
    run.progress.stage("compiling, and evaluating the untrained model")
    # Its parameters are freed before the first step.
    untrained = evaluated(run, together.init(run.step, start.secret, start.noise_epoch, "untrained"), together.UNTRAINED)
    if not run.experiment.init.is_random and start.first_step == 0:
        # A run that is resumed no longer has the weights that it began with.
        write_json(run.folder.private / START, {"start": evaluated(run, start.state)[run.experiment.task.metric]})
    heldout = HeldOutMetrics(run)
    observers = (Restatement(run), *observers_of(run, heldout))
    publish(run)
    run.callbacks.tell("on_start", start.first_step)
    run.progress.stage("compiling the step")
    with interruption.deferred():
        state, done = start.state, start.first_step
        if run.early_stopping is None or not run.early_stopping.is_over(done):
            try:
                state, done = run_steps(run, observers, partial(renew, run)), run.experiment.steps
            except Ended as ended:
                state, done = ended.state, ended.done
            except Stopped as stopped:
                if not _is_due(run, stopped.done, run.experiment.schedule.checkpoint_every):
                    save(run, stopped.done, stopped.state)
                run.checkpoints.wait()
                raise Interrupted(stopped.done) from None
        # Only a run that had no step left to run was not evaluated after its last step.
        metrics = heldout.newest if start.first_step < done else evaluated(run, state)
        return end(run, done, state, metrics, untrained)


class Restatement:
    """An observer that states the run again where a package was imported since: it is named before the next value is shown."""

    def __init__(self, run: Run):
        self._run, self._imported = run, outside_code.imported()

    def __call__(self, done: int, state: State, scalars: dict[str, Any]) -> None:
        if outside_code.imported() != self._imported:
            self._imported = outside_code.imported()
            publish(self._run)


class HeldOutMetrics:
    """An observer that evaluates held-out rows at their interval; `newest` are the last metrics."""

    def __init__(self, run: Run):
        self._run = run
        self.newest: dict[str, float] = {}

    def __call__(self, done: int, state: State, scalars: dict[str, Any]) -> None:
        if _is_due(self._run, done, self._run.experiment.schedule.evaluate_every):
            self.newest = evaluated(self._run, state)
            if self._run.early_stopping is not None:
                self._run.early_stopping.note(done, self.newest, state)
            scalars.update({f"heldout/{name}": value for name, value in self.newest.items()})


def observers_of(run: Run, heldout: HeldOutMetrics) -> tuple[Observer, ...]:
    """Returns what looks at each step, in this order: later ones see the scalars that earlier ones added."""
    experiment, early = run.experiment, run.early_stopping

    def account(done: int, state: State, scalars: dict[str, Any]) -> None:
        epsilon = run.spending.after(done) if run.progress.shows(done) else None
        if epsilon is not None:
            scalars["privacy/epsilon"] = epsilon

    def write(done: int, state: State, scalars: dict[str, Any]) -> None:
        flat = run.writer.write(done, scalars)
        run.services.protected(done, flat)
        run.callbacks.measure(flat)
        if experiment.schedule.stop_at_non_finite:
            require_finite(done, scalars)

    def hold(done: int, state: State, scalars: dict[str, Any]) -> None:
        run.released.hold(run.ledger.noise_epochs[-1].number, done, scalars)

    def show(done: int, state: State, scalars: dict[str, Any]) -> None:
        accuracy = scalars.get(f"train/{experiment.task.metric}")
        shown = scalars["train/examples_per_s"], scalars.get("train/loss"), accuracy, scalars.get("privacy/epsilon")
        run.progress.step(done, *shown)
        if _is_due(run, done, experiment.schedule.evaluate_every):
            run.callbacks.tell("on_evaluation", done)

    def keep(done: int, state: State, scalars: dict[str, Any]) -> None:
        ends = early if early is not None and done < experiment.steps and early.is_over(done) else None
        if _is_due(run, done, experiment.schedule.checkpoint_every) or ends:
            save(run, done, state)
        if ends:
            run.progress.say(f"no gain in {ends.allowed} evaluations: the run ends after {done} of {experiment.steps} steps")
            raise Ended(done, state)

    return account, heldout, write, hold, show, keep


def require_finite(done: int, scalars: dict[str, Any]) -> None:
    """Raises `ConfigError` for a step with an example whose gradient is not finite, by the metrics of that step."""
    wrong, drawn = scalars["train/non_finite_examples"], scalars["train/examples"]
    fix = "Look at this step in private/metrics.jsonl; a lower learning rate, or float32, often mends it"
    require(not wrong, f"step {done}", f"{wrong:.0f} of {drawn:.0f} examples have a gradient that is not finite", fix)


def _is_due(run: Run, done: int, every: int) -> bool:
    """Returns whether work that is done every `every` steps, and after the last step, is due after `done` steps."""
    return done % every == 0 or done == run.experiment.steps


def evaluated(run: Run, state: State, which: str = together.STATE) -> dict[str, float]:
    """Returns held-out metrics of the model's own parameters."""
    with run.profiling.host(EVALUATION):
        return together.evaluate(which, run.heldout, without(merged(state.params, run.frozen), CANARIES))


def save(run: Run, done: int, state: State) -> None:
    """Writes the statement, then a checkpoint of the state after `done` steps."""
    with run.profiling.host(CHECKPOINT):
        publish(run)
        run.checkpoints.save(done, state, facts_of(run.ledger))
    run.callbacks.tell("on_save", done)


def publish(run: Run) -> AnyRun:
    """Writes `release/privacy.json` from the current ledger and returns it.

    Only then it publishes the values that the statement charges for.
    """
    stated = statement.build(run.experiment.claim, run.store.manifest, run.calibrated, run.ledger, job=run.job)
    seals.write_statement(run.folder, run.ledger, stated)
    lines = run.released.publish(run.ledger.mark)
    run.services.publish(lines, stated)
    run.callbacks.publish(lines, stated)
    run.progress.planned = run.spending.bound = headline(stated)
    return stated


def renew(run: Run, step: int, state: State, why: str) -> tuple[NoiseEpoch, RootSecret, State]:
    """Opens a noise epoch in the middle of a run, because the sum of `step` may not have its noise; it is stated before it is used."""
    noise_epoch, secret = run.noise_epochs.open(step, None, why)
    run.progress.say(f"{why}: fresh noise from there on, charged in addition to what was spent")
    state = together.in_a_new_noise_epoch(state)
    if step:
        run.checkpoints.save(step, state, facts_of(run.ledger))
    publish(run)
    return noise_epoch, secret, state


def end(run: Run, done: int, state: State, metrics: dict[str, float], untrained: dict[str, float]) -> Outcome:
    """Ends a run after `done` steps: its audit, its last statement, the released weights and the results.

    `metrics` are the held-out metrics of `state`, and `untrained` those of the untrained model.
    """
    early, private, metric = run.early_stopping, run.folder.private, run.experiment.task.metric
    if summary := run.profiling.summary():
        run.progress.say(summary)
    run.checkpoints.wait()
    if early is not None and early.best is not None:
        state, metrics = early.state(done, state, run.step.form()), early.best.metrics
    parameters, verdict = merged(state.params, run.frozen), None
    if run.conclude is not None:
        verdict = run.conclude(together.whole(parameters))
        run.ledger.note_verdict(decisive(verdict))
    stated = publish(run)
    beside = facts_of(run.ledger) | seals.beside_weights(run.folder, stated)
    place = run.folder.release / "params"
    together.write_weights(place, state, run.step, private, lambda params, trained: beside | weights.facts(params, trained))
    seals.write(run.folder.release)
    began = read_json(private / START) if (private / START).is_file() else {}
    results = Results(
        steps=done,
        metric=metric,
        heldout=metrics,
        baselines=run.heldout.baselines | {"untrained": untrained[metric]} | began,
        # The test set is read only here, after the last step.
        test=None if run.test is None else together.evaluate(together.STATE, run.test(), without(parameters, CANARIES), "test"),
        rows=run.heldout.rows,
        test_rows=run.store.manifest.rows.get("test"),
        best_step=early.best.steps_done if early is not None and early.best is not None else None,
    )
    run.writer.hparams(_hparams(run, stated), [f"heldout/{name}" for name in metrics])
    write_results(private, results)
    features.remove(private)
    run.services.finish()
    run.callbacks.tell("on_end", done)
    return Outcome(results, stated, verdict, state)


def _hparams(run: Run, stated: AnyRun | None) -> dict[str, Any]:
    """Returns the settings that the papers vary, all that the optimiser declares, and the keys of the command line, which come first;
    with a statement also what it claims."""
    experiment = run.experiment
    columns = {
        "model": experiment.model.name,
        "steps": experiment.steps,
        "batch_size": experiment.batch_schedule.at(experiment.steps - 1),
        "learning_rate": experiment.lr_schedule.learning_rate,
        **_shown(experiment.optimizer.knobs),
        "clipping_norm": experiment.clip.clipping_norm,
        "noise_multiplier": run.calibrated.noise_multiplier or 0.0,
        "mechanism": experiment.mechanism.name,
        "replicate": experiment.replicate,
    }
    if stated is not None:
        delta = stated.delta if isinstance(stated, RunStatement) else None
        columns |= {"guarantee": stated.guarantee, "epsilon": headline(stated), "delta": delta}
    return varied_first(columns, run.folder.private, run.folder.config_yaml)


def _shown(knobs: dict[str, Any]) -> dict[str, Any]:
    """Returns the values that TensorBoard's table can hold: numbers, flags and texts; `null` is left out."""
    return {name: value if isinstance(value, int | float | str) else str(value) for name, value in knobs.items() if value is not None}
