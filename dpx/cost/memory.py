"""Computes the bytes that a training step holds on one device, and the FLOPs of an example, by arithmetic on shapes. It imports no jax.

With P trained and R frozen parameters, b examples of a microbatch on a device, T tokens, H width, F feed-forward width, A heads,
l differentiated layers (1, the current layer, if no layer is differentiated), M masked positions and V words; gradients of S numbers are
summed, those of the trained parameters unless a mechanism replaces some, which then count in R; `shards` devices share the stored state:

    stored        4 P / shards + state         float32 parameters and the optimiser's state (Adam's: 8 P / shards)
    gathered      s S where shards > 1 or s = 2, and s R: the whole parameters during accumulation, s bytes each in the compute type
    accumulator   4 S                          float32 sum on every device
    mechanism     what it holds beyond one noisy sum, over shards
    microbatch    4 S + b (4 S [vmap only] + s a)
    update        12 P / shards                reduced sum, noise and direction; not at the same time as a microbatch

    a = l (T (10 H + 3 F) + 2 A T^2) + 3 T H + M (2 V + 2 H)     activations kept for the backward pass, of s bytes each,
        - l T (2 H + F) [kernels frozen]                         inputs that only their gradients read
        + l T (2 H + F) [kernels trained, book_keeping]          cotangents that cannot overwrite a dead activation

`model.rematerialize=layers` keeps the inputs of l layers, and of one layer the rest: (l + 10) T H + 3 T F + 2 A T^2. Book-keeping and ghost
clipping then hold the other inputs and all cotangents of trained kernels, l T (7 H + 2 F), and l T H more in a decoder, since none of
them can overwrite an activation. `model.attention=cudnn` keeps no scores: no A T^2.

The peak is their sum with the larger of the last two. The compiler's own scratch is not in it; measured peaks lie above.

As FLOPs, a product of [m,k] and [k,n] counts 2mkn. Element-wise work, lookups, clipping, noise and the optimiser are not counted.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

from dpx.models.model_protocol import ExampleModel, Shapes, count
from dpx.models.shape import LINEAR, AnyModel, Bert, Decoder, Model, RotaryDecoder

FLOAT32 = 4
# Training without clipping, or how clipped sums are computed.
Method = Literal["plain", "vmap", "ghost", "book_keeping", "traced"]


class Trains(NamedTuple):
    """The trained part of a model, in numbers.

    It holds the numbers of trained and of frozen parameters, of the differentiated layers from the top (`None`: all), whether gradients of
    a dense map's matrix in these layers are summed, of how many numbers they are summed (`None`: of the trained parameters), and how many
    trained parameters a mechanism replaces by others for that.
    """

    parameters: int
    frozen: int = 0
    layers: int | None = None
    kernels: bool = True
    summed: int | None = None
    replaced: int = 0

    def differentiated_by(self, shapes: Shapes, summed: Shapes) -> "Trains":
        """Returns the same for gradients of arrays of the shapes `summed`, instead of the trained parameters `shapes`.

        Replaced parameters are constants of the loss.
        """
        if shapes == summed:
            return self
        replaced = count({path: shape for path, shape in shapes.items() if path not in summed})
        kernels = any(path.startswith("layers/") and path.endswith("/kernel") for path in summed)
        return self._replace(summed=count(summed), replaced=replaced, frozen=self.frozen + replaced, kernels=kernels)


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes on one device, by use."""

    stored: int
    gathered: int
    accumulator: int
    mechanism: int
    microbatch: int
    update: int

    @property
    def peak(self) -> int:
        """Returns the largest number of bytes at one time."""
        return self.stored + self.gathered + self.accumulator + self.mechanism + max(self.microbatch, self.update)

    def measured(self, temporaries: int) -> "Memory":
        """Returns the same with a microbatch as a compiler counts it: its `temporaries` (bytes) and the sum of its gradients."""
        return dataclasses.replace(self, microbatch=self.accumulator + temporaries)


def activations(model: AnyModel, trains: Trains, vocabulary_size: int, sequence_length: int, masked_positions: int) -> int:
    """Returns how many numbers one example keeps for the backward pass."""
    if isinstance(model, ExampleModel):
        return model.activations(vocabulary_size, sequence_length)
    if isinstance(model, RotaryDecoder):
        layers, decoded = _differentiated(model, trains), masked_positions > 0
        return model.activations(vocabulary_size if decoded else 0, sequence_length, layers, kernels=trains.kernels)
    T, H, F = sequence_length, model.width, model.feed_forward
    scores = 0 if model.attention == "cudnn" else 2 * model.heads * T * T
    layers, layer = _differentiated(model, trains), T * (10 * H + 3 * F) + scores - (0 if trains.kernels else T * (2 * H + F))
    kept = layers * T * H + layer if model.rematerialize == "layers" else layers * layer
    return kept + 3 * T * H + masked_positions * (2 * vocabulary_size + 2 * H)


def step_memory(
    model: AnyModel,
    trains: Trains,
    *,
    vocabulary_size: int,
    sequence_length: int,
    masked_positions: int,
    microbatch: int,
    shards: int,
    method: Method,
    mechanism_bytes: int = 0,
    optimizer_bytes: int | None = None,
) -> Memory:
    """Returns the memory of one device with `microbatch` rows at a time.

    `mechanism_bytes` is of the whole mesh; `optimizer_bytes` is the optimiser's state on one device (`dpx.training.update.state_bytes`),
    `None` for Adam's two moments.
    """
    number, parameters = 2 if model.dtype == "bfloat16" else FLOAT32, trains.parameters
    summed = parameters if trains.summed is None else trains.summed
    example = number * activations(model, trains, vocabulary_size, sequence_length, masked_positions)
    if method == "vmap":
        example += FLOAT32 * summed
    # A traced model keeps what book-keeping keeps; the activations of a model that may be copied include the copies.
    if trains.kernels and not isinstance(model, ExampleModel | RotaryDecoder):
        # What the method records of a token and layer beside the activations that the backward pass keeps anyway.
        H, F, of_inputs = model.width, model.feed_forward, method in ("book_keeping", "traced")
        recorded = 2 * H + F if of_inputs else 0
        if model.rematerialize == "layers":
            recorded = (8 if model.causal else 7) * H + 2 * F if of_inputs or method == "ghost" else 0
        example += number * _differentiated(model, trains) * sequence_length * recorded
    gathered = summed if shards > 1 or number < FLOAT32 else 0
    return Memory(
        stored=FLOAT32 * parameters // shards + optimizer_bytes if optimizer_bytes is not None else 3 * FLOAT32 * parameters // shards,
        gathered=number * (gathered + trains.frozen),
        accumulator=FLOAT32 * summed,
        mechanism=mechanism_bytes // shards,
        microbatch=FLOAT32 * summed + microbatch * example,
        update=3 * FLOAT32 * parameters // shards,
    )


def _differentiated(model: Model, trains: Trains) -> int:
    return model.layers if trains.layers is None else max(1, trains.layers)


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
    is_linear = isinstance(model, Bert) and model.classifier in LINEAR
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
