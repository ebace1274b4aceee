"""Selections of what is trained, and the one comparison that each must pass with every family and method."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpx
from dpx.models import trainable
from dpx.models.lora import add_adapters
from tests.clipping.batches import QUICKLY, assert_trees_close, float64_gradients, parameters, squared_norm
from tests.clipping.families import DROPOUT_KEY, rows, subject

SELECTIONS = {
    "bias": trainable.BIAS,
    "last_layer": trainable.LAST_LAYER,
    "top": trainable.top(1),
    "lora": trainable.LORA,
    "lora_ffa": trainable.LORA_FFA,
    # Kernels whose inputs come through gains that rest, and a table that is decoded with, but not the layers between.
    "kernels": trainable.matching("layers/qkv/kernel", "layers/up/kernel"),
    "positions": trainable.matching("embeddings/position"),
    "bias_and_top": trainable.either(trainable.BIAS, trainable.top(1)),
}


@cache
def start(family: str, adapter_dropout: float = 0.0, **changes):
    """(loss, parameters with adapters that do something, a batch, float64 gradients of each example by all of them)."""
    of = subject(family, **changes)
    params = add_adapters(parameters(of, spread=0.3), jax.random.key(3), rank=2, alpha=3.0, targets=("*",), dropout=adapter_dropout)
    drawn = np.random.default_rng(5)
    for adapter in params["layers"]["lora"].values():
        adapter["b"] = jnp.asarray(drawn.normal(0, 0.3, adapter["b"].shape), jnp.float32)

    def losses(params, batch):
        return of.losses(params, batch, DROPOUT_KEY)

    batch = rows(of)
    return losses, params, batch, float64_gradients(losses, params, batch)[0]


def assert_exact(family: str, selection: trainable.Selection, method: str = "book_keeping", changes: Any = (), **options) -> None:
    """Norms and sums of what is trained against float64 autodiff of one example at a time; the third row is padding."""
    losses, params, batch, gradients = start(family, **dict(changes))
    trained, frozen = trainable.split(params, selection)
    gradients = [trainable.split(gradient, selection)[0] for gradient in gradients]
    norms = np.sqrt([squared_norm(gradient) for gradient in gradients])
    limit = float(np.median(norms))
    is_padding_B = np.arange(len(norms)) == 2
    factors = np.where(is_padding_B, 0, limit / np.maximum(norms, limit))
    expected = jax.tree.map(lambda *leaves: sum(c * g for c, g in zip(factors, leaves, strict=True)), *gradients)
    options = {"weights": lambda norms_B: limit / jnp.maximum(norms_B, limit), "method": method, "checked": False} | options

    def clipped(trained, frozen, batch, is_padding_B):
        return dpx.clipped_sum(losses, trained, batch, frozen=frozen, is_padding_B=is_padding_B, **options)

    found = jax.jit(clipped, compiler_options=QUICKLY)(trained, frozen, batch, jnp.asarray(is_padding_B))
    assert jax.tree.structure(found.total) == jax.tree.structure(trained)
    np.testing.assert_allclose(np.square(found.norms_B), np.where(is_padding_B, 0, np.square(norms)), rtol=1e-5, atol=1e-12)
    # The keys' cotangents add up to zero by softmax's shift invariance: what is left of an adapter's gradient is rounding's.
    assert_trees_close(found.total, expected, floor=1e-7 * limit)
