"""Computes one logical step: clipped sums over microbatches on each device, one reduction, noise once, the update.

Memory on a device does not depend on the logical batch: rows arrive in chunks of a fixed number of microbatches and the
accumulator is donated from chunk to chunk. The divisor is the expected batch size, a constant of the config.

Shape legend: K microbatches of a chunk, B examples of one microbatch on one device, R rows of an example (an axis that is there
only where examples are units of several rows), D devices.
"""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from dpx.clipping.groups import ClippedSum
from dpx.clipping.rounding import MARGINS
from dpx.config.experiment_parts import OneStep
from dpx.declaration import require
from dpx.files.array_checksums import checksum
from dpx.files.orbax_checkpoints import State
from dpx.mechanism.carriers import norms_of_rebuilt
from dpx.mechanism.clip import Clip
from dpx.mechanism.mechanism_protocol import ForwardNoise, Mechanism, Reparametrisation, Reparametrised
from dpx.mechanism.telemetry import Telemetry, count_name
from dpx.processes import team
from dpx.randomness import path_name
from dpx.task.declared_task import Task
from dpx.training import frozen, sharding, update
from dpx.training.gradient_sum import GradientSum, noisy_gradient_sum

# The shape of every key: threefry words.
KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)

Sums = dict[str, Any]  # {"gradient": tree of [D, ...], "count": {name: f32[D]}}, and "rows": u32[D, 2] with noise in the forward pass
Reduced = dict[str, Any]  # {"gradient": tree, "count": {name: f32}, "checksum": u32[2]}: over all devices, what noise is added to


class Chunk(NamedTuple):
    """Microbatches that are sent to the devices together.

    `rows_KB` is {field: [K, B * D, ...]} and `is_padding_KB` bool [K, B * D]; both have the axis R behind these if examples have several
    rows. Only the first `count` microbatches hold real examples; the others are skipped.
    """

    rows_KB: Any
    is_padding_KB: Any
    count: Any


class StepInputs(NamedTuple):
    """The inputs that every chunk of a step reads: one argument of `accumulate`, no record that the trainer passes on.

    `params` and `frozen` are the results of `gather` and `place_frozen`; the keys u32[2] are those of masks and dropout. `clipping_norm`
    f32[] is the norm of this step if it adapts; `None` means the declared one. `deviation` f32[] is that of noise in the forward pass;
    `None` if noise is added to the sum.
    """

    params: Any
    mask_key: Any
    dropout_key: Any
    clipping_norm: Any = None
    frozen: Any = None
    deviation: Any = None


@dataclasses.dataclass(frozen=True)
class Step:
    """The compiled functions of a run, each one program. `chunk` microbatches are sent to the devices at a time, `rows` examples in each.

    `init` draws a state, which holds the trained parameters, and `draw_frozen` the frozen parameters: from a key u32[2], and from the
    model's parameters where these are not drawn (else `None`). `gather` and `place_frozen` move them to where microbatches are summed.
    `accumulate` adds a chunk to the sums, which it consumes; `zero` makes the first. `reduce` adds up over devices and takes a checksum,
    which covers its second argument too: everything else that decides how noise and sum combine. `finish` adds noise and updates.
    `reparametrise`, `None` for most mechanisms, replaces the parameters by the arrays that the loss is differentiated by, which `gather`
    then moves; the constants beside them are in their place.
    """

    init: Callable[[Array | np.ndarray, Any], State]
    gather: Callable[[Any], Any]
    zero: Callable[[], Sums]
    accumulate: Callable[[Sums, Chunk, StepInputs], Sums]
    reduce: Callable[[Sums, Any], Reduced]
    finish: Callable[..., tuple[State, dict[str, Array]]]
    draw_frozen: Callable[[Array | np.ndarray, Any], Any]
    place_frozen: Callable[[Any], Any]
    chunk: int
    rows: int
    reparametrise: Callable[[Any, Any, Any], Reparametrised] | None = None

    @property
    def own_rows(self) -> int:
        """The examples of a microbatch on the devices of this process."""
        return self.rows // team().count

    @functools.cached_property
    def has_frozen(self) -> bool:
        """Returns whether any parameter is frozen."""
        return bool(jax.tree.leaves(jax.eval_shape(self.draw_frozen, KEY, None)))

    def form(self) -> State:
        """Returns the shapes, types and layouts of a state."""
        return jax.eval_shape(self.init, KEY, None)

    def differentiated_by(self, state: State, drawn: Any) -> Reparametrised:
        """Returns the arrays by which the loss of a step is differentiated.

        They are the parameters, unless the mechanism replaces them (from `drawn`, the result of `draw_first`).
        """
        if self.reparametrise is None:
            return Reparametrised(state.params, {}, {})
        return self.reparametrise(state.params, state.kept, drawn)


