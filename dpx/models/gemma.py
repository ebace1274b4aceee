"""Declares `model=vaultgemma_1b`, a decoder of the Gemma family, and computes its parameters and FLOPs by arithmetic. It imports no jax.

Shape legend: T tokens, V vocabulary, K classes; H width, F feed-forward, L layers, N query heads, G key-value heads, D numbers of a head.
"""

from typing import Any, ClassVar, Literal

from dpx.declaration import declaration, require
from dpx.models.protocol import ExampleModel, Shapes


@declaration
class Gemma(ExampleModel):
    """A causal decoder of the shape of VaultGemma (VaultGemma Team 2025, arXiv 2510.15001).

    That is Gemma 2 (arXiv 2408.00118) without its norms after each half, its sliding windows and its soft caps.

    RMSNorm before each half, rotary positions, `key_value_heads` shared by `heads` (multi-query attention where it is 1), a gated
    feed-forward (GeGLU) of two maps to `feed_forward`, no biases, and a word table that is multiplied by sqrt(width) when it is looked
    up and not when it decodes. A head has `head_dim` numbers, whatever the width. `vocabulary_size=None` takes the data's.

    It is a model of one example: `clipping_method=traced` clips it, by book-keeping everywhere.

    Attributes:
        name: Name of the model in statements and reports.
        layers: Number of layers.
        width: Length of a token's vector.
        heads: Attention heads of a layer.
        key_value_heads: Heads of keys and values, which the query heads share.
        head_dim: Numbers of a head, whatever the width.
        feed_forward: Width of the feed-forward part.
        positions: Rows of the position table: the longest sequence.
        vocabulary_size: Rows of the word table; null takes the data's.
        dtype: Compute type; parameters, sums, norms and noise are always float32.
        rms_norm_eps: Constant in RMSNorm's divisor.
        rotary_base: Base of the rotary positions' frequencies.
        initialiser_range: Standard deviation of the initial weights.
    """

    causal: ClassVar[bool] = True
    runs_layers_below: ClassVar[bool] = True

    name: str
    layers: int
    width: int
    heads: int
    key_value_heads: int
    head_dim: int
    feed_forward: int
    positions: int = 1024
    vocabulary_size: int | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    rms_norm_eps: float = 1.0e-6
    rotary_base: float = 10_000.0
    initialiser_range: float = 0.02

    def __post_init__(self) -> None:
        sizes = (self.layers, self.width, self.heads, self.key_value_heads, self.head_dim, self.feed_forward)
        require(min(sizes) > 0, f"model={self.name}", "sizes must be positive", "Check layers, width, heads, head_dim, feed_forward")
        require(
            self.heads % self.key_value_heads == 0,
            f"model.key_value_heads={self.key_value_heads}",
            f"does not divide {self.heads} heads",
            "Use 1, or a divisor of model.heads",
        )
        require(
            self.head_dim % 2 == 0,
            f"model.head_dim={self.head_dim}",
            "rotary positions rotate pairs of numbers, so the size must be even",
            "Use an even number",
        )

    def init(self, key: Any, vocabulary_size: int, outputs: int) -> Any:
        from dpx.models.gemma_layers import initial

        return initial(self.parameter_shapes(vocabulary_size, outputs=outputs), key, self.initialiser_range)

    def token_logits(self, params: Any, tokens_T: Any, length: Any) -> Any:
        # Padding is after the text, so no token of the text sees it.
        return self._hidden(params, tokens_T) @ params["embeddings"]["word"].T

    def class_logits(self, params: Any, tokens_T: Any, segment_T: Any, length: Any) -> Any:
        import jax.numpy as jnp

        return self._hidden(params, tokens_T)[jnp.maximum(length - 1, 0)] @ params["classifier"]["kernel"]

    def _hidden(self, params: Any, tokens_T: Any) -> Any:
        from dpx.models.gemma_layers import Settings, hidden

        return hidden(Settings(self.key_value_heads, self.head_dim, self.rms_norm_eps, self.rotary_base), params, tokens_T)

    def parameter_shapes(self, vocabulary_size: int, *, next_sentence: bool = False, outputs: int = 0) -> Shapes:
        """Returns every parameter's path and shape: with the next-token head, or a classifier of `outputs` values without bias."""
        require(not next_sentence, f"model={self.name}", "has no next-sentence classifier", "Use task=causal_lm")
        H, F, of_queries, of_keys = self.width, self.feed_forward, self.heads * self.head_dim, self.key_value_heads * self.head_dim
        layer: Shapes = {
            "attention_norm/scale": (H,),
            "query/kernel": (H, of_queries),
            "key/kernel": (H, of_keys),
            "value/kernel": (H, of_keys),
            "attention_out/kernel": (of_queries, H),
            "feed_forward_norm/scale": (H,),
            "gate/kernel": (H, F),
            "up/kernel": (H, F),
            "down/kernel": (F, H),
        }
        shapes: Shapes = {"embeddings/word": (vocabulary_size, H), "final_norm/scale": (H,)}
        shapes |= {f"layers/{path}": (self.layers, *shape) for path, shape in layer.items()}
        return shapes | ({"classifier/kernel": (H, outputs)} if outputs else {})

    def forward_flops(self, vocabulary_size: int, sequence_length: int, outputs: int) -> int:
        """Returns the FLOPs of the matrix products of one example's forward pass; masked scores count, because they are computed."""
        T, H, D = sequence_length, self.width, self.head_dim
        linear = 2 * T * H * (2 * self.heads * D + 2 * self.key_value_heads * D + 3 * self.feed_forward)
        attention = 2 * 2 * T * T * self.heads * D
        head = 2 * H * outputs if outputs else 2 * T * H * vocabulary_size
        return self.layers * (linear + attention) + head

    def activations(self, vocabulary_size: int, sequence_length: int) -> int:
        """Returns how many numbers one example keeps for the backward pass.

        They are what autodiff saves of plain JAX, cotangents of products, and logits.
        """
        T, H, F = sequence_length, self.width, self.feed_forward
        of_queries, of_keys = self.heads * self.head_dim, self.key_value_heads * self.head_dim
        # Four of the width to a half (one before and three within its norm), eight of GELU and the gate, sines and cosines.
        saved = 8 * H + 2 * of_queries + 2 * of_keys + 4 * self.head_dim + 8 * F
        cotangents = 2 * H + of_queries + 2 * of_keys + 2 * F
        # Of scores three numbers, and the quarter of one that says which are masked.
        scores = 13 * self.heads * T * T // 4
        return self.layers * (T * (saved + cotangents) + scores) + T * (3 * H + 2 * vocabulary_size)
