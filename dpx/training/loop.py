"""Runs the training loop. Its order matters for privacy: ledger entry, draw, sum, its checksum, noise, then anything that can be seen.

Step t is dispatched before the metrics of step t - 1 are read, so the host never makes a device wait. The checksum of what noise was added
to is entered in the ledger before anything of its step leaves this process. A replayed step is compared with its entry before its
noise is drawn: one key is never used for two different sums.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from dpx.claim.calibration import Calibrated, Entries
from dpx.claim.spent import Spending
from dpx.clipping.readers import merged
from dpx.config.experiment import Experiment, Schedule
from dpx.data.length_buckets import by_width
from dpx.data.store import Store
from dpx.declaration import ConfigError
from dpx.files.array_checksums import as_text
from dpx.files.orbax_checkpoints import Checkpoints, State
from dpx.files.run_folder import RunFolder
from dpx.mechanism.mechanism_protocol import ForwardNoise, Reparametrisation, Reparametrised
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import NoiseEpoch
from dpx.privacy.segments import steps_per_epoch
from dpx.processes import interruption, team
from dpx.randomness import RootSecret
from dpx.sampler import batch_schedule, draw
from dpx.sampler.sampler_protocol import share
from dpx.training.callbacks import Callbacks
from dpx.training.evaluation import EarlyStopping, HeldOut
from dpx.training.gradient_sum import draw_rows
from dpx.training.loggers import Services
from dpx.training.metrics import MetricsWriter, Released, RunProgress
from dpx.training.profiling import AGREEMENT, DATA_WAIT, LEDGER, Unprofiled
from dpx.training.run_start import NoiseEpochs, RunStart
from dpx.training.step import Chunk, Step, StepInputs, as_chunk

# (steps done, the state after them, the metrics of the last one by name), to which it may add its own.
Observer = Callable[[int, State, dict[str, Any]], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computation:
    """The part of `Run` that every process has, and computes its steps with: the others hold neither its ledger nor its files."""

    experiment: Experiment
    calibrated: Calibrated
    store: Store
    step: Step
    strategy: np.ndarray | None = None
    # Frozen parameters, placed where microbatches are summed; empty if all parameters are trained.
    frozen: Any = dataclasses.field(default_factory=dict)
    profiling: Unprofiled = Unprofiled()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Computation):
    """What never changes in a run while it is open (`dpx.training.opening`). Process 0 alone has it, and charges its steps to the ledger.

    `job` is the job that runs the experiment: its class may come from another package. `conclude`, of a run that has an audit, makes the
    verdict from the final parameters. `early_stopping` is that of a run that may end before its last step.
    """

    folder: RunFolder
    ledger: Ledger
    noise_epochs: NoiseEpochs
    start: RunStart
    checkpoints: Checkpoints
    heldout: HeldOut
    test: Callable[[], HeldOut] | None
    writer: MetricsWriter
    progress: RunProgress
    spending: Spending
    released: Released
    services: Services
    callbacks: Callbacks
    job: Any = None
    conclude: Callable[[Any], dict[str, Any]] | None = None
    early_stopping: EarlyStopping | None = None


class Tokens(NamedTuple):
    """The numbers of tokens of a step's examples: without padding, and with it.

    The padding of each text to its width counts, because it determines the FLOPs.
    """

    real: int = 0
    padded: int = 0

    @classmethod
    def count(cls, rows: dict[str, np.ndarray], is_padding: np.ndarray) -> "Tokens":
        """Counts the tokens of rows `{"tokens": [..., T], "length": [...]}` that `is_padding` does not mark; 0 if rows hold no text."""
        if "tokens" not in rows or "length" not in rows:
            return cls()
        is_real = ~is_padding
        return cls(int(rows["length"][is_real].sum()), int(rows["tokens"][is_real].size))

    def __add__(self, other: "Tokens") -> "Tokens":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Tokens(self.real + other.real, self.padded + other.padded)


# (step, state, reason) -> the noise epoch in which the run continues, its secret, and the state from which it starts.
Renewal = Callable[[int, State, str], tuple[NoiseEpoch, RootSecret, State]]


class Stopped(Exception):
    """Says that the user stopped the run after `done` steps, with `state`; the metrics of all these steps have been reported."""

    def __init__(self, done: int, state: State):
        super().__init__(done)
        self.done, self.state = done, state


class AnotherSum(ConfigError):
    """Says that a step's key may add no noise to its clipped sum: devices hold different sums, or another sum had its noise before.

    A new key may add its noise to a new draw. If devices differ again, the run ends with this error.
    """

    def __init__(self, step: int, reason: str):
        super().__init__(
            f"step {step + 1}", reason, "If it happens again, find the machine that computes wrongly; then run the same command"
        )


def run_steps(run: Run, observers: Sequence[Observer], renew: Renewal) -> State:
    """Trains from the start of `run` to the last step; calls `observers` in turn after each step, with its metrics one step late.

    `renew` opens a new noise epoch if a replayed step gives a different sum, or devices do. Raises `Stopped` after a step if the user asked
    to stop.
    """
    experiment, noise_epoch, secret, state = run.experiment, run.start.noise_epoch, run.start.secret, run.start.state
    pending: tuple[NoiseEpoch, int, dict[str, Any]] | None = None
    began = time.perf_counter()
    for step in run.profiling.steps(range(run.start.first_step, experiment.steps)):
        try:
            state, metrics = one_step(run, noise_epoch, secret, step, state)
        except AnotherSum as another:
            if pending is not None:
                began, pending = _show(run, *pending, state, began, observers), None
            noise_epoch, secret, state = renew(step, state, f"{another.value}: {another.reason}")
            state, metrics = one_step(run, noise_epoch, secret, step, state)
        if pending is not None:
            began = _show(run, *pending, state, began, observers)
        pending = (noise_epoch, step, metrics)
        is_stopping = step + 1 < experiment.steps and interruption.is_requested()
        if is_stopping or _pauses(experiment.schedule, experiment.steps, step + 1):
            _show(run, *pending, state, began, observers)
            pending, began = None, time.perf_counter()
        if is_stopping:
            raise Stopped(step + 1, state)
    return state


def _pauses(schedule: Schedule, steps: int, done: int) -> bool:
    """Returns whether the state is evaluated or saved after these steps, so that no later step may be started before."""
    return done % schedule.evaluate_every == 0 or done % schedule.checkpoint_every == 0 or done == steps


def _show(
    run: Run, noise_epoch: NoiseEpoch, step: int, metrics: dict[str, Any], state: State, began: float, observers: Sequence[Observer]
) -> float:
    """Waits for one step's metrics and reports them; returns the time of their arrival, from which the next step is timed."""
    values = jax.device_get(metrics)
    ended = time.perf_counter()
    measured = run.profiling.metrics()
    with run.profiling.host(LEDGER):
        _record(run, noise_epoch, step, as_text(values.pop("checksum")))
    scalars = _readable(run, values, ended - began) | measured
    for observe in observers:
        observe(step + 1, state, scalars)
    return ended