COUNTS = ("examples", "units", "non_finite", "loss", "norm", "clipped")  # And those of the task.


def _counts(result: ClippedSum, norm_limit: float | Array | None, is_padding_B: Array) -> dict[str, Array]:
    """Returns the telemetry of one microbatch as float32 sums.

    Padding is not counted, and an example that was dropped as not finite only in `non_finite`.

    `examples` counts rows, `units` what is clipped as one (the same, unless units have several rows).
    """
    is_padding_U = is_padding_B.reshape(len(result.losses_B), -1).all(1)
    norms_B = jnp.zeros_like(result.losses_B) if result.norms_B is None else result.norms_B
    sums = result.counts | {"loss": result.losses_B, "norm": norms_B}
    sums |= {"examples": ~is_padding_B, "units": ~is_padding_U, "non_finite": ~is_padding_U & ~result.is_counted_B}
    sums |= {"clipped": norms_B > (jnp.inf if norm_limit is None else norm_limit)}
    return {name: jnp.sum(values_B, dtype=jnp.float32) for name, values_B in sums.items()}


def make_step(declared: OneStep, objective: Any, mesh: Mesh, microbatch: int, chunk: int = 16) -> Step:
    """Returns the functions of one run on `mesh`; `microbatch` is the number of examples that one device holds at a time.

    Raises `ConfigError` where jax runs in several processes that dpx did not connect.
    """
    team().require_jax()
    has_gpu = mesh.devices.flat[0].platform == "gpu"
    require(has_gpu or declared.model.attention != "cudnn", "model.attention=cudnn", "cuDNN needs a GPU", "Use model.attention=xla")
    shapes, frozen_shapes = frozen.shapes(declared.trained, objective)
    clip, mechanism, telemetry, task = declared.clip, declared.mechanism, declared.telemetry, declared.task
    by = jax.eval_shape(partial(frozen.differentiated_by, mechanism), shapes)
    layouts, frozen_layouts = sharding.layouts(by.trained, mesh), sharding.layouts(frozen_shapes, mesh)
    optimizer, dtype = update.make_update(declared.optimizer), declared.model.dtype
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    gradient_sum = GradientSum.build(mechanism, clip, declared.clipping_method, declared.privacy)
    names = (*COUNTS, *task.counts, *map(count_name, telemetry.ranges(task.metric)))

    def init(key: Array, start: Any) -> State:
        params, _ = frozen.draw(declared.trained, objective, key, start)
        norm = clip.initial_state() if mechanism.is_private else None
        kept = mechanism.kept_from_start(params) if isinstance(mechanism, Reparametrisation) else None
        return State(params, optimizer.init(params), norm, mechanism.initial_state(params), kept)

    def draw_frozen(key: Array, start: Any) -> Any:
        return frozen.draw(declared.trained, objective, key, start)[1]

    def zero() -> Sums:
        gradient = jax.tree.map(lambda leaf: jnp.zeros((devices, *leaf.shape), mechanism.sum_dtype), by.trained)
        rows = {"rows": jnp.zeros((devices, 2), jnp.uint32)} if isinstance(mechanism, ForwardNoise) else {}
        return {"gradient": gradient, "count": {name: jnp.zeros((devices,), jnp.float32) for name in names}} | rows

    state_shardings = sharding.storage_shardings(jax.eval_shape(init, KEY, None), mesh)
    summed = {
        "gradient": jax.tree.map(lambda of_leaf: of_leaf.summed, layouts),
        "count": dict.fromkeys(names, P(sharding.EXAMPLE_AXES)),
        **({"rows": P(sharding.EXAMPLE_AXES)} if isinstance(mechanism, ForwardNoise) else {}),
    }
    reparametrise = None
    if isinstance(mechanism, Reparametrisation):
        metrics = dict.fromkeys(by.metrics, jax.sharding.NamedSharding(mesh, P()))
        place_constants = _gather(mesh, sharding.layouts(by.constants, mesh), jnp.dtype(dtype))

        def replaced(*given: Any) -> Reparametrised:
            found = mechanism.reparametrised(*given)
            return found._replace(constants=place_constants(found.constants))

        placed = jax.tree.map(lambda of_leaf: jax.sharding.NamedSharding(mesh, of_leaf.compute), sharding.layouts(by.constants, mesh))
        stored = sharding.storage_shardings(by.trained, mesh)
        reparametrise = jax.jit(replaced, out_shardings=Reparametrised(stored, placed, metrics))
    sum_shardings = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), summed)
    return Step(
        init=jax.jit(init, out_shardings=state_shardings),
        gather=_gather(mesh, layouts, jnp.dtype(dtype)),
        zero=jax.jit(zero, out_shardings=sum_shardings),
        accumulate=_accumulate(objective, gradient_sum, MARGINS[dtype], clip, mechanism, telemetry, task, mesh, sum_shardings),
        reduce=_reduce(mesh, layouts, summed),
        finish=_finish(optimizer, clip, mechanism, telemetry, task, mesh, state_shardings),
        draw_frozen=jax.jit(draw_frozen, out_shardings=sharding.storage_shardings(frozen_shapes, mesh)),
        place_frozen=_gather(mesh, frozen_layouts, jnp.dtype(dtype)),
        chunk=chunk,
        rows=microbatch * devices,
        reparametrise=reparametrise,
    )


