"""`job=benchmark`: what private steps cost beside plain ones, on this machine, as ratios within one run.

Variants take turns (A B C A B C ...), so that a machine shared with others slows all of them alike; a ratio is the median of the
rounds' ratios. Every variant is measured at each physical batch, and compared with each baseline at that baseline's best one.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dpx.declaration import Refused, declaration, require
from dpx.experiment import Experiment
from dpx.run_folder import RunFolder, write_json

# The two non-private baselines and the clipping methods.
VARIANTS = ("autodiff", "plain", "vmap", "ghost", "book_keeping")


@declaration
class Benchmark:
    """Writes `private/benchmark.json`. `autodiff` is `jax.grad` of the modules; `plain` is our own blocks without clipping."""

    variants: Sequence[str] = ("autodiff", "plain", "book_keeping")
    logical_batch: int = 32
    physical_batches: Sequence[int] = (4, 8, 16, 32)
    rounds: int = 9

    def __post_init__(self) -> None:
        for variant in self.variants:
            require(variant in VARIANTS, f"job.variants={variant}", "no such variant", f"Use {', '.join(VARIANTS)}")
        for size in self.physical_batches:
            require(
                size > 0 and self.logical_batch % size == 0,
                f"job.physical_batches={size}",
                f"does not divide job.logical_batch={self.logical_batch}",
                "Use a divisor",
            )
        require(self.rounds > 0, f"job.rounds={self.rounds}", "nothing would be measured", "Use 1 or more")

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        document = self.document(experiment)
        folder.private.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(folder.private / "benchmark.json", document)
        show(document, Console(soft_wrap=True))

    def document(self, experiment: Experiment) -> dict[str, Any]:
        """Conditions and rows of benchmark.json. Raises `Refused` on a mesh of several devices: one process measures one device."""
        import jax

        if experiment.mesh.devices > 1:
            raise Refused(f"mesh={experiment.mesh.name}", "the benchmark measures one device", "Use mesh=single")
        programs = [self._program(experiment, variant, size) for variant in self.variants for size in self.physical_batches]
        seconds = _interleaved([program["call"] for program in programs], self.rounds)
        device = jax.devices()[0]
        return {
            "device": device.device_kind,
            "cores": os.cpu_count(),
            "jax": jax.__version__,
            "logical_batch": self.logical_batch,
            "rounds": self.rounds,
            "rows": rows(programs, seconds, self.logical_batch),
        }

    def _program(self, experiment: Experiment, variant: str, size: int) -> dict[str, Any]:
        """One compiled variant and everything about it that needs no clock."""
        import jax
        import numpy as np

        from dpx.task import mlm
        from dpx.training.cost import compiled_temporaries, matmul_flops
        from dpx.training.synthetic_rows import synthetic_rows

        vocabulary = experiment.model.vocabulary_size or experiment.data.vocabulary.size
        objective = mlm.objective(experiment.model, experiment.task, vocabulary, mlm.Special(0, 1, 2, 3, 4))
        params = jax.jit(objective.init)(np.zeros(2, np.uint32))
        drawn = synthetic_rows(self.logical_batch, experiment.data.sequence_length, vocabulary)
        batch = jax.jit(objective.batch)(np.zeros(2, np.uint32), drawn)
        batch = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), batch)
        step = logical_step(_sum(objective, experiment, variant), self.logical_batch // size)
        compiled = jax.jit(step).lower(params, batch).compile()
        one = jax.tree.map(lambda leaf: leaf[0], batch)
        return {
            "model": experiment.model.name,
            "sequence_length": experiment.data.sequence_length,
            "physical_batch": size,
            "clipping": variant,
            "dtype": experiment.model.dtype,
            "mesh": experiment.mesh.name,
            "temporary_bytes": compiled_temporaries(compiled),
            "matmul_flops": matmul_flops(_sum(objective, experiment, variant), params, one) // size,
            "call": lambda: compiled(params, batch),
        }


def _sum(objective: Any, experiment: Experiment, variant: str) -> Callable[[Any, Any], Any]:
    import jax.numpy as jnp

    from dpx.clipping.clipped_sum import clipped_sum, plain_sum
    from dpx.clipping.weights import clip_weights

    def losses(params: Any, batch: Any) -> Any:
        return objective.losses(params, batch, jnp.zeros(2, jnp.uint32))

    def run(params: Any, batch: Any) -> Any:
        if variant in ("autodiff", "plain"):
            return plain_sum(losses, params, batch, fused=variant == "plain").total
        return clipped_sum(losses, params, batch, weights=clip_weights(experiment.clip), method=variant).total

    return run


def logical_step(microbatch_sum: Callable[[Any, Any], Any], microbatches: int) -> Callable[[Any, Any], Any]:
    """Float32 sum over the microbatches of one logical batch, as a device does it: a loop, the accumulator in place."""
    import jax
    import jax.numpy as jnp

    def step(params: Any, batch: Any) -> Any:
        def body(index: Any, total: Any) -> Any:
            rows = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), batch)
            return jax.tree.map(jnp.add, total, microbatch_sum(params, rows))

        return jax.lax.fori_loop(0, microbatches, body, jax.tree.map(jnp.zeros_like, params))

    return step


def _interleaved(calls: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Seconds of every call in every round, after one round that warms up."""
    import jax

    seconds: list[list[float]] = [[] for _ in calls]
    for round_ in range(rounds + 1):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            jax.block_until_ready(call())
            if round_:
                seconds[index].append(time.perf_counter() - start)
    return seconds


