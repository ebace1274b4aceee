"""Our sums for `speed.py`: autodiff of what is trained, and its clipped sum."""

from typing import Any

import jax
import numpy as np

import dpx
from dpx.clipping.readers import merged
from dpx.task.mlm import Special
from dpx.task.objective import objective
from dpx.training.frozen import draw
from dpx.training.microbatch import synthetic_rows
from dpx_papers.benchmark.setting import Program, Setting


def programs(setting: Setting) -> list[Program]:
    """One batch's sum by each variant."""
    experiment = setting.experiment
    vocabulary, length = experiment.vocabulary_size, experiment.data.sequence_length
    subject = objective(experiment.model, experiment.task, vocabulary, Special(0, 1, 2, 3, 4))
    key = np.zeros(2, np.uint32)
    trained, frozen = draw(experiment.train, subject, key)
    batch = jax.jit(subject.batch)(key, synthetic_rows(experiment.task, setting.logical_batch, length, vocabulary))
    weights = experiment.clip.weights(experiment.clip.clipping_norm)

    def autodiff(trained: Any, frozen: Any, batch: Any) -> Any:
        return jax.grad(lambda leaves: subject.losses(merged(leaves, frozen), batch)[0].sum())(trained)

    def private(trained: Any, frozen: Any, batch: Any) -> Any:
        return dpx.clipped_sum(subject.losses, trained, batch, frozen=frozen, weights=weights).total

    return [program({"autodiff": autodiff, "private": private}[name], trained, frozen, batch) for name in setting.variants]


def program(way: Any, *arguments: Any) -> Program:
    compiled = jax.jit(way).lower(*arguments).compile()

    def call() -> None:
        jax.block_until_ready(compiled(*arguments))

    return Program({"kind": "sum"}, call)
