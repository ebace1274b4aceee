"""Says what a run costs before it runs: its time on this machine, the program of its step on a mesh, and its FLOPs.

Some steps run on this machine. Every program is the run's own: the draw, padding to widths, clipped sums, noise, the update and the
evaluation. The rows are public or synthetic, so the time reveals nothing.

The real step is compiled for its mesh on simulated devices, without running it. Shapes replace every array, so nothing of the model is
allocated. The report describes the program that XLA compiles for CPU devices: its collectives and products are those of the mesh; its
buffers are like an accelerator's, except for bfloat16, which CPU code widens.

Matrix-product FLOPs are traced on shapes: a frozen parameter has no gradient, and nothing below the lowest trained parameter is
differentiated.
"""

import contextlib
import dataclasses
import math
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx.claim.calibration import Calibrated
from dpx.clipping.clipped_sum import plain_sum
from dpx.clipping.readers import merged
from dpx.config.declared_audit import Canaries
from dpx.config.experiment import Experiment
from dpx.cost.compiled import CompiledStep, Crossing, MeasuredRun, collectives, compiled_matmul_flops
from dpx.cost.traced import matmul_flops
from dpx.data.store import Store
from dpx.files.orbax_checkpoints import Checkpoints
from dpx.mechanism.mechanism_protocol import Mechanism, Reparametrisation, Reparametrised
from dpx.models.shape import AnyModel
from dpx.models.trained import Trained
from dpx.processes.mesh import Mesh
from dpx.randomness import RootSecret
from dpx.sampler.batch_schedule import Constant
from dpx.task.declared_task import Task
from dpx.task.mlm import Special
from dpx.task.objective import objective as make_objective
from dpx.task.task_protocol import TwoPartObjective
from dpx.training import features, frozen
from dpx.training.evaluation import BATCH_ROWS, HeldOut, held_out
from dpx.training.frozen import differentiated_by, draw
from dpx.training.loop import Computation, computed
from dpx.training.microbatch import Workload, resolve_microbatch, synthetic_rows
from dpx.training.step import KEY, Chunk, Step, StepInputs, make_step

TIMED_STEPS = 3
# A larger step is timed at this size: its time is in proportion to the examples.
LARGEST_BATCH = 1024
_ROWS = 1024
_EVALUATED_ROWS = 4 * BATCH_ROWS


class SampleRows(Store):
    """Some rows in the place of a prepared corpus of `size` rows or units: they are read again and again.

    `protected` and `heldout` are columns [n, ...] of these splits.
    """

    def __init__(self, protected: dict[str, np.ndarray], heldout: dict[str, np.ndarray], size: int):
        self._rows, self._size = {"protected": protected, "heldout": heldout}, size
        self.manifest: Any = SimpleNamespace(rows={"heldout": _EVALUATED_ROWS}, most_frequent_public_token_id=None)

    def population(self, privacy: Any) -> int:
        return self._size

    def rows(self, split: Any, indices: Any, width: int | None = None) -> dict[str, np.ndarray]:
        columns = self._rows[split]
        taken = np.asarray(indices, np.int64) % len(columns["record"])
        return {name: values[taken][..., :width] if name == "tokens" else values[taken] for name, values in columns.items()}

    def examples(
        self, split: Any, indices: Any, rows_per_example: int, width: int | None = None, epoch: int | None = None
    ) -> dict[str, np.ndarray]:
        if rows_per_example == 1:
            rows = self.rows(split, indices, width)
            return rows if epoch is None else rows | {"is_padding": np.zeros(len(rows["record"]), bool)}
        rows = self.rows(split, self._of_units(indices, rows_per_example), width)
        return rows | {"is_padding": np.zeros((len(indices), rows_per_example), bool)}

    def lengths(self, split: Any, indices: Any, rows_per_example: int, epoch: int | None = None) -> np.ndarray:
        if "length" not in self._rows[split]:
            return np.zeros(len(indices), np.int32)
        length = self.rows(split, self._of_units(indices, rows_per_example))["length"]
        return length.reshape(len(indices), -1).max(axis=1)

    @staticmethod
    def _of_units(indices: Any, rows_per_example: int) -> np.ndarray:
        """Returns the numbers [n, R] of the rows of each unit."""
        return np.asarray(indices, np.int64)[:, None] * rows_per_example + np.arange(rows_per_example)


