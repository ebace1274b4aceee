"""Bytes a training step holds on one device, by arithmetic on shapes. No jax.

With P parameters, b examples of a microbatch on a device, T tokens, H width, F feed-forward width, L layers, A heads, M masked
slots and V words, of which `fsdp` devices share what is at rest:

    at rest       (4 + 8) P / fsdp             float32 parameters and Adam's two moments
    gathered      s P where fsdp > 1 or s = 2  the whole parameters during accumulation, s bytes each in the compute type
    accumulator   4 P                          float32 sum on every device
    microbatch    4 P + b (4 P [vmap only] + s a)
    update        12 P / fsdp                  reduced sum, noise and direction; not at the same time as a microbatch

    a = L (T (10 H + 3 F) + 2 A T^2) + 3 T H + M (2 V + 2 H)     activations kept for the backward pass, of s bytes each,
        + L T (2 H + F) [book_keeping]                           cotangents that find no dead activation to be written over

The peak is their sum with the larger of the last two. The compiler's own scratch is not in it; measured peaks lie above.
"""

import dataclasses
from typing import Literal

from dpx.models.shape import Model

FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, by use."""

    at_rest: int
    gathered: int
    accumulator: int
    microbatch: int
    update: int

    @property
    def peak(self) -> int:
        return self.at_rest + self.gathered + self.accumulator + max(self.microbatch, self.update)


def activations(model: Model, vocabulary_size: int, sequence_length: int, masked_slots: int) -> int:
    """Numbers one example keeps for the backward pass."""
    T, H, F = sequence_length, model.width, model.feed_forward
    layer = T * (10 * H + 3 * F) + 2 * model.heads * T * T
    return model.layers * layer + 3 * T * H + masked_slots * (2 * vocabulary_size + 2 * H)


def step_memory(
    model: Model,
    *,
    parameters: int,
    vocabulary_size: int,
    sequence_length: int,
    masked_slots: int,
    microbatch: int,
    fsdp: int,
    method: Literal["plain", "vmap", "ghost", "book_keeping"],
) -> Memory:
    """Memory of one device with `microbatch` examples at a time; `method="plain"` is training without clipping."""
    number = 2 if model.dtype == "bfloat16" else FLOAT32
    example = number * activations(model, vocabulary_size, sequence_length, masked_slots)
    if method == "vmap":
        example += FLOAT32 * parameters
    if method == "book_keeping":
        example += number * model.layers * sequence_length * (2 * model.width + model.feed_forward)
    return Memory(
        at_rest=3 * FLOAT32 * parameters // fsdp,
        gathered=number * parameters if fsdp > 1 or number < FLOAT32 else 0,
        accumulator=FLOAT32 * parameters,
        microbatch=FLOAT32 * parameters + microbatch * example,
        update=3 * FLOAT32 * parameters // fsdp,
    )
