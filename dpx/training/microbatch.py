"""Finds, for `microbatch=auto`, the fastest number of examples per microbatch that fits the memory, measured on synthetic rows.

The answer never depends on protected data. It is cached per (model, task, sequence, clipping, device), and a run keeps its own
copy, written before step 0: a resumed run uses its copy whatever the cache says, since another size would give other bits.

B: examples of a microbatch (rows, or whole units where those are drawn).
"""

import dataclasses
import hashlib
import json
import logging
import os
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dpx.clipping.readers import merged
from dpx.config.experiment_parts import OneStep
from dpx.cost.memory import Memory, step_memory
from dpx.cost.traced import compiled_temporaries
from dpx.declaration import ConfigError
from dpx.durable import make_private, write_durably
from dpx.mechanism.mechanism_protocol import Mechanism
from dpx.models.trained import Trained
from dpx.optimizer import Optimizer
from dpx.processes.mesh import Mesh
from dpx.task.declared_task import Task
from dpx.training import frozen, update
from dpx.training.gradient_sum import GradientSum

logger = logging.getLogger(__name__)

CANDIDATES = (2, 4, 8, 16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Workload:
    """The work of one device on a microbatch of a run, with that device."""

    objective: Any
    gradient_sum: GradientSum
    train: Trained
    sequence_length: int
    mechanism: Mechanism
    mesh: Mesh
    optimizer: Optimizer

    @classmethod
    def of(cls, declared: OneStep, objective: Any, sequence_length: int, mesh: Mesh) -> "Workload":
        """Returns the workload of a step with its `objective` (`dpx.task.objective`) on texts of `sequence_length` tokens."""
        gradient_sum = GradientSum.build(declared.mechanism, declared.clip, declared.clipping_method, declared.privacy)
        return cls(objective, gradient_sum, declared.trained, sequence_length, declared.mechanism, mesh, declared.optimizer)

    def batch(self, examples: int) -> dict[str, jax.Array]:
        """Returns a batch of `examples` synthetic examples, as the loss takes it."""
        rows = synthetic_rows(
            self.objective.task, examples * self.gradient_sum.rows_per_unit, self.sequence_length, self.objective.vocabulary_size
        )
        return jax.jit(self.objective.batch)(np.zeros(2, np.uint32), rows)

    def memory(self, examples: int) -> Memory:
        """Returns the memory of a step with `examples` examples at a time, by arithmetic (`dpx.cost.memory`)."""
        objective, trains = self.objective, frozen.trains(self.train, self.objective, self.mechanism)
        return step_memory(
            objective.model,
            trains,
            vocabulary_size=objective.vocabulary_size,
            sequence_length=self.sequence_length,
            masked_positions=objective.task.masked_positions(self.sequence_length),
            microbatch=examples * self.gradient_sum.rows_per_unit,
            shards=self.mesh.shards,
            method=self.gradient_sum.method,
            mechanism_bytes=self.mechanism.extra_memory_bytes(trains.parameters, trains.replaced),
            optimizer_bytes=update.state_bytes(self.optimizer, frozen.shapes(self.train, self.objective)[0], self.mesh),
        )

    def params(self, key: Any) -> tuple[Any, Any]:
        """Returns (the arrays by which the loss is differentiated, all other parameters), drawn with `key`. Runs under jit."""
        trained, kept = frozen.draw(self.train, self.objective, key)
        by = frozen.differentiated_by(self.mechanism, trained)
        return by.trained, merged(by.constants, kept)

    def sum(self, params: Any, batch: Any) -> Any:
        """Computes the sum of one microbatch, as the step does; `params` is the result of the method `params`. Runs under jit."""
        losses = lambda params, batch: self.objective.losses(params, batch, jnp.zeros(2, jnp.uint32))  # noqa: E731
        norm = self.gradient_sum.clip.clipping_norm if self.gradient_sum.clip else None
        return self.gradient_sum(losses, params[0], batch, norm, frozen=params[1]).total


def resolve_microbatch(declared: int | Literal["auto"], workload: Workload, private: Path) -> int:
    """Returns the run's microbatch: the config's number, or the answer of `auto`, which is written to `private` once and then kept."""
    if declared != "auto":
        return declared
    path = private / "microbatch.json"
    kept = _noted(path)
    if kept is not None:
        return kept
    chosen = choose(workload)
    make_private(private)
    write_durably(path, json.dumps({"microbatch": chosen}))
    return chosen


def choose(workload: Workload, candidates: Sequence[int] = CANDIDATES, cache: Path | None = None) -> int:
    """Returns the fastest of `candidates` that fits the device's memory; raises `ConfigError` if none fits."""
    limit = workload.mesh.usable_bytes()
    kept = cache or Path(os.environ.get("DPX_CACHE", Path.home() / ".cache" / "dpx")) / "microbatch"
    path = kept / f"{_key(workload, candidates, limit)}.json"
    chosen = _noted(path)
    if chosen is not None:
        logger.info("microbatch=auto: %d, found before on this device", chosen)
        return chosen
    rates = _rates(workload, candidates, limit)
    if not rates:
        reason = f"the smallest microbatch, {candidates[0]} examples, does not fit in the device's {limit:,} bytes"
        raise ConfigError("microbatch=auto", reason, "Use a smaller model or a larger device")
    chosen = max(rates, key=lambda size: rates[size])
    logger.info("microbatch=auto: %d, examples/s by size %s", chosen, {size: round(rate, 1) for size, rate in rates.items()})
    write_durably(path, json.dumps({"microbatch": chosen, "examples_per_s": rates}))
    return chosen


def _noted(path: Path) -> int | None:
    """Returns the size that was written to `path`, or `None` if the file is missing or cannot be used and the size must be found again."""
    try:
        size = json.loads(path.read_text())["microbatch"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return size if type(size) is int and size > 0 else None


def _rates(workload: Workload, candidates: Sequence[int], limit: int) -> dict[int, float]:
    """Returns examples/s by size, smallest first, until `limit` bytes are exhausted or two sizes in a row do not exceed the best."""
    params = jax.jit(workload.params)(jax.random.PRNGKey(0))
    rates: dict[int, float] = {}
    for candidate in candidates:
        batch = workload.batch(candidate)
        compiled = jax.jit(workload.sum).lower(params, batch).compile()
        if workload.memory(candidate).measured(compiled_temporaries(compiled)).peak > limit:
            break
        rates[candidate] = candidate / probe(lambda compiled=compiled, batch=batch: compiled(params, batch))
        best = max(rates.values())
        if len(rates) > 2 and all(rates[slower] < best for slower in list(rates)[-2:]):
            break
    return rates


def probe(call: Callable[[], Any]) -> float:
    """Returns the seconds of the faster of two calls, after one warm-up call."""
    jax.block_until_ready(call())
    return min(timeit.repeat(lambda: jax.block_until_ready(call()), number=1, repeat=2))


def _key(workload: Workload, candidates: Sequence[int], limit: int) -> str:
    device, objective, summed = jax.devices()[0], workload.objective, workload.gradient_sum
    facts = (objective.model, objective.task, objective.vocabulary_size, workload.sequence_length, workload.train)
    facts += (
        workload.mechanism,
        type(summed.clip).__name__,
        summed.clipping_method,
        summed.rows_per_unit,
        workload.mesh,
        tuple(candidates),
        workload.optimizer,
    )
    facts += (device.device_kind, limit, os.cpu_count(), jax.__version__)
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def synthetic_rows(task: Task, examples: int, sequence_length: int, vocabulary_size: int) -> dict[str, np.ndarray]:
    """Returns `examples` rows of the columns that `task` reads; most rows are full and some half empty.

    Ids are drawn by a power law, so tokens repeat as words do. The text is independent of the label.
    """
    drawn = np.random.default_rng(0)
    columns = task.columns(sequence_length, vocabulary_size)
    texts = (examples, *columns["length"].shape)
    length = drawn.integers(sequence_length // 2, sequence_length + 1, texts)
    length = np.where(drawn.random(texts) < 0.7, sequence_length, length).astype(np.int32)
    tokens = np.minimum(5 + drawn.zipf(1.2, (*texts, sequence_length)), vocabulary_size - 1)
    tokens = np.where(np.arange(sequence_length) < length[..., None], tokens, 0).astype(np.int32)
    rows = {"tokens": tokens, "segment_start": (length // 2).astype(np.int32), "length": length}
    rows = {name: values for name, values in rows.items() if name in columns}
    for name, column in columns.items():
        if name not in rows:
            rows[name] = drawn.integers(0, column.below or 2, (examples, *column.shape)).astype(column.read_as)
    return rows | {"record": np.arange(examples, dtype=np.int32)}