def measure(experiment: Experiment, calibrated: Calibrated, vocabulary_size: int, store: Store | None, private: Path) -> MeasuredRun:
    """Returns the time of a run on this machine's devices. `store` is the prepared data, of which the public split alone is read.

    `private` is a folder for what is chosen once for a run: the microbatch and the mechanism's strategy. Raises `ConfigError` if the
    machine has fewer devices than the mesh.
    """
    special = store.manifest if store else Special(pad_id=0, unk_id=1, cls_id=2, sep_id=3, mask_id=4)
    subject = make_objective(experiment.model, experiment.task, vocabulary_size, special)
    public = store.manifest.rows["public"] if store else 0
    if store and public:
        kind, texts = "public", store.rows("public", np.arange(min(public, _ROWS)))
    else:
        kind, texts = "synthetic", synthetic_rows(experiment.task, _ROWS, experiment.data.sequence_length, vocabulary_size)
    trained, kept = frozen.shapes(experiment.trained, subject)
    once = subject if features.are_constant(subject, trained) and not isinstance(experiment.audit, Canaries) else None
    drawn = texts
    if once is not None:
        # Zeros in the place of the texts, as a step reads features if the head alone is trained.
        shape = jax.eval_shape(once.features, kept, jax.eval_shape(once.batch, np.zeros(2, np.uint32), texts)).shape
        drawn = {name: values for name, values in texts.items() if name not in features.TEXT} | {"features": np.zeros(shape, np.float32)}
    rows = SampleRows(drawn, texts, calibrated.size)
    batch = min(max(size for size, _ in calibrated.batch_stages), LARGEST_BATCH)
    mesh, timed = experiment.mesh.make(), dataclasses.replace(experiment, batch_schedule=Constant(size=batch))
    workload = Workload.of(experiment.one_step, subject, experiment.data.sequence_length, experiment.mesh)
    microbatch = resolve_microbatch(experiment.microbatch, workload, private)
    computation = Computation(
        experiment=timed,
        calibrated=calibrated,
        store=rows,
        step=make_step(timed.one_step, subject, mesh, microbatch),
        strategy=experiment.mechanism.load_strategy(experiment.steps, private),
    )
    times, save_s, params = _steps(computation, private)
    step_s, schedule = statistics.median(times[1:]), experiment.schedule
    make = partial(held_out, subject, rows, _EVALUATED_ROWS, BATCH_ROWS, experiment.widths)
    compile_s, row_s, read_s = _row_seconds(make, params, once)
    compile_s += max(times[0] - step_s, 0.0)
    # Of the untrained model, of weights that are not drawn at random, and after steps.
    evaluations = (1 if experiment.init.is_random else 2) + math.ceil(experiment.steps / schedule.evaluate_every)
    saves, protected = math.ceil(experiment.steps / schedule.checkpoint_every), calibrated.size * experiment.privacy.rows_per_example
    # As declared fractions give them for the public number of protected rows, and the most where they do not.
    data, heldout = experiment.data, schedule.evaluation_rows
    if data.test_split != "heldout":
        share = data.heldout_fraction / max(1 - data.heldout_fraction - data.public_fraction, 1e-9)
        heldout = min(heldout, math.ceil(protected * share))
    evaluation_s, once_s = row_s * heldout, read_s * (protected + heldout)
    examples = sum(size * steps for size, steps in calibrated.batch_stages)
    return MeasuredRun(
        device=mesh.devices.flat[0].device_kind,
        devices=mesh.size,
        rows=kind,
        microbatch=microbatch,
        batch_size=batch,
        steps=TIMED_STEPS,
        step_s=step_s,
        compile_s=compile_s,
        evaluations=evaluations,
        evaluation_s=evaluation_s,
        read_once_s=once_s,
        saves=saves,
        save_s=save_s,
        run_s=compile_s + step_s * examples / batch + evaluations * evaluation_s + once_s + saves * save_s,
    )


