"""Counts matrix-product FLOPs of training with some parameters frozen, traced on shapes.

They depend on which parameters are frozen.

A frozen parameter has no gradient, and nothing below the lowest trained parameter is differentiated. Nothing is allocated or run.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpx.clipping.clipped_sum import plain_sum
from dpx.clipping.frozen import merged
from dpx.cost.traced import matmul_flops
from dpx.mechanism.protocol import Mechanism
from dpx.models.shape import AnyModel
from dpx.models.trained import Trained
from dpx.task.declarations import Task
from dpx.task.mlm import Special
from dpx.task.objective import objective
from dpx.training import carried, features
from dpx.training.frozen import draw
from dpx.training.microbatch import synthetic_rows


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
    subject = objective(model, task, vocabulary_size, Special(pad_id=0, unk_id=1, cls_id=2, sep_id=3, mask_id=4))
    key = np.zeros(2, np.uint32)
    trained, frozen = jax.eval_shape(lambda key: draw(train, subject, key), key)
    by = carried.shapes(mechanism, trained)
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