def _accumulate(
    objective: Any,
    gradient_sum: GradientSum,
    margin: float,
    clip: Clip,
    mechanism: Mechanism,
    telemetry: Telemetry,
    task: Task,
    mesh: Mesh,
    shardings: Any,
) -> Callable[[Sums, Chunk, StepInputs], Sums]:
    """Returns a function that adds each device's part of a chunk to its sums in float32, without collectives and without noise.

    The fraction `margin` of the clipping norm is left for rounding.
    """

    def accumulate(sums: Sums, chunk: Chunk, inputs: StepInputs) -> Sums:
        norm = clip.clipping_norm if inputs.clipping_norm is None else inputs.clipping_norm
        norm_limit = norm if mechanism.is_private else None

        def body(index: Array, sums: Sums) -> Sums:
            rows_B, is_padding_B = jax.tree.map(
                lambda a: _flat(jax.lax.dynamic_index_in_dim(a, index, keepdims=False), gradient_sum.rows_per_unit),
                (chunk.rows_KB, chunk.is_padding_KB),
            )
            batch = objective.batch(inputs.mask_key, rows_B)
            losses = lambda params, batch: objective.losses(params, batch, inputs.dropout_key)  # noqa: E731
            limit = norm * (1 - margin)
            rows = {}
            if isinstance(mechanism, ForwardNoise):
                summed = noisy_gradient_sum(objective, mechanism, gradient_sum, inputs.deviation, limit, inputs.dropout_key)
                result, of_rows = summed(inputs.params, batch, rows_B, inputs.frozen, is_padding_B)
                rows = {"rows": checksum((sums["rows"][0], of_rows))[None]}
            else:
                result = gradient_sum(losses, inputs.params, batch, limit, frozen=inputs.frozen, is_padding_B=is_padding_B)
            counted = _counts(result, norm_limit, is_padding_B) | telemetry.centred_sums(task, result)
            total = mechanism.summand(result.total, clip.clipping_norm)
            return {
                "gradient": jax.tree.map(lambda total, part: total + part[None], sums["gradient"], total),
                "count": {name: value + counted[name] for name, value in sums["count"].items()},
                **rows,
            }

        return jax.lax.fori_loop(0, chunk.count, body, sums)

    split, of_chunk = P(sharding.EXAMPLE_AXES), P(None, sharding.EXAMPLE_AXES)
    # Only the axes of examples are named here: the compiler handles `tensor` and adds the parts of a norm over it.
    on_devices = jax.shard_map(
        accumulate,
        mesh=mesh,
        in_specs=(split, Chunk(of_chunk, of_chunk, P()), P()),
        out_specs=split,
        axis_names={"data", "fsdp"},
        check_vma=False,
    )
    program = jax.jit(on_devices, donate_argnums=(0,), out_shardings=shardings)
    if team().is_alone:
        return program

    def of_own_rows(sums: Sums, chunk: Chunk, inputs: StepInputs) -> Sums:
        # Each process has its own rows of a chunk, [K, rows of one process].
        over_devices = jax.sharding.NamedSharding(mesh, of_chunk)
        rows_KB, is_padding_KB = jax.tree.map(
            lambda values: jax.make_array_from_process_local_data(over_devices, values), (chunk.rows_KB, chunk.is_padding_KB)
        )
        return program(sums, Chunk(rows_KB, is_padding_KB, chunk.count), inputs)

    return of_own_rows