def _steps(computation: Computation, private: Path) -> tuple[list[float], float, Any]:
    """Returns the seconds of each step, the first with compiling, those of saving the state, and the parameters after the steps."""
    step, secret = computation.step, RootSecret.from_seed(0)
    state = step.init(secret.key("init"), None)
    if step.has_frozen:
        computation = dataclasses.replace(computation, frozen=step.place_frozen(step.draw_frozen(secret.key("init"), None)))
    times = []
    for number in range(TIMED_STEPS + 1):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(computed(computation, secret, min(number, computation.experiment.steps - 1), state, None))
        times.append(time.perf_counter() - began)
    # The second save counts; a run saves beside its steps, but seldom has a processor to spare.
    folder, saved = private / "measured", []
    try:
        with contextlib.closing(Checkpoints(folder, 1)) as checkpoints:
            for steps_done in (1, 2):
                began = time.perf_counter()
                checkpoints.save(steps_done, state, {})
                checkpoints.wait()
                saved.append(time.perf_counter() - began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return times, saved[-1], merged(state.params, computation.frozen)


def _row_seconds(make: Callable[[], HeldOut], params: Any, once: TwoPartObjective | None) -> tuple[float, float, float]:
    """Returns the seconds of compiling an evaluation, of a row in it, and of a text that is read once: 0 if `once` is `None`.

    `once` is the objective whose evaluations read features in place of texts.
    """
    first_s, second_s = _evaluations(make, params)
    compile_s, row_s = max(first_s - second_s, 0.0), second_s / _EVALUATED_ROWS
    if once is None:
        return compile_s, row_s, 0.0
    _, of_features_s = _evaluations(lambda: features.of_heldout(once, params, make()), params)
    return compile_s, of_features_s / _EVALUATED_ROWS, row_s


def _evaluations(make: Callable[[], Callable[[Any], Any]], params: Any) -> tuple[float, float]:
    """Returns the seconds of two evaluations, the first with what precedes it: making the evaluation and compiling."""
    began = time.perf_counter()
    evaluate = make()
    evaluate(params)
    compiled = time.perf_counter()
    evaluate(params)
    return compiled - began, time.perf_counter() - compiled


class Products(NamedTuple):
    """The FLOPs of each row that a step draws, and of each protected row once, before the first step."""

    drawn_row: int
    protected_row: int


def products(
    model: AnyModel,
    task: Task,
    train: Trained,
    mechanism: Mechanism,
    vocabulary_size: int,
    sequence_length: int,
    *,
    reads_once: bool = True,
) -> Products:
    """Returns the matrix-product FLOPs of training what `train` selects, differentiated as `mechanism` does.

    If the head alone is trained, the encoder reads each text once, unless `reads_once` is false (an audit's canaries are among the rows).
    """
    subject = make_objective(model, task, vocabulary_size, Special(pad_id=0, unk_id=1, cls_id=2, sep_id=3, mask_id=4))
    key = np.zeros(2, np.uint32)
    trained, frozen = jax.eval_shape(lambda key: draw(train, subject, key), key)
    by = jax.eval_shape(partial(differentiated_by, mechanism), trained)
    trained, frozen = by.trained, merged(by.constants, frozen)
    rows = synthetic_rows(task, 1, sequence_length, vocabulary_size)
    batch = jax.eval_shape(subject.batch, key, rows)
    once = 0
    if reads_once and features.are_constant(subject, trained):
        once = matmul_flops(subject.features, frozen, batch)
        shape = jax.eval_shape(subject.features, frozen, batch).shape
        read = {name: column for name, column in rows.items() if name not in features.TEXT}
        batch = jax.eval_shape(subject.batch, key, read | {"features": jax.ShapeDtypeStruct(shape, jnp.float32)})
    step = matmul_flops(lambda *given: plain_sum(subject.losses, *given[:2], frozen=given[2], fused=False).total, trained, batch, frozen)
    return Products(step, once)


SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def dry_run(
    step: Step, row: dict[str, np.ndarray], mechanism: Mechanism, clipping_norm: float, rows_each: int, mesh: Mesh, microbatch: int
) -> CompiledStep:
    """Returns the cost of one logical batch on each device of the declared `mesh`, from the compiled programs of the step.

    `row` is one row of the data, and `rows_each` the number of rows of an example.

    `peak_bytes_per_device` is the largest number of bytes that are live while a program runs: its arguments, results and temporaries, and
    the stored state or the gathered parameters that it does not use. FLOPs are those of one microbatch.
    """
    # Keys of the right shapes; nothing is drawn with them.
    state, secret = step.form(), RootSecret.from_seed(0)
    first, by = None, Reparametrised(state.params, {}, {})
    if isinstance(mechanism, Reparametrisation):
        first = mechanism.draw_first(secret, 0, state.params)
        by = jax.eval_shape(step.differentiated_by, state, first)
    drawn = mechanism.draw(secret, 0, by.trained, 1.0, clipping_norm, None)
    lowered = _lowered(step, state, by, row, rows_each, (first, drawn))
    compiled = {name: program.compile() for name, program in lowered.items()}
    # Parameters that are gathered in the layout in which they are stored are the same arrays: no copy is live while noise is added.
    gathered = jax.tree.leaves(jax.eval_shape(step.gather, by.trained))
    moved = [
        new
        for old, new in zip(jax.tree.leaves(by.trained), gathered, strict=True)
        if old.dtype != new.dtype or not old.sharding.is_equivalent_to(new.sharding, len(old.shape))
    ]
    # The arrays that replace parameters for one step are live throughout it.
    added = by if step.reparametrise else None
    waiting = {"reparametrise": state.moments, "gather": (state.moments, added), "accumulate": (state, added)}
    waiting |= {"reduce": (state, moved, added), "finish": (moved, added)}
    programs = {name: _bytes(program) | {"waiting": _held(waiting[name])} for name, program in compiled.items()}
    axes = {axis: getattr(mesh, axis) for axis in ("data", "fsdp", "tensor")}
    return CompiledStep(
        mesh=axes,
        compiled_for="simulated CPU devices",
        microbatch=microbatch,
        peak_bytes_per_device=max(sum(sizes.values()) for sizes in programs.values()),
        programs=programs,
        collectives={name: _crossing(program.as_text(), axes) for name, program in compiled.items()},
        flops_per_device_and_microbatch=compiled_matmul_flops(compiled["accumulate"].as_text()),
    )


def _lowered(step: Step, state: Any, by: Reparametrised, row: dict[str, Any], rows_each: int, drawn: Any) -> dict[str, Any]:
    """Returns the step's programs, lowered.

    The loss is differentiated `by` these arrays, `row` is one row of the data, `rows_each` is the number of rows of an example, and `drawn`
    is what the mechanism draws before the sums and after them.
    """
    params, frozen_params = by.trained, jax.eval_shape(step.draw_frozen, KEY, None)
    gathered, sums = jax.eval_shape(step.gather, params), jax.eval_shape(step.zero)
    reduced = jax.eval_shape(step.reduce, sums, (SCALAR, SCALAR))
    places = (step.chunk, step.rows) if rows_each == 1 else (step.chunk, step.rows, rows_each)
    rows = {name: jax.ShapeDtypeStruct((*places, *value.shape[1:]), value.dtype) for name, value in row.items()}
    chunk = Chunk(rows, jax.ShapeDtypeStruct(places, bool), jax.ShapeDtypeStruct((), jnp.int32))
    beside = merged(by.constants, jax.eval_shape(step.place_frozen, frozen_params))
    inputs = StepInputs(gathered, KEY, KEY, frozen=beside)
    first, drawn = jax.tree.map(lambda key: jax.ShapeDtypeStruct(key.shape, key.dtype), drawn)
    before = {"reparametrise": step.reparametrise.lower(state.params, state.kept, first)} if step.reparametrise else {}
    return before | {
        "gather": step.gather.lower(params),
        "accumulate": step.accumulate.lower(sums, chunk, inputs),
        "reduce": step.reduce.lower(sums, (SCALAR, SCALAR)),
        "finish": step.finish.lower(state, reduced, drawn, SCALAR, SCALAR, SCALAR, {}, params if step.reparametrise else None),
    }


def _held(tree: Any) -> int:
    """Returns the bytes of one device's parts."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _bytes(compiled: Any) -> dict[str, int]:
    memory = compiled.memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes,
        "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }


def _crossing(text: str, mesh: dict[str, int]) -> tuple[Crossing, ...]:
    """Returns the elements of collectives' results on one device.

    They are summed by kind, size and axes of the groups that communicate, and whether a loop runs the collective.
    """
    numbers, elements = Counter(), Counter()
    for one in collectives(text):
        # The axes along which devices of a group differ; without groups all devices meet.
        devices = [np.unravel_index(list(group), tuple(mesh.values())) for group in one.groups or (tuple(range(math.prod(mesh.values()))),)]
        places = [[len(set(of_group[place].tolist())) for of_group in devices] for place in range(len(mesh))]
        axes = tuple(axis for axis, counts in zip(mesh, places, strict=True) if max(counts) > 1)
        key = (one.kind, len(one.groups[0]) if one.groups else 0, axes, one.is_in_loop)
        numbers[key] += 1
        elements[key] += one.elements
    return tuple(
        Crossing(kind=kind, devices=devices, axes=axes, in_loop=looped, number=numbers[kind, devices, axes, looped], elements=count)
        for (kind, devices, axes, looped), count in sorted(elements.items())
    )
