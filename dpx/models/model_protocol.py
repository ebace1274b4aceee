"""Defines what the models of dpx share, and a model from another package: any JAX code for one example. This file imports no jax.

`clipping_method=traced` clips any such model exactly (`dpx.clipped_grad`): an example is computed alone, so that nothing of one example can
be in the row of another, and each example gets a copy of a parameter whose gradient has no product form.

Shape legend: T tokens, V vocabulary, K classes.
"""

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dpx.declaration import declaration, require

Shapes = dict[str, tuple[int, ...]]
# What the backward pass computes again instead of keeping it: nothing, or the inside of each layer from its input.
Rematerialize = Literal["none", "layers"]
# dpx's own formula, or `jax.nn.dot_product_attention` with that implementation.
Attention = Literal["explicit", "xla", "cudnn"]
# Fields of a model that say how it is computed, not what: they do not belong to a run's identity or claim.
COMPUTATION = ("rematerialize", "attention")
# The largest head of cuDNN's attention.
CUDNN_HEAD = 256


@declaration
class Transformer:
    """The base class of the models of dpx.

    Attributes:
        name: Name of the model in statements and reports.
        layers: Number of layers.
        width: Length of a token's vector.
        heads: Attention heads of a layer.
        feed_forward: Width of the feed-forward part.
        positions: The longest sequence.
        vocabulary_size: Rows of the word table; null takes the data's.
        new_rows: How many of these rows, the last ones, are parameters of their own, for tokens that a checkpoint's table lacks.
        dtype: Compute type; parameters, sums, norms and noise are always float32.
        initialiser_range: Standard deviation of the initial weights.
        tied: Whether the word table is also the output matrix.
        scan: Whether layers are a loop in the compiled program; false unrolls them.
        rematerialize: What the backward pass computes again: nothing, or the inside of each layer from its input, which alone is kept.
        attention: How attention is computed: dpx's own formula, or jax.nn.dot_product_attention with xla or cudnn.
    """

    causal: ClassVar[bool] = True
    segments: ClassVar[int] = 0
    position_offset: ClassVar[int] = 0

    name: str
    layers: int
    width: int
    heads: int
    feed_forward: int
    positions: int = 1024
    vocabulary_size: int | None = None
    new_rows: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    initialiser_range: float = 0.02
    tied: bool = True
    scan: bool = True
    rematerialize: Rematerialize = "none"
    attention: Attention = "explicit"

    def parameter_shapes(self, vocabulary_size: int, *, outputs: int = 0) -> Shapes:
        """Returns every parameter's path and shape: with a head over the vocabulary, or a classifier of `outputs` values."""
        raise NotImplementedError

    def table_shapes(self, path: str, new: str, vocabulary_size: int) -> Shapes:
        """Returns the shapes of a table of the vocabulary at `path`, and of its new rows at `new`, if it has any."""
        rows = {path: (vocabulary_size - self.new_rows, self.width)}
        return rows | ({new: (self.new_rows, self.width)} if self.new_rows else {})

    def parameters(self, vocabulary_size: int, **head: Any) -> int:
        """Returns the exact number of parameters with the `head` that `parameter_shapes` takes."""
        return count(self.parameter_shapes(vocabulary_size, **head))