def _gather(mesh: Mesh, layouts: Any, compute_dtype: Any) -> Callable[[Any], Any]:
    """Returns a function that moves stored parameters to where microbatches are summed, in their compute type.

    It runs once for each logical batch.
    """

    def one(path: Any, leaf: Array, layout: sharding.Layout) -> Array:
        # Vectors (LayerNorm's, biases) stay float32.
        is_matrix = leaf.ndim - path_name(path).startswith(sharding.STACKED) > 1
        dtype = compute_dtype if is_matrix else jnp.float32
        if layout.storage == layout.compute:
            return leaf.astype(dtype)
        to = jax.shard_map(
            lambda part: layout.gather(part, dtype), mesh=mesh, in_specs=layout.storage, out_specs=layout.compute, check_vma=False
        )
        return to(leaf)

    shardings = jax.tree.map(lambda layout: jax.sharding.NamedSharding(mesh, layout.compute), layouts)
    return jax.jit(lambda params: jax.tree_util.tree_map_with_path(one, params, layouts), out_shardings=shardings)


def _reduce(mesh: Mesh, layouts: Any, summed: Any) -> Callable[[Sums, Any], Reduced]:
    """Returns the function that reduces the sums of a step over devices, once for each logical batch."""

    def over_devices(sums: Sums) -> tuple[Any, Any]:
        counts = jax.tree.map(lambda value: jax.lax.psum(value[0], sharding.EXAMPLE_AXES), sums["count"])
        return jax.tree.map(lambda total, layout: layout.reduce(total[0]), sums["gradient"], layouts), counts

    storage = jax.tree.map(lambda of_leaf: of_leaf.storage, layouts)
    added = {name: summed[name] for name in ("gradient", "count")}
    reduced = jax.shard_map(over_devices, mesh=mesh, in_specs=(added,), out_specs=(storage, P()), check_vma=False)

    def reduce(sums: Sums, scaled: Any) -> Reduced:
        total, counts = reduced({name: sums[name] for name in added})
        # What noise is added to: the sum, or, in the forward pass, the rows before it.
        noised = sums["rows"] if "rows" in sums else (total, counts)
        return {"gradient": total, "count": counts, "checksum": checksum((noised, scaled))}

    shardings = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), {"gradient": storage, "count": P(), "checksum": P()})
    return jax.jit(reduce, out_shardings=shardings)