def rows(programs: Sequence[dict[str, Any]], seconds: Sequence[Sequence[float]], logical_batch: int) -> list[dict[str, Any]]:
    """Programs with their rates, and their ratios to each baseline at the baseline's own best physical batch."""
    medians = [_median(times) for times in seconds]
    best = {
        name: min((i for i, program in enumerate(programs) if program["clipping"] == name), key=lambda i: medians[i], default=None)
        for name in ("autodiff", "plain")
    }
    flops = {program["physical_batch"]: program["matmul_flops"] for program in programs if program["clipping"] == "plain"}
    found = []
    for program, times, median in zip(programs, seconds, medians, strict=True):
        row = {name: value for name, value in program.items() if name != "call"}
        row["examples_per_s"] = logical_batch / median
        row["examples_per_s_spread"] = [logical_batch / max(times), logical_batch / min(times)]
        for name, index in best.items():
            ratios = [] if index is None else [base / own for base, own in zip(seconds[index], times, strict=True)]
            row[f"ratio_to_{name}"] = _median(ratios) if ratios else None
            row[f"ratio_to_{name}_spread"] = [min(ratios), max(ratios)] if ratios else None
        plain = flops.get(row["physical_batch"])
        row["flops_ratio_to_plain"] = None if plain is None else row["matmul_flops"] / plain
        row["model_flops_per_s"] = row["matmul_flops"] * row["examples_per_s"]
        found.append(row)
    return found


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def show(document: dict[str, Any], console: Console) -> None:
    """The rows as a table, best physical batch of each variant first."""
    table = Table("clipping", "batch", "examples/s", "to autodiff", "to plain", "FLOPs", "temporaries MiB")
    for row in sorted(document["rows"], key=lambda row: (row["clipping"], -row["examples_per_s"])):
        against = (row["ratio_to_autodiff"], row["ratio_to_plain"], row["flops_ratio_to_plain"])
        ratios = ["" if ratio is None else f"{ratio:.2f}" for ratio in against]
        rate, size = f"{row['examples_per_s']:.1f}", f"{row['temporary_bytes'] / 2**20:.0f}"
        table.add_row(row["clipping"], str(row["physical_batch"]), rate, *ratios, size)
    console.print(table)
