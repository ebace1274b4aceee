"""Floating-point operations of one training example, by arithmetic on shapes. No jax.

A product of [m,k] and [k,n] counts 2mkn. Element-wise work, lookups, clipping, noise and the optimiser are not counted.
"""

from dpx.models.shape import Bert


def forward_matmul_flops(model: Bert, vocabulary_size: int, sequence_length: int, masked_slots: int, *, next_sentence: bool) -> int:
    """Exact matrix-product FLOPs of one example's forward pass, padding included (it is computed)."""
    T, H, F, M = sequence_length, model.width, model.feed_forward, masked_slots
    linear = 2 * T * (3 * H * H + H * H + 2 * H * F)
    attention = 2 * 2 * T * T * H
    head = 2 * M * (H * H + H * vocabulary_size)
    pooled = 2 * (H * H + 2 * H) if next_sentence else 0
    return model.layers * (linear + attention) + head + pooled


def training_matmul_flops(model: Bert, vocabulary_size: int, sequence_length: int, masked_slots: int, *, next_sentence: bool) -> int:
    """Forward and backward of one example: every product has two products as its derivative, so three times the forward."""
    return 3 * forward_matmul_flops(model, vocabulary_size, sequence_length, masked_slots, next_sentence=next_sentence)


def published_flops(parameters: int, sequence_length: int) -> int:
    """6 M S: the rule by which Anil et al. 2021 and McKenna et al. 2025 state cost (every parameter in every token's product)."""
    return 6 * parameters * sequence_length
