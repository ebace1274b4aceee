"""Compiles the steps of dpx and of jax-privacy.

A step is the sums of one logical batch, and the work that follows once (reduction, noise, update).

Shape legend: K microbatches of a logical batch, B examples of one on a device, D devices.
"""

import dataclasses
import functools
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dpx.cost.compiled import collectives
from dpx.cost.traced import compiled_temporaries, matmul_flops
from dpx.mechanism.dp_sgd import NoPrivacy
from dpx.mechanism.noise import slice_keys
from dpx.randomness import RootSecret
from dpx.task.mlm import Special
from dpx.task.objective import objective as make_objective
from dpx.training import sharding
from dpx.training.exactness import Exactness
from dpx.training.microbatch import CANDIDATES, Workload, choose, synthetic_rows
from dpx.training.step import Step, make_step
from dpx_papers.benchmark.setting import NON_PRIVATE, Program, Setting, identity, left_out
from dpx_papers.benchmark.sums import variant_sum

KEY = np.zeros(2, np.uint32)
# A relative error of float32 sums that is rounding; a forgotten term is some per cent.
EXACT = 1e-4
# The variant whose physical batch `microbatch=auto` chooses.
AUTOMATIC = "book_keeping"
# Square factors, and so many products in a row that starting them costs nothing: large enough for an accelerator, quick on a CPU.
SIZES = {"cpu": (1024, 2)}
LARGE = (8192, 8)


def programs(setting: Setting) -> list[Program]:
    """Returns the rate of plain products, the updates, and a sum for every (dtype, physical batch, variant).

    There is one update for private and one for plain steps. All variants at one batch come before the next batch, so that a lack of time
    leaves out whole batches. The automatic batch comes last: its search compiles several programs.
    """
    bench = _Bench(setting)
    made = [matrix_rate(setting, dtype) for dtype in setting.dtypes]
    made += [bench.update(is_private) for is_private in sorted({variant not in NON_PRIVATE for variant in setting.variants})]
    made += [
        bench.sum(variant, dtype, size) for dtype in setting.dtypes for size in setting.physical_batches for variant in setting.variants
    ]
    return [*made, *(bench.automatic_sum(dtype) for dtype in setting.dtypes if setting.has_auto_batch)]


