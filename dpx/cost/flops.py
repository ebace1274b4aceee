"""Counts floating-point operations of one training example, by arithmetic on shapes. It imports no jax.

A product of [m,k] and [k,n] counts 2mkn. Element-wise work, lookups, clipping, noise and the optimiser are not counted.
"""

from collections.abc import Mapping
from typing import Literal

from dpx.models.model_protocol import ExampleModel
from dpx.models.rotary import RotaryDecoder
from dpx.models.shape import AnyModel, Bert, Decoder


def forward_matmul_flops(
    model: AnyModel, vocabulary_size: int, sequence_length: int, masked_positions: int, *, pooled_outputs: int = 0
) -> int:
    """Returns the exact matrix-product FLOPs of one example's forward pass; padding and masked scores count, because they are computed.

    `masked_positions` positions are decoded over the vocabulary; `pooled_outputs` values come from a pooled token, in a Bert through one
    more dense map unless its classifier is linear.
    """
    if isinstance(model, ExampleModel | RotaryDecoder):
        return model.forward_flops(vocabulary_size, sequence_length, pooled_outputs)
    T, H, F, M = sequence_length, model.width, model.feed_forward, masked_positions
    transform = 0 if isinstance(model, Decoder) else H * H
    is_linear = isinstance(model, Bert) and model.classifier == "linear"
    linear = 2 * T * (3 * H * H + H * H + 2 * H * F)
    attention = 2 * 2 * T * T * H
    head = 2 * M * (transform + H * vocabulary_size)
    pooled = 2 * ((0 if is_linear else transform) + pooled_outputs * H) if pooled_outputs else 0
    return model.layers * (linear + attention) + head + pooled


def training_matmul_flops(
    model: AnyModel, vocabulary_size: int, sequence_length: int, masked_positions: int, *, pooled_outputs: int = 0
) -> int:
    """Returns the FLOPs of forward and backward pass of one example: three times the forward pass.

    Every product has two products as its derivative.
    """
    return 3 * forward_matmul_flops(model, vocabulary_size, sequence_length, masked_positions, pooled_outputs=pooled_outputs)


def recomputed_matmul_flops(model: AnyModel, sequence_length: int) -> int:
    """Returns the FLOPs of one example that the backward pass of all layers computes again, with `model.rematerialize=layers`.

    The output of a Decoder's `down` is only added to the next layer's input: the backward pass of the layer does not read it, so it is not
    computed again.
    """
    if isinstance(model, ExampleModel | RotaryDecoder):
        return model.recomputed_flops(sequence_length)
    T, H, F = sequence_length, model.width, model.feed_forward
    of_layer = 2 * T * (4 * H * H + (1 if model.causal else 2) * H * F) + 2 * 2 * T * T * H
    return model.layers * of_layer if model.rematerialize == "layers" else 0


def published_flops(parameters: int, sequence_length: int) -> int:
    """Returns 6 M S, the rule by which Anil et al. 2021 and McKenna et al. 2025 state cost (every parameter in every token's product)."""
    return 6 * parameters * sequence_length


def by_type(products: float, of_weights: float, dtype: Literal["float32", "bfloat16"], *, is_private: bool) -> Mapping[str, float]:
    """Returns the FLOPs of a step's matrix products by the type of their factors: bfloat16, float32, or float32_highest (full precision).

    A private step weights cotangents in float32. In a bfloat16 model it multiplies them in two parts of bfloat16, so that such a product
    counts twice (`dpx.clipping.bounds`). The products of norms alone are not counted.

    Args:
        products: FLOPs of all products, each counted once.
        of_weights: Those that give gradients of trained matrices.
        dtype: The model's compute type.
        is_private: Whether gradients are clipped.
    """
    if not is_private:
        return {dtype: products}
    if dtype == "float32":
        return {"float32": products - of_weights, "float32_highest": of_weights}
    return {"bfloat16": products + of_weights}
