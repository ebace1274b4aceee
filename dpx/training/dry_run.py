"""Compiles the real step of a config for its mesh on simulated devices, without running it, and reports bytes, collectives and FLOPs.

Shapes replace every array, so nothing of the model is allocated. The report describes the program that XLA compiles for CPU devices:
its collectives and products are those of the mesh; its buffers are like an accelerator's, except for bfloat16, which CPU code widens.
"""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpx.clipping.trained_and_frozen import merged
from dpx.config.experiment import Experiment
from dpx.cost.compiled import CompiledStep, Crossing, collectives, compiled_matmul_flops
from dpx.declaration import require
from dpx.mechanism.mechanism_protocol import Reparametrisation, Reparametrised
from dpx.randomness import RootSecret
from dpx.task.mlm import Special
from dpx.task.objective import objective
from dpx.training.microbatch import synthetic_rows
from dpx.training.step import KEY, Chunk, Step, StepInputs, UpdateInputs, make_step

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def dry_run(experiment: Experiment, vocabulary_size: int, microbatch: int) -> CompiledStep:
    """Returns the cost of one logical batch on each device of the declared mesh, from the compiled programs of the step.

    `peak_bytes_per_device` is the largest number of bytes that are live while a program runs: its arguments, results and temporaries, and
    the stored state or the gathered parameters that it does not use. FLOPs are those of one microbatch.
    """
    require(
        experiment.mechanism.is_independent_gaussian or not experiment.is_private,
        f"plan.compile=true, mechanism={experiment.mechanism.name}",
        "dpx can compile a step without data only if its noise is independent",
        "Use mechanism=dp_sgd, or use plan.compile=false",
    )
    special = Special(pad_id=0, unk_id=1, cls_id=2, sep_id=3, mask_id=4)
    subject = objective(experiment.model, experiment.task, vocabulary_size, special)
    step = make_step(experiment, subject, experiment.mesh.make(), microbatch)
    state = jax.eval_shape(step.init, KEY, None)
    rows = synthetic_rows(experiment.task, 1, experiment.data.sequence_length, vocabulary_size)
    # Keys of the right shapes; nothing is drawn with them.
    mechanism, secret = experiment.mechanism, RootSecret.from_seed(0)
    first, by = None, Reparametrised(state.params, {}, {})
    if isinstance(mechanism, Reparametrisation):
        first = mechanism.draw_first(secret, 0, state.params)
        by = jax.eval_shape(step.differentiated_by, state, first)
    drawn = mechanism.draw(secret, 0, by.trained, 1.0, experiment.clip.clipping_norm, None)
    lowered = _lowered(step, state, by, rows, experiment.privacy.rows_per_example, (first, drawn))
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
    mesh = {axis: getattr(experiment.mesh, axis) for axis in ("data", "fsdp", "tensor")}
    return CompiledStep(
        mesh=mesh,
        compiled_for="simulated CPU devices",
        microbatch=microbatch,
        peak_bytes_per_device=max(sum(sizes.values()) for sizes in programs.values()),
        programs=programs,
        collectives={name: _crossing(program.as_text(), mesh) for name, program in compiled.items()},
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
    beside = merged(jax.eval_shape(step.place_constants, by.constants), jax.eval_shape(step.place_frozen, frozen_params))
    inputs = StepInputs(gathered, KEY, KEY, frozen=beside)
    first, drawn = jax.tree.map(lambda key: jax.ShapeDtypeStruct(key.shape, key.dtype), drawn)
    update = UpdateInputs(drawn, SCALAR, SCALAR, SCALAR, carriers=params if step.reparametrise else None)
    before = {"reparametrise": step.reparametrise.lower(state.params, state.kept, first)} if step.reparametrise else {}
    return before | {
        "gather": step.gather.lower(params),
        "accumulate": step.accumulate.lower(sums, chunk, inputs),
        "reduce": step.reduce.lower(sums, (SCALAR, SCALAR)),
        "finish": step.finish.lower(state, reduced, update),
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
