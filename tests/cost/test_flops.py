"""What the backward pass computes again: counted by arithmetic, and in the traced program."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dpx.clipping.clipped_sum import plain_sum
from dpx.cost.memory import recomputed_matmul_flops
from dpx.cost.traced import matmul_flops
from dpx.models.families import Gemma
from dpx.models.shape import Bert, Decoder
from dpx.task.declared_task import CausalLanguageModel, Classification
from dpx.task.objective import objective
from dpx.training.microbatch import synthetic_rows
from tests.clipping.batches import SPECIAL

SIZES = {"layers": 3, "width": 16, "heads": 2, "feed_forward": 40, "positions": 32}


@pytest.mark.parametrize(
    ("model", "task"),
    [
        (Bert(name="test", **SIZES), Classification(classes=3)),
        (Decoder(name="test", **SIZES), CausalLanguageModel()),
        (Gemma(name="test", key_value_heads=1, head_dim=6, **SIZES), CausalLanguageModel()),
    ],
)
def test_what_is_computed_again_is_counted(model, task):
    def traced(model):
        of = objective(model, task, 50, SPECIAL)
        params = jax.eval_shape(of.init, jax.ShapeDtypeStruct((2,), jnp.uint32))
        batch = jax.eval_shape(of.batch, jax.ShapeDtypeStruct((2,), jnp.uint32), synthetic_rows(task, 1, 12, 50))
        return matmul_flops(lambda params, batch: plain_sum(of.losses, params, batch, fused=False).total, params, batch)

    again = dataclasses.replace(model, rematerialize="layers")
    assert traced(again) - traced(model) == recomputed_matmul_flops(again, 12) > 0 == recomputed_matmul_flops(model, 12)