def _enter(run: Run, noise_epoch: NoiseEpoch, step: int) -> None:
    """Charges the step durably before anything of it exists; a replayed step of the same epoch is already in the ledger."""
    experiment, calibrated = run.experiment, run.calibrated
    if calibrated.noise_multiplier is None:
        return
    batch = experiment.batch_schedule.at(step)
    at, stretch = (batch, noise_epoch.number, noise_epoch.name), batch_schedule.stretch_of(experiment.batch_schedule, step)
    release = Entries.of(experiment.claim).of_step(calibrated.size, calibrated.noise_multiplier, *at, run.job, stretch)
    if not run.ledger.holds(step, release):
        run.ledger.append(step, release)


def _record(run: Run, noise_epoch: NoiseEpoch, step: int, checksum: str) -> None:
    """Enters the checksum of a step's sum before anything of it is shown; that of a replayed step is already in the ledger."""
    if run.calibrated.noise_multiplier is not None and run.ledger.sum_of(noise_epoch.name, step) is None:
        run.ledger.record_sum(noise_epoch.name, step, checksum)


def one_step(run: Run, noise_epoch: NoiseEpoch, secret: RootSecret, step: int, state: State) -> tuple[State, dict[str, Any]]:
    """Runs one step: charge, draw, clipped sums chunk by chunk, one reduction, noise once, division by the expected batch size, update.

    Raises `AnotherSum`, with `state` unchanged, if devices hold different sums, or if the step ran before in this epoch and what its noise
    is added to is different now.
    """
    with run.profiling.host(LEDGER):
        _enter(run, noise_epoch, step)
    before = run.ledger.sum_of(noise_epoch.name, step)
    # Without this command no other process draws.
    team().tell("step", step=step, epoch=noise_epoch.number, tag=secret.tag, before=before)
    return computed(run, secret, step, state, before)


