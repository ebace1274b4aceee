"""Declares the measurements of one benchmark process, and its report on each program. It imports no jax."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from dpx.config.experiment import Experiment
from dpx.cost.memory import training_matmul_flops

# The two non-private baselines, the clipping methods, and a loop over single examples (Yin and Habernal 2022, Figure 3).
OWN = ("autodiff", "plain", "vmap", "ghost", "book_keeping", "loop")
# Optional peers: `torch` is the non-private step with which the opacus rows are compared.
PEERS = ("jax_privacy", "torch", "opacus_hooks", "opacus_ew", "opacus_ghost")
VARIANTS = (*OWN, *PEERS)
NON_PRIVATE = ("autodiff", "plain", "torch")
# The package a peer needs, under the name it is imported by.
PACKAGES = {"jax_privacy": ("jax_privacy",), "torch": ("torch",)} | dict.fromkeys(PEERS[2:], ("torch", "opacus"))


@dataclasses.dataclass(frozen=True)
class Setting:
    """The measurements of one process: `experiment` gives model, task, sequence length, clip and its one mesh.

    Every variant is measured in every dtype at every physical batch (examples that a device holds at a time).

    Programs that are not compiled by `compile_until` (seconds of the system's monotonic clock) are left out and named. `has_auto_batch`
    adds the batch that `microbatch=auto` chooses to those of the private step.
    """

    experiment: Experiment
    variants: Sequence[str]
    dtypes: Sequence[str]
    logical_batch: int
    physical_batches: Sequence[int]
    compile_until: float = math.inf
    has_auto_batch: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that can be timed: `call` returns when its result is ready. `facts` are plain values that need no clock."""

    facts: dict[str, Any]
    call: Callable[[], None]


def left_out(facts: dict[str, Any], why: str) -> Program:
    """Returns a row that was requested and not measured."""
    return Program(facts | {"kind": "left out", "why": why}, lambda: None)


def identity(setting: Setting, clipping: str, dtype: str, physical_batch: int) -> dict[str, Any]:
    """Returns the fields that identify a row of benchmark.json, and the FLOPs that its model needs per example."""
    experiment, task = setting.experiment, setting.experiment.task
    model, vocabulary, length = experiment.model, experiment.vocabulary_size, experiment.data.sequence_length
    return {
        "model": model.name,
        "sequence_length": length,
        "physical_batch": physical_batch,
        "clipping": clipping,
        "dtype": dtype,
        "mesh": experiment.mesh.name,
        "devices": experiment.mesh.devices,
        "model_flops": training_matmul_flops(model, vocabulary, length, task.masked_positions(length), pooled_outputs=task.pooled_outputs),
    }
