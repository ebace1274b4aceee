"""What one process of a benchmark measures, and what it tells about each program. No jax."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from dpx.cost.flops import training_matmul_flops
from dpx.data.declarations import Data
from dpx.experiment import Experiment
from dpx.models.shape import AnyModel
from dpx.task.declarations import Task

# The two non-private baselines, the clipping methods, and a loop over single examples (Yin and Habernal 2022, Figure 3).
OWN = ("autodiff", "plain", "vmap", "ghost", "book_keeping", "loop")
# Optional peers: `torch` is the non-private step that the opacus rows are to be held against.
PEERS = ("jax_privacy", "torch", "opacus_hooks", "opacus_ew", "opacus_ghost")
VARIANTS = (*OWN, *PEERS)
NON_PRIVATE = ("autodiff", "plain", "torch")
# The package a peer needs, under the name it is imported by.
PACKAGES = {"jax_privacy": ("jax_privacy",), "torch": ("torch",)} | dict.fromkeys(PEERS[2:], ("torch", "opacus"))


@dataclasses.dataclass(frozen=True)
class Setting:
    """`experiment` gives model, task, sequence length, clip and the one mesh of this process; every variant is measured in every
    dtype at every physical batch (examples a device holds at a time).

    What is not compiled by `compile_until` (seconds of the system's monotonic clock) is left out and named. `has_auto_batch` adds
    the batch that `microbatch=auto` picks to those of the private step.
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
    """Something that can be timed: `call` returns when its result is there. `facts` are what needs no clock, plain values."""

    facts: dict[str, Any]
    call: Callable[[], None]


def left_out(facts: dict[str, Any], why: str) -> Program:
    """A row that was asked for and not measured."""
    return Program(facts | {"kind": "left out", "why": why}, lambda: None)


def vocabulary_size(model: AnyModel, data: Data) -> int:
    """The size of the vocabulary: the model's own, or else the one that the data declares."""
    return model.vocabulary_size or data.vocabulary.size


def model_flops(model: AnyModel, task: Task, data: Data) -> int:
    """Matrix-product FLOPs that training on one example needs, whatever a program does beside them."""
    length = data.sequence_length
    return training_matmul_flops(
        model, vocabulary_size(model, data), length, task.masked_positions(length), pooled_outputs=task.pooled_outputs
    )


def identity(setting: Setting, clipping: str, dtype: str, physical_batch: int) -> dict[str, Any]:
    """What names a row of benchmark.json, and the FLOPs that its model needs per example."""
    experiment = setting.experiment
    return {
        "model": experiment.model.name,
        "sequence_length": experiment.data.sequence_length,
        "physical_batch": physical_batch,
        "clipping": clipping,
        "dtype": dtype,
        "mesh": experiment.mesh.name,
        "devices": experiment.mesh.devices,
        "model_flops": model_flops(experiment.model, experiment.task, experiment.data),
    }