def computed(run: Computation, secret: RootSecret, step: int, state: State, before: str | None) -> tuple[State, dict[str, Any]]:
    """Does a charged step: all of `one_step` after the charge, in every process of the job.

    `before` is the checksum of a replayed step, from which this one must not differ.
    """
    experiment, parts, clip, mechanism = run.experiment, run.step, run.experiment.clip, run.experiment.mechanism
    size, norm = experiment.batch_schedule.at(step), clip.in_force(state.clip)
    noise_multiplier = run.calibrated.noise_multiplier or 0.0
    deviation = np.float32(noise_multiplier) * norm
    by, carriers = Reparametrised(state.params, {}, {}), None
    if isinstance(mechanism, Reparametrisation):
        by = parts.differentiated_by(state, mechanism.draw_first(secret, step, state.params))
        carriers = by.trained
    scaled = {"deviation": deviation, "clipping_norm": norm, "strategy": run.strategy, "past_noise": state.noise, "carriers": carriers}
    if before is not None and isinstance(mechanism, ForwardNoise):
        # Its noise precedes the sum, so all its rows are compared first, without noise.
        without_noise, _ = _sums(run, secret, step, by, norm, None)
        _require_same(step, before, parts.reduce(without_noise, scaled))
    sums, tokens = _sums(run, secret, step, by, norm, deviation)
    reduced = parts.reduce(sums, scaled)
    if before is not None or not team().is_alone:
        with run.profiling.host(AGREEMENT):
            _require_same(step, before, reduced, is_noised=run.calibrated.noise_multiplier is not None)
    rate = np.float32(experiment.lr_schedule.at(step, experiment.steps))
    drawn = mechanism.draw(secret, step, by.trained, noise_multiplier, clip.clipping_norm, run.strategy)
    auxiliary = {"count": clip.draw(secret, step, state.clip), "telemetry": experiment.telemetry.draw(secret, step)}
    checksum = reduced["checksum"]
    state, metrics = parts.finish(state, reduced, drawn, deviation, np.float32(size), rate, auxiliary, carriers)
    metrics |= by.metrics
    return state, metrics | {"learning_rate": rate, "expected_batch_size": size, "tokens": tokens, "checksum": checksum}


def _require_same(step: int, before: str | None, reduced: Any, *, is_noised: bool = True) -> None:
    """Raises `AnotherSum` unless all devices of the job hold one sum, by its checksum, and it is the one from `before`, if there is one.

    A sum that gets no noise is not compared: no key could be used on two of them.
    """
    own = {as_text(jax.device_get(copy.data)) for copy in reduced["checksum"].addressable_shards}
    found = team().agree(own)
    if is_noised and len(found) > 1:
        raise AnotherSum(step, "devices hold different sums")
    if before is not None and before not in found:
        raise AnotherSum(step, "it has another sum than before")


def _sums(run: Computation, secret: RootSecret, step: int, by: Reparametrised, norm: Any, deviation: Any = None) -> tuple[Any, Tokens]:
    """Draws the step's rows, and returns their sums, still separate on each device, and their tokens.

    The loss is differentiated `by` these arrays.

    With noise in the forward pass, it is drawn here, with that `deviation`; `None` derives no key of it, and adds none.
    """
    experiment, parts = run.experiment, run.step
    q, population = experiment.batch_schedule.at(step) / run.calibrated.size, run.store.population(experiment.privacy)
    mechanism, sampler, forward, beside = experiment.mechanism, experiment.sampler, None, {}
    with run.profiling.host(DATA_WAIT):
        if isinstance(mechanism, ForwardNoise):
            forward, is_noised = np.float32(0 if deviation is None else deviation), deviation is not None
            indices, beside = draw_rows(mechanism, sampler, population, q, secret, step, is_noised=is_noised)
            indices, beside = share(indices, team().part), {name: share(values, team().part) for name, values in beside.items()}
        else:
            stretch = batch_schedule.stretch_of(experiment.batch_schedule, step)
            indices = draw(sampler, population, q, lambda *place: secret.generator("sample", *place), step, team().part, stretch)
    masks, dropout = secret.key("mask", step), secret.key("dropout", step)
    frozen = merged(by.constants, run.frozen)
    inputs = StepInputs(parts.gather(by.trained), masks, dropout, norm, frozen, forward)
    sums, tokens = parts.zero(), Tokens()
    epoch = step // steps_per_epoch(q) if experiment.privacy.unit_mode == "one_row" else None
    read = chunks(run.store, indices, parts, experiment.privacy.rows_per_example, experiment.widths, beside, epoch)
    for chunk in run.profiling.each(DATA_WAIT, read):
        # This chunk was gathered while the device worked on the last; unbounded, the queue would hold the whole logical batch.
        jax.block_until_ready(sums["count"])
        tokens += Tokens.count(chunk.rows_KB, chunk.is_padding_KB)
        sums = parts.accumulate(sums, chunk, inputs)
    return sums, sum((Tokens(*own) for own in team().gather(list(tokens))), Tokens())