def _finish(
    optimizer: update.Update,
    clip: Clip,
    mechanism: Mechanism,
    telemetry: Telemetry,
    task: Task,
    mesh: Mesh,
    state_shardings: Any,
) -> Callable[..., tuple[State, dict[str, Array]]]:
    """Returns the function that ends a step: noise once, division by the expected batch size, and the update of `optimizer`.

    It takes, after the state and the reduced sums: what the mechanism drew on the host; the deviation of the noise on the sum, the expected
    batch size and the learning rate, f32[]; the keys of other releases on the same draw, by name (`count` and `telemetry`); and the arrays
    by which the loss was differentiated, if not by the parameters.
    """

    def finish(
        state: State,
        reduced: Reduced,
        drawn: Any,
        deviation: Any,
        expected_batch: Any,
        learning_rate: Any,
        keys: dict[str, Any] = {},  # noqa: B006
        carriers: Any = None,
    ) -> tuple[State, dict[str, Array]]:
        counts = reduced["count"]
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            total, noisy, noise_squares, noise_state = mechanism.noisy_sum(
                reduced["gradient"], drawn, deviation, state.noise, clip.clipping_norm
            )
        if isinstance(mechanism, Reparametrisation):
            noisy = mechanism.rebuilt(noisy, carriers)
        gradient = jax.tree.map(lambda leaf: leaf / expected_batch, noisy)
        params, moments = optimizer.apply(state.params, state.moments, gradient, learning_rate)
        metrics = _norms(total, noise_squares, expected_batch, params) | {f"count/{name}": value for name, value in counts.items()}
        if isinstance(mechanism, Reparametrisation):
            metrics |= norms_of_rebuilt(gradient, carriers)
        metrics |= clip.step_metrics(state.clip)
        metrics |= telemetry.step_metrics(task.metric, counts, keys.get("telemetry"), expected_batch)
        clip_state = clip.next_clipping_norm(state.clip, counts, keys.get("count"), expected_batch)
        return State(params, moments, clip_state, noise_state, state.kept), metrics

    return jax.jit(finish, donate_argnums=(0,), out_shardings=(state_shardings, jax.sharding.NamedSharding(mesh, P())))


def _norms(total: Any, noise_squares: Array, expected_batch: Array, params: Any) -> dict[str, Array]:
    """Returns norms of the clipped sum, the noise and every weight (one for each of stacked layers), and signal over noise (`snr`)."""
    signal = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(total)))
    noise = jnp.sqrt(noise_squares)
    metrics = {"gradient_norm": signal / expected_batch, "noise_norm": noise / expected_batch, "snr": signal / noise}
    for kind, tree in (("weights", params), ("gradients", total)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = path_name(path)
            axes = tuple(range(1, leaf.ndim)) if name.startswith("layers/") else None
            norm = jnp.sqrt(jnp.sum(jnp.square(leaf), axis=axes))
            metrics[f"{kind}/{name}"] = norm if kind == "weights" else norm / expected_batch
    return metrics


def _flat(values: Array, rows_per_example: int) -> Array:
    """Returns `values` [B, R, ...] as [B * R, ...] if examples have several rows."""
    return values if rows_per_example == 1 else values.reshape(-1, *values.shape[2:])


def as_chunk(rows: dict[str, np.ndarray], step: Step, count_all: int | None = None) -> Chunk:
    """Pads this process's examples {field: [n, ...]}, at most `step.chunk * step.own_rows`, to its part of one chunk.

    `count_all` is the number of microbatches that some process fills; by default those of this process.

    Examples may bring their own `is_padding`: bool [n], or [n, R] for units [n, R, ...]; the results then have the axis R too."""
    rows, own_padding = {name: v for name, v in rows.items() if name != "is_padding"}, rows.get("is_padding")
    count = len(next(iter(rows.values())))
    capacity = step.chunk * step.own_rows
    padded = {name: np.concatenate([v, np.zeros((capacity - count, *v.shape[1:]), v.dtype)]) for name, v in rows.items()}
    shaped = {name: v.reshape(step.chunk, step.own_rows, *v.shape[1:]) for name, v in padded.items()}
    is_padding = np.arange(capacity) >= count
    if own_padding is not None:
        is_padding = np.concatenate([own_padding, np.ones((capacity - count, *own_padding.shape[1:]), bool)])
    is_padding = is_padding.reshape(step.chunk, step.own_rows, *is_padding.shape[1:])
    return Chunk(shaped, is_padding, np.int32(-(-count // step.own_rows) if count_all is None else count_all))
