"""What a private step costs that trains some parameters, beside autodiff of just those: traced products, compiled temporaries."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest

import dpx
from dpx.clipping.readers import merged
from dpx.cost.traced import matmul_flops, temporary_bytes
from dpx.models import trainable
from dpx.models.fused_head import BLOCK_BYTES
from dpx.models.lora import add_adapters
from dpx.models.trained import BIAS, LAST_LAYER, LORA, LORA_FFA, top
from tests.clipping.test_cost import VOCABULARY, WEIGHTS, shapes
from tests.models.test_head import sizes

SELECTIONS = {
    "bias": BIAS,
    "last_layer": LAST_LAYER,
    "top third": top(4),
    "lora": LORA,
    "lora_ffa": LORA_FFA,
}


@cache
def subject(size: str, selection: str, examples: int = 32):
    """(private step, autodiff of what is trained by itself, their arguments) at 128 tokens; nothing is allocated."""
    of, params, batch = shapes(size, 128, examples)

    def drawn(params, key):
        given = add_adapters(params, key, rank=8, alpha=16.0) if "lora" in selection else params
        return trainable.split(given, SELECTIONS[selection])

    trained, frozen = jax.eval_shape(drawn, params, jax.ShapeDtypeStruct((2,), jnp.uint32))

    def private(trained, frozen, batch):
        return dpx.clipped_sum(of.losses, trained, batch, frozen=frozen, weights=WEIGHTS, checked=False)

    def by_hand(trained, frozen, batch):
        return jax.grad(lambda trained: of.losses(merged(trained, frozen), batch)[0].sum())(trained)

    return private, by_hand, (trained, frozen, batch)


def slow(*names):
    return [pytest.param(*name, marks=pytest.mark.slow) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, selection",
    [*(("base", name) for name in SELECTIONS), *slow(*(("decoder_small", name) for name in SELECTIONS))],
)
def test_products_beside_autodiff_of_just_those_leaves(size, selection):
    private, by_hand, arguments = subject(size, selection)
    assert matmul_flops(private, *arguments) <= 1.05 * matmul_flops(by_hand, *arguments)


def test_frozen_parameters_cost_no_products():
    """Below the head nothing is differentiated; where biases are trained, no gradient of a kernel is formed: two thirds of a step."""
    of, params, batch = shapes("base", 128, 32)
    whole = matmul_flops(lambda params, batch: dpx.plain_sum(of.losses, params, batch, fused=False).total, params, batch)
    costs = {}
    for selection in ("bias", "last_layer"):
        private, _, arguments = subject("base", selection)
        costs[selection] = matmul_flops(private, *arguments) / whole
    assert costs["last_layer"] < 0.37 and costs["bias"] < 0.68


# That a frozen head holds the logits of a block alone is in tests/models/test_head.py.
@pytest.mark.slow
def test_logits_of_a_microbatch_are_never_held_where_the_head_is_frozen():
    def largest(step, *arguments):
        return max(sizes(jax.make_jaxpr(step)(*arguments).jaxpr, VOCABULARY))

    private, _, arguments = subject("decoder_tiny", "lora")
    assert BLOCK_BYTES // 8 < largest(private, *arguments) <= BLOCK_BYTES // 4
    of, params, batch = shapes("decoder_tiny", 128, 32)
    trains_all = lambda params, batch: dpx.clipped_sum(of.losses, params, batch, weights=WEIGHTS, checked=False)  # noqa: E731
    assert largest(trains_all, params, batch) == 32 * 128 * VOCABULARY


@pytest.mark.slow
@pytest.mark.parametrize("size, selection", [("base", name) for name in SELECTIONS])
def test_temporaries_beside_autodiff_of_just_those_leaves(size, selection):
    private, by_hand, arguments = subject(size, selection)
    assert temporary_bytes(private, *arguments) <= 1.1 * temporary_bytes(by_hand, *arguments)