def chunks(
    store: Store,
    indices: np.ndarray,
    step: Step,
    rows_per_example: int,
    widths: Sequence[int],
    beside: Mapping[str, np.ndarray] = MappingProxyType({}),
    epoch: int | None = None,
) -> Iterator[Chunk]:
    """Yields the drawn rows (or units) in chunks of one fixed shape for each of `widths`, none dropped; an empty draw yields nothing.

    `beside` holds further fields of the rows, [n, ...] for n `indices`; `epoch` is that of `Store.examples`. The longest come first, so
    that a batch that does not fit the memory fails at once.
    """
    capacity = step.chunk * step.own_rows
    longest_n = store.lengths("protected", indices, rows_per_example, epoch) if len(widths) > 1 else np.full(len(indices), widths[0])
    places_of = dict(by_width(longest_n, widths))
    own = {width: -(-len(places) // step.own_rows) for width, places in places_of.items()}
    # Processes that drew fewer examples than another one fill up with padding.
    counts = [max(each) for each in zip(*team().gather([own.get(width, 0) for width in widths]), strict=True)]
    for width, count in reversed(list(zip(widths, counts, strict=True))):
        places = places_of.get(width, np.empty(0, np.int64))
        for number in range(-(-count // step.chunk)):
            taken = places[number * capacity : (number + 1) * capacity]
            rows = store.examples("protected", indices[taken], rows_per_example, width, epoch)
            yield as_chunk(
                rows | {name: values[taken] for name, values in beside.items()}, step, min(step.chunk, count - number * step.chunk)
            )


_SHOWN_AS_THEY_ARE = ("weights/", "gradients/", "released/", "carriers/")


def _readable(run: Run, values: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Returns the metrics of one step, which took `seconds`, under their public names."""
    counts = {name.removeprefix("count/"): float(v) for name, v in values.items() if name.startswith("count/")}
    examples = counts["examples"]
    # What is a mean over examples is missing where none was drawn.
    of_task = run.experiment.task.metrics(counts) if examples else {}
    named: dict[str, Any] = {f"train/{name}": value for name, value in of_task.items()}
    named |= {
        "train/examples": examples,
        "train/examples_per_s": examples / seconds,
        "train/non_finite_examples": counts["non_finite"],
    }
    if run.store.holds_text:
        named |= {"train/tokens": float(values["tokens"].real), "train/padded_tokens": float(values["tokens"].padded)}
    named |= {"train/learning_rate": values["learning_rate"], "train/expected_batch_size": values["expected_batch_size"]}
    named |= {"grad/norm": values["gradient_norm"]}
    units, mechanism = counts["units"], run.experiment.mechanism
    if mechanism.clips_gradients:
        named |= {"grad/snr": values["snr"], "grad/noise_norm": values["noise_norm"]}
    if mechanism.clips_gradients and units:
        named |= {"grad/clipped_fraction": counts["clipped"] / units, "grad/example_norm": counts["norm"] / units}
    if isinstance(mechanism, ForwardNoise) and units:
        named |= {"forward/clipped_fraction": counts["clipped"] / units, "forward/vector_norm": counts["norm"] / units}
    named |= {name: value for name, value in values.items() if name.startswith(_SHOWN_AS_THEY_ARE)}
    return named