class ExampleModel:
    """The base class of models of packages: initial parameters, and the logits of one example, in any JAX code.

    A model must define `init`, and `token_logits` or `class_logits`. Parameters are a nested dict of float32 arrays. A path below `layers/`
    is a stack, whose first axis is the layer, if layers are clipped separately or chosen by number (`clip=per_layer`, `train=top`).
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

        @property
        def name(self) -> str: ...
        @property
        def positions(self) -> int: ...

    # Whether the logits of a token depend only on it and the tokens before it: then the task is causal_lm, else mlm; classification
    # takes both.
    causal: ClassVar[bool] = False
    # With train=top the frozen layers are given as `layers_below`, to be run before `layers`. A model that does not declare support for
    # this gets both as one stack, of which every example then has a copy.
    runs_layers_below: ClassVar[bool] = False
    # The type in which parameters are gathered; sums, norms and noise are always float32.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # The data's, where it is None.
    vocabulary_size: int | None = None
    # A model that has these settings declares them as fields.
    rematerialize: Rematerialize = "none"
    attention: Attention = "explicit"

    def init(self, key: Any, vocabulary_size: int, outputs: int) -> Any:
        """Returns new parameters.

        Args:
            key: A random key, uint32 [2].
            vocabulary_size: V.
            outputs: K, the number of values of the classifier; 0 for a head over the vocabulary.

        Returns:
            A nested dict of float32 arrays.
        """
        raise NotImplementedError

    def token_logits(self, params: Any, tokens_T: Any, length: Any) -> Any:
        """Returns the logits of every position of one example; runs under jit and is differentiated.

        Args:
            params: Parameters as `init` makes them.
            tokens_T: Token ids, int32 [T].
            length: int32 []; the positions from `length` on are padding.

        Returns:
            Logits, float [T, V]. If `causal`, those of a position depend only on it and the positions before it.
        """
        raise NotImplementedError

    def class_logits(self, params: Any, tokens_T: Any, segment_T: Any, length: Any) -> Any:
        """Returns the logits of the classes for one text or one pair of texts; runs under jit and is differentiated.

        Args:
            params: Parameters as `init` makes them.
            tokens_T: Token ids, int32 [T].
            segment_T: int32 [T]; 1 within the second text of a pair, 0 elsewhere.
            length: int32 []; the positions from `length` on are padding.

        Returns:
            Logits, float [K].
        """
        raise NotImplementedError

    def parameter_shapes(self, vocabulary_size: int, *, next_sentence: bool = False, outputs: int = 0) -> Shapes:
        """Returns the path and shape of every parameter that `init` makes, without computing any.

        It imports jax, so a plan for such a model does too.
        """
        import jax
        import jax.numpy as jnp

        from dpx.randomness import path_name

        key = jax.ShapeDtypeStruct((2,), jnp.uint32)
        params = jax.eval_shape(lambda key: self.init(key, vocabulary_size, outputs), key)
        return {path_name(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def forward_flops(self, vocabulary_size: int, sequence_length: int, outputs: int) -> int:
        """Returns the FLOPs of one example's forward pass; by default every parameter takes part in a product for every token."""
        return 2 * count(self.parameter_shapes(vocabulary_size, outputs=outputs)) * sequence_length

    def recomputed_flops(self, sequence_length: int) -> int:
        """Returns the FLOPs of one example that the backward pass computes again; 0 unless the model declares `rematerialize`."""
        return 0

    def activations(self, vocabulary_size: int, sequence_length: int) -> int:
        """Returns how many numbers one example keeps for the backward pass.

        By default it is one copy of all parameters, which `clipping_method=traced` may need, and logits.
        """
        return count(self.parameter_shapes(vocabulary_size)) + 2 * vocabulary_size * sequence_length


def check_attention(model: Any, head_dim: int, dropout: float = 0.0) -> None:
    """Raises `ConfigError` for an attention that cannot compute `model`, whose heads have `head_dim` numbers."""
    value = f"model.attention={model.attention}"
    require(
        model.attention == "explicit" or dropout == 0,
        f"{value}, model.dropout={dropout}",
        "jax.nn.dot_product_attention drops no attention probabilities",
        "Use model.dropout=0, or model.attention=explicit",
    )
    if model.attention == "cudnn":
        reason = f"cuDNN's attention needs bfloat16 and heads of a multiple of 8 numbers, at most {CUDNN_HEAD}"
        is_met = model.dtype == "bfloat16" and head_dim % 8 == 0 and head_dim <= CUDNN_HEAD
        require(is_met, f"{value}, model.dtype={model.dtype}, {head_dim} numbers a head", reason, "Use model.attention=xla, or change them")


def count(shapes: Shapes) -> int:
    """Returns the number of scalars in parameters of these shapes."""
    return sum(math.prod(shape) for shape in shapes.values())
