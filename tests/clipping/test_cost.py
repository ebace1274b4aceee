"""What private steps cost without a clock: matrix products of the traced step, temporaries of the compiled one."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dpx
from dpx.cost.memory import training_matmul_flops
from dpx.cost.traced import matmul_flops, temporary_bytes
from dpx.mechanism.clip import flat_weights
from dpx.task.declared_task import CausalLanguageModel, MaskedLanguageModel
from dpx.task.objective import objective
from tests.clipping.batches import SPECIAL
from tests.models.declared import declared

WEIGHTS = flat_weights(1.0)
VOCABULARY = 30_522


@cache
def shapes(size: str, sequence: int, examples: int, **changes: Any):
    """(objective, shapes of parameters, shapes of a batch); nothing is allocated."""
    model = dataclasses.replace(declared(size), **changes)
    masked = MaskedLanguageModel(next_sentence=True, max_masked_positions=20 if sequence == 128 else 77)
    subject: Any = objective(model, CausalLanguageModel() if model.causal else masked, VOCABULARY, SPECIAL)
    key, scalar = jax.ShapeDtypeStruct((2,), jnp.uint32), jax.ShapeDtypeStruct((examples,), jnp.int32)
    rows = {name: scalar for name in ("segment_start", "length", "is_next", "record")}
    rows["tokens"] = jax.ShapeDtypeStruct((examples, sequence), jnp.int32)
    return subject, jax.eval_shape(subject.init, key), jax.eval_shape(subject.batch, key, rows)


def plain(subject, fused=True):
    return lambda params, batch: dpx.plain_sum(subject.losses, params, batch, fused=fused)


def private(subject, **options):
    return lambda params, batch: dpx.clipped_sum(subject.losses, params, batch, weights=WEIGHTS, checked=False, **options)


@cache
def plain_flops(size: str, sequence: int, examples: int) -> int:
    subject, *arguments = shapes(size, sequence, examples)
    return matmul_flops(plain(subject), *arguments)


@pytest.mark.parametrize(
    "size, sequence, examples, kept_bytes, most",
    [
        ("base", 128, 8, 0, 1.05),
        pytest.param("large", 128, 4, 0, 1.05, marks=pytest.mark.slow),
        pytest.param("base", 512, 4, 2**40, 1.12, marks=pytest.mark.slow),
        pytest.param("large", 512, 4, 2**40, 1.12, marks=pytest.mark.slow),
        pytest.param("base", 512, 4, 0, 1.15, marks=pytest.mark.slow),
        pytest.param("large", 512, 4, 0, 1.15, marks=pytest.mark.slow),
        ("decoder_small", 128, 8, 0, 1.05),
        pytest.param("decoder_small", 512, 4, 2**40, 1.12, marks=pytest.mark.slow),
        pytest.param("decoder_small", 512, 4, 0, 1.15, marks=pytest.mark.slow),
    ],
)
def test_private_matrix_products_beside_plain_ones(size, sequence, examples, kept_bytes, most):
    subject, *arguments = shapes(size, sequence, examples)
    ratio = matmul_flops(private(subject, kept_bytes=kept_bytes), *arguments) / plain_flops(size, sequence, examples)
    assert 1.0 < ratio <= most


@pytest.mark.parametrize(
    "size, sequence, examples, found",
    [
        ("base", 128, 8, 1.070),
        pytest.param("large", 128, 4, 1.054, marks=pytest.mark.slow),
        pytest.param("base", 512, 4, 1.160, marks=pytest.mark.slow),
        pytest.param("large", 512, 4, 1.126, marks=pytest.mark.slow),
    ],
)
def test_programs_for_cpus_cost_what_is_written_of_them(size, sequence, examples, found):
    """Their Gram products are cut less, on purpose; the figures are in experiments/benchmarks/README.md."""
    subject, *arguments = shapes(size, sequence, examples)
    ratio = matmul_flops(private(subject, kept_bytes=0), *arguments, platform="cpu") / plain_flops(size, sequence, examples)
    assert ratio == pytest.approx(found, abs=6e-4)


@pytest.mark.parametrize(
    "size, sequence, kept_bytes",
    [
        ("decoder_small", 128, 2**40),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in [("base", 512, 0), ("base", 128, 0), ("base", 512, 2**40), ("decoder_small", 512, 0)]
        ),
    ],
)
def test_a_step_in_bfloat16_multiplies_in_bfloat16(size, sequence, kept_bytes):
    """Products of float32 numbers do not run on the matrix units of accelerators."""
    subject, *arguments = shapes(size, sequence, 4, dtype="bfloat16")
    function = private(subject, kept_bytes=kept_bytes)
    assert 0 < matmul_flops(function, *arguments, dtype=jnp.float32) < 0.003 * matmul_flops(function, *arguments)


def test_plain_products_are_the_formulas():
    """Recomputed attention scores are the only products a plain step adds to three times the forward pass."""
    subject, *arguments = shapes("base", 128, 8)
    formula = 8 * training_matmul_flops(subject.model, VOCABULARY, 128, 20, pooled_outputs=2)
    scores = 8 * subject.model.layers * 2 * 128 * 128 * subject.model.width
    small = 8 * subject.model.layers * 8 * 128 * subject.model.width
    assert formula + scores <= plain_flops("base", 128, 8) <= formula + scores + small
    assert abs(matmul_flops(plain(subject, fused=False), *arguments) / formula - 1) < 0.002


def test_two_backward_passes_cost_what_they_should():
    subject, *arguments = shapes("base", 128, 8)
    assert matmul_flops(private(subject, method="ghost"), *arguments) / plain_flops("base", 128, 8) > 1.5


@pytest.mark.parametrize(
    "size, examples, most",
    [
        pytest.param("tiny", 32, 0.80, marks=pytest.mark.slow),
        # All positions are decoded: logits and their cotangent, as wide as the vocabulary, are nearly all that either takes.
        pytest.param("decoder_tiny", 8, 1.0, marks=pytest.mark.slow),
        pytest.param("mini", 32, 0.75, marks=pytest.mark.slow),
        pytest.param("small", 16, 0.75, marks=pytest.mark.slow),
        pytest.param("base", 8, 0.75, marks=pytest.mark.slow),
        pytest.param("large", 4, 0.75, marks=pytest.mark.slow),
    ],
)
def test_private_temporaries_beside_autodiff_ones(size, examples, most):
    subject, *arguments = shapes(size, 128, examples)
    assert temporary_bytes(private(subject), *arguments) <= most * temporary_bytes(plain(subject, fused=False), *arguments)


def test_loops_are_multiplied_out_and_dead_products_are_not_counted():
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)

    def looped(x):
        dead = x @ x
        return jax.lax.scan(lambda c, _: (c @ x, dead.sum()), x, None, length=5)[0]

    assert matmul_flops(looped, x) == 5 * 2 * 4**3
    assert matmul_flops(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x), x) == 2 * 2 * 4**3


def test_of_a_choice_by_platform_one_side_counts():
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)

    def chosen(x):
        return jax.lax.platform_dependent(x, cpu=lambda x: x @ x, default=lambda x: x @ x @ x)

    assert matmul_flops(chosen, x) == matmul_flops(chosen, x, platform="cuda") == 2 * 2 * 4**3
    assert matmul_flops(chosen, x, platform="cpu") == 2 * 4**3