class _Bench:
    """The objects that the programs of one process share: parameters, the accumulator (passed from call to call) and the mesh."""

    def __init__(self, setting: Setting):
        self.setting, self.experiment = setting, setting.experiment
        self.mesh = self.experiment.mesh.make()
        self.axes = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        first = self.step(True, setting.dtypes[0])
        self.state, self.sums = first.init(KEY, None), first.zero()
        self.params = {dtype: self.step(True, dtype).gather(self.state.params) for dtype in setting.dtypes}
        self.oracle, self.errors = Exactness(self.experiment.model, self.experiment.task), dict[str, float]()

    def objective(self, dtype: str) -> Any:
        """Returns the objective in a compute type."""
        experiment = self.experiment
        model = dataclasses.replace(experiment.model, dtype=dtype)
        return make_objective(model, experiment.task, experiment.vocabulary_size, Special(0, 1, 2, 3, 4))

    def step(self, is_private: bool, dtype: str) -> Step:
        """Returns the step of dpx itself: its layout of arrays, the parameters it gathers, and its update."""
        experiment = dataclasses.replace(self.experiment, model=dataclasses.replace(self.experiment.model, dtype=dtype))
        experiment = experiment if is_private else dataclasses.replace(experiment, mechanism=NoPrivacy())
        return make_step(experiment.one_step, self.objective(dtype), self.mesh, 1)

    def automatic_sum(self, dtype: str) -> Program:
        """Returns the private sum at the microbatch that `microbatch=auto` chooses on this device, searched again.

        The microbatch is at most a device's part of the logical batch. If time is up, nothing is searched and the program is left out.
        """
        if time.monotonic() > self.setting.compile_until:
            facts = identity(self.setting, AUTOMATIC, dtype, 0) | {"kind": "sum", "is_automatic_batch": True}
            return left_out(facts, "the time limit was reached before the search for microbatch=auto")
        workload = Workload.of(self.experiment.one_step, self.objective(dtype), self.experiment.data.sequence_length, self.experiment.mesh)
        part = self.setting.logical_batch // self.axes
        with tempfile.TemporaryDirectory() as cache:
            size = choose(workload, [size for size in CANDIDATES if part % size == 0] or [part], Path(cache))
        return self.sum(AUTOMATIC, dtype, size, is_automatic=True)

    def sum(self, variant: str, dtype: str, size: int, is_automatic: bool = False) -> Program:
        """Returns the program of one logical batch of `variant`; it is left out if time is up or the device's memory does not hold it."""
        facts = identity(self.setting, variant, dtype, size) | {"kind": "sum", "framework": f"jax {jax.__version__}"}
        facts |= {"is_automatic_batch": is_automatic}
        if time.monotonic() > self.setting.compile_until:
            return left_out(facts, "the time limit was reached before compilation")
        objective, params = self.objective(dtype), self.params[dtype]
        # jax-privacy loops over microbatches itself; to it a physical batch is its `microbatch_size`.
        held = self.setting.logical_batch // self.axes if variant == "jax_privacy" else size
        batch, count = self.batch(objective, held)
        microbatch = variant_sum(objective, self.experiment.clip, variant, size)
        where = jax.tree.map(lambda leaf: leaf.sharding, self.sums["gradient"])
        step = jax.jit(logical_sum(microbatch, self.mesh), donate_argnums=(1,), out_shardings=where)
        compiled = step.lower(params, self.sums["gradient"], batch, count).compile()
        if compiled_temporaries(compiled) > free_bytes():
            return left_out(facts, f"{compiled_temporaries(compiled):,} bytes of temporaries do not fit")
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((held, *leaf.shape[2:]), leaf.dtype), batch)
        facts |= {
            "temporary_bytes": compiled_temporaries(compiled),
            # The length of jax-privacy's loop is not visible in a trace.
            "matmul_flops": None
            if variant == "jax_privacy"
            else matmul_flops(microbatch, params, one, platform=jax.default_backend()) // held,
            "collectives": self.collectives(compiled),
        }

        def call() -> None:
            self.sums["gradient"] = jax.block_until_ready(compiled(params, self.sums["gradient"], batch, count))

        return Program(facts | self.exactness(variant), call)

    def batch(self, objective: Any, held: int) -> tuple[Any, np.int32]:
        """Returns one masked logical batch of random rows, [K, B * D, ...], and K."""
        logical, rows = self.setting.logical_batch, held * self.axes
        drawn = synthetic_rows(self.experiment.task, logical, self.experiment.data.sequence_length, objective.vocabulary_size)
        batch = jax.jit(objective.batch)(KEY, drawn)
        shaped = jax.tree.map(lambda leaf: leaf.reshape(-1, rows, *leaf.shape[1:]), batch)
        return jax.device_put(shaped, NamedSharding(self.mesh, P(None, sharding.EXAMPLE_AXES))), np.int32(logical // rows)

    def exactness(self, variant: str) -> dict[str, Any]:
        """Returns how far the clipped sum is from float64 gradients taken one example at a time; nothing for a plain sum."""
        if variant in NON_PRIVATE:
            return {"clipped_sum_error": None, "is_exact": None, "is_tied": True}
        if variant not in self.errors:
            self.errors[variant] = self.oracle.error(functools.partial(variant_sum, variant=variant, physical_batch=1))
        return {"clipped_sum_error": self.errors[variant], "is_exact": self.errors[variant] <= EXACT, "is_tied": True}

    def update(self, is_private: bool) -> Program:
        """Returns the program of the end of a step of dpx: reduction and its checksum, noise if private, division and optimiser."""
        keys = slice_keys(RootSecret.from_seed(0), 0, self.state.params) if is_private else None
        deviation = np.float32(self.experiment.clip.clipping_norm if is_private else 0)
        inputs = keys, deviation, np.float32(self.setting.logical_batch), np.float32(0)
        step = self.step(is_private, self.setting.dtypes[0])
        reduce = step.reduce.lower(self.sums, deviation).compile()
        finish = step.finish.lower(self.state, reduce(self.sums, deviation), *inputs).compile()
        gathered = step.gather.lower(self.state.params).compile()
        facts = {"kind": "update", "mesh": self.experiment.mesh.name, "is_private": is_private}

        def call() -> None:
            self.state, _ = jax.block_until_ready(finish(self.state, reduce(self.sums, deviation), *inputs))

        return Program(facts | {"collectives": self.collectives(reduce, finish, gathered)}, call)

    def collectives(self, *compiled: Any) -> dict[str, int]:
        """Returns the number of collective instructions, of those inside loops, and of elements of their results on a device.

        On a mesh of one device there is nothing to communicate, so all are zero.
        """
        crossing = [one for program in compiled for one in collectives(program.as_text())] if self.mesh.size > 1 else []
        return {
            "per_logical_batch": len(crossing),
            "in_loops": sum(one.is_in_loop for one in crossing),
            "elements": sum(one.elements for one in crossing),
        }


def free_bytes() -> float:
    """Returns the free bytes of the first device's memory; infinite if the backend does not report them."""
    stats = jax.devices()[0].memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats else math.inf


def logical_sum(microbatch: Callable[[Any, Any], Any], mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    """Returns the function (parameters, float32 sums [D, ...], batch [K, B * D, ...], K) -> sums, computed as a step does it.

    Each device loops over its own part, with the accumulator in place, and nothing is exchanged.
    """

    def on_device(params: Any, sums: Any, batch_KB: Any, count: jax.Array) -> Any:
        def body(index: jax.Array, sums: Any) -> Any:
            rows = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), batch_KB)
            return jax.tree.map(lambda total, part: total + part[None], sums, microbatch(params, rows))

        return jax.lax.fori_loop(0, count, body, sums)

    split = P(sharding.EXAMPLE_AXES)
    specs = (P(), split, P(None, sharding.EXAMPLE_AXES), P())
    return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=split, axis_names={"data", "fsdp"}, check_vma=False)


def matrix_rate(setting: Setting, dtype: str) -> Program:
    """Returns a program of products of square matrices in `dtype`, at the default precision of the steps' products.

    It gives the rate that this device reaches, of which a step reaches a share.
    """
    size, count = SIZES.get(jax.default_backend(), LARGE)
    values = jax.random.normal(jax.random.PRNGKey(0), (size, size)).astype(dtype)
    # Products of such factors keep their size, however many follow one another.
    factor = (values.astype(jnp.float32) / jnp.sqrt(size)).astype(dtype)

    @jax.jit
    def products(values: jax.Array, factor: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, current: current @ factor, values)

    compiled = products.lower(values, factor).compile()
    device = jax.devices()[0].device_kind
    facts = {"kind": "rate", "dtype": dtype, "mesh": setting.experiment.mesh.name, "device": device, "flops": 2 * count * size**3}
    return Program(facts, lambda: jax.block_until_ready(compiled(values, factor)))
