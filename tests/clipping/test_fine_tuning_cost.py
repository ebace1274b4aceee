"""What a private step of fine-tuning a classifier costs beside a plain one, whole or by adapters: XLA's count of operations, and the
temporaries of its compiled programs."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import pytest

import dpx
from dpx.clipping.readers import merged
from dpx.cost.traced import temporary_bytes
from dpx.models import trainable
from dpx.models.lora import add_adapters
from dpx.models.trained import ALL, LAST_LAYER, LORA, either
from dpx.task.declared_task import Classification
from dpx.task.objective import objective
from tests.clipping.batches import SPECIAL
from tests.clipping.test_cost import VOCABULARY, WEIGHTS
from tests.models.declared import declared

TRAINED = {"all": ALL, "lora": either(LORA, LAST_LAYER)}
# Beside autodiff of what is trained: operations, temporaries.
MOST = {"all": (1.1, 1.2), "lora": (1.05, 1.1)}


@cache
def subject(trained: str, layers: int, is_scanned: bool, examples: int = 16):
    """(private step, plain step, their arguments) of so many layers of BERT-Base at 128 tokens; nothing is allocated."""
    model = dataclasses.replace(declared("base"), layers=layers, scan=is_scanned)
    of = objective(model, Classification(classes=2), VOCABULARY, SPECIAL)
    key, scalar = jax.ShapeDtypeStruct((2,), jnp.uint32), jax.ShapeDtypeStruct((examples,), jnp.int32)
    rows = {name: scalar for name in ("segment_start", "length", "label", "record")}
    rows["tokens"] = jax.ShapeDtypeStruct((examples, 128), jnp.int32)

    def drawn(key):
        params = of.init(key)
        return trainable.split(add_adapters(params, key, rank=8, alpha=16.0) if trained == "lora" else params, TRAINED[trained])

    def private(trained, frozen, batch):
        return dpx.clipped_sum(of.losses, trained, batch, frozen=frozen, weights=WEIGHTS, checked=False)

    def plain(trained, frozen, batch):
        return jax.grad(lambda trained: of.losses(merged(trained, frozen), batch)[0].sum())(trained)

    return private, plain, (*jax.eval_shape(drawn, key), jax.eval_shape(of.batch, key, rows))


def operations(function, arguments) -> float:
    """Of the program as it is handed to the compiler, which counts what a loop repeats once: layers must not be scanned."""
    costs = jax.jit(function).lower(*arguments).cost_analysis()
    assert costs is not None
    return costs["flops"]


@pytest.mark.slow
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("layers", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_operations_of_a_private_step_beside_a_plain_one(layers, trained):
    private, plain, arguments = subject(trained, layers, is_scanned=False)
    ratio = operations(private, arguments) / operations(plain, arguments)
    print(f"{layers} layers, {trained}: operations {ratio:.4f}")
    assert 0.9 < ratio <= MOST[trained][0]


@pytest.mark.slow
@pytest.mark.parametrize("trained", TRAINED)
def test_temporaries_of_a_private_step_beside_a_plain_one(trained):
    private, plain, arguments = subject(trained, 12, is_scanned=True)
    ratio = temporary_bytes(private, *arguments) / temporary_bytes(plain, *arguments)
    print(f"{trained}: temporaries {ratio:.4f}")
    assert ratio <= MOST[trained][1]
