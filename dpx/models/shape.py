"""Declares model shapes, and computes the parameters that follow from them by arithmetic. It imports no jax.

`families.py` holds what differs between decoders with rotary positions, and `rotary_layers.py` computes all of them; of those the FLOPs and
the memory are here too.

Rows that a grown tokenizer adds to the table of a checkpoint are parameters of their own, so that they alone may be trained. They follow
the old ones: a table of V rows is `embeddings/word` [V - N, H] and `embeddings/new` [N, H], and an untied head is `decoder` and
`decoder_new` alike. So clipping sees a small table whose gradient is exact by the usual rules, tied or not. An export joins both.

Shape legend: T tokens, V vocabulary, K classes; H width, F feed-forward, L layers, stacked on a leading axis; N query heads, G key-value
heads, D numbers of a head.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from dpx.declaration import declaration, require
from dpx.models.model_protocol import ExampleModel, Shapes, Transformer, check_attention


@declaration
class RotaryDecoder(Transformer):
    """A causal decoder with RMSNorm around each half, rotary positions, grouped-query attention and a gated feed-forward.

    `key_value_heads` are shared by `heads`: one is multi-query attention. A head has `head_dim` numbers, whatever the width. Positions turn
    pairs of numbers at rates `rotary_base`^(-2d/D), which `rotary_scaling` changes: `"linear"` divides all of them by `rotary_factor`;
    `"llama3"` divides those whose wave is longer than `rotary_original_positions / rotary_low_frequency`, keeps those whose wave is
    shorter than `rotary_original_positions / rotary_high_frequency`, and passes smoothly between (Llama Team 2024). `tied`: the head is
    the word table. `vocabulary_size=None` takes the data's. `scan=False`: layers are unrolled in the compiled program, not in a loop.

    A family gives the class variables other values, or declares them as fields.

    Attributes:
        key_value_heads: Heads of keys and values, which the query heads share.
        head_dim: Numbers of a head, whatever the width.
        rms_norm_eps: Constant in RMSNorm's divisor.
        rotary_base: Base of the rotary positions' rates.
        rotary_scaling: How these rates are scaled for longer texts; none, linear or llama3.
        rotary_factor: Divisor of the scaled rates.
        rotary_low_frequency: Waves in the original context up to which a rate is divided by the whole factor (llama3).
        rotary_high_frequency: Waves in the original context from which on a rate is kept (llama3).
        rotary_original_positions: Length of the original context (llama3).
    """

    dropout: ClassVar[float] = 0.0
    activation: ClassVar[Literal["silu", "gelu_tanh"]] = "silu"
    # Added to the scale of a norm: 1 where a checkpoint stores the scale less one.
    norm_offset: ClassVar[float] = 0.0
    # RMSNorm of the queries and keys: of each head, or of all heads as one.
    query_key_norms: ClassVar[Literal["none", "head", "whole"]] = "none"
    # RMSNorm of what each half reads; of what it adds.
    has_pre_norms: ClassVar[bool] = True
    has_post_norms: ClassVar[bool] = False
    # Which maps of the attention have a bias.
    attention_biases: ClassVar[Literal["none", "query_key_value", "all"]] = "none"
    # A cap c takes x to c tanh(x / c): of the attention's scores, and of the logits.
    attention_cap: ClassVar[float | None] = None
    logit_cap: ClassVar[float | None] = None
    # A token sees the last `window` tokens, itself included, except in each `full_every`-th layer, which has no window.
    window: ClassVar[int | None] = None
    full_every: ClassVar[int] = 1
    # Each such layer turns no pairs: it knows no positions.
    unturned_every: ClassVar[int | None] = None
    # The base of the layers that have a window, without scaling; None: that of all.
    window_rotary_base: ClassVar[float | None] = None

    key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1.0e-6
    rotary_base: float = 10_000.0
    rotary_scaling: Literal["none", "linear", "llama3"] = "none"
    rotary_factor: float = 1.0
    rotary_low_frequency: float = 1.0
    rotary_high_frequency: float = 4.0
    rotary_original_positions: int = 8192

    def __post_init__(self) -> None:
        sizes = (self.layers, self.width, self.heads, self.key_value_heads, self.head_dim, self.feed_forward, self.positions)
        require(
            min(sizes) > 0, f"model={self.name}", "sizes must be positive", "Check layers, width, heads, head_dim, feed_forward, positions"
        )
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
        require(self.rotary_base > 0, f"model.rotary_base={self.rotary_base}", "is not positive", "Use 10000, or the checkpoint's")
        require(self.rotary_factor >= 1, f"model.rotary_factor={self.rotary_factor}", "is below 1", "Use 1 or more")
        require(
            0 < self.rotary_low_frequency < self.rotary_high_frequency,
            f"model.rotary_low_frequency={self.rotary_low_frequency}",
            f"is not between 0 and model.rotary_high_frequency={self.rotary_high_frequency}",
            "Use 1 and 4, or the checkpoint's",
        )
        require(
            self.window is None or self.window > 0, f"model.window={self.window}", "is not a number of tokens", "Use 1 or more, or null"
        )
        value = f"model.unturned_every={self.unturned_every}"
        require(self.unturned_every is None or self.unturned_every > 0, value, "is not a number of layers", "Use 1 or more, or null")
        require(self.full_every > 0, f"model.full_every={self.full_every}", "is not a number of layers", "Use 1 or more")
        check_attention(self, self.head_dim)
        require(
            self.attention == "explicit" or (self.attention_cap is None and self.window is None),
            f"model.attention={self.attention}, model.attention_cap={self.attention_cap}, model.window={self.window}",
            "jax.nn.dot_product_attention has no cap of scores, and no window in only some of the layers",
            "Use model.attention=explicit",
        )

    @property
    def query_scale(self) -> float:
        """Returns the factor of the scores."""
        return self.head_dim**-0.5

    @property
    def embedding_factor(self) -> float:
        """Returns the factor of a row of the word table that is looked up; as a head the table has none."""
        return 1.0

    def parameter_shapes(self, vocabulary_size: int, *, next_sentence: bool = False, outputs: int = 0) -> Shapes:
        """Returns every parameter's path and shape: with the next-token head, or a classifier of `outputs` values without bias."""
        require(not next_sentence, f"model={self.name}", "has no next-sentence classifier", "Use task=causal_lm")
        H, F, D, of_queries, of_keys = self.width, self.feed_forward, self.head_dim, *self._attention_widths
        outputs_of = {"query": of_queries, "key": of_keys, "value": of_keys}
        layer: Shapes = {f"{name}/kernel": (H, width) for name, width in outputs_of.items()} | {"attention_out/kernel": (of_queries, H)}
        layer |= {"gate/kernel": (H, F), "up/kernel": (H, F), "down/kernel": (F, H)}
        if self.attention_biases != "none":
            layer |= {f"{name}/bias": (width,) for name, width in outputs_of.items()}
        if self.attention_biases == "all":
            layer |= {"attention_out/bias": (H,)}
        if self.query_key_norms != "none":
            sizes = (of_queries, of_keys) if self.query_key_norms == "whole" else (D, D)
            layer |= {f"{name}_norm/scale": (size,) for name, size in zip(("query", "key"), sizes, strict=True)}
        if self.has_pre_norms:
            layer |= {"attention_norm/scale": (H,), "feed_forward_norm/scale": (H,)}
        if self.has_post_norms:
            layer |= {"attention_post_norm/scale": (H,), "feed_forward_post_norm/scale": (H,)}
        shapes: Shapes = {**self.table_shapes("embeddings/word", "embeddings/new", vocabulary_size), "final_norm/scale": (H,)}
        shapes |= {f"layers/{path}": (self.layers, *shape) for path, shape in layer.items()}
        if outputs:
            return shapes | {"classifier/kernel": (H, outputs)}
        return shapes if self.tied else shapes | self.table_shapes("decoder", "decoder_new", vocabulary_size)

    @property
    def _attention_widths(self) -> tuple[int, int]:
        """Returns the outputs of the queries' map, and of the keys' or the values'."""
        return self.heads * self.head_dim, self.key_value_heads * self.head_dim

    def forward_flops(self, vocabulary_size: int, sequence_length: int, outputs: int) -> int:
        """Returns the FLOPs of the matrix products of one example's forward pass; masked scores count, because they are computed."""
        T, H = sequence_length, self.width
        head = 2 * H * outputs if outputs else 2 * T * H * vocabulary_size
        return self._layer_flops(T) + 2 * T * H * self.feed_forward * self.layers + head

    def recomputed_flops(self, sequence_length: int) -> int:
        """Returns the FLOPs of one example that the backward pass computes again.

        It does not read the result of `down`, unless that is normalised.
        """
        of_down = 2 * sequence_length * self.width * self.feed_forward * self.layers if self.has_post_norms else 0
        return self._layer_flops(sequence_length) + of_down if self.rematerialize == "layers" else 0

    def _layer_flops(self, T: int) -> int:
        """Returns the FLOPs of all layers without their last maps, `down`."""
        H, (of_queries, of_keys) = self.width, self._attention_widths
        return self.layers * (2 * T * H * (2 * of_queries + 2 * of_keys + 2 * self.feed_forward) + 2 * 2 * T * T * of_queries)

    def activations(self, vocabulary_size: int, sequence_length: int, layers: int, *, kernels: bool) -> int:
        """Returns how many numbers one example keeps for the backward pass through the top `layers` layers.

        They are what autodiff saves of the layers, the cotangents of trained `kernels`, and the logits (of a vocabulary of 0 words: none).
        """
        T, H, F, (of_queries, of_keys) = sequence_length, self.width, self.feed_forward, self._attention_widths
        # Four of the width to a half (one before and three within its norm), the gate, what it is multiplied with and the product.
        saved = 8 * H + 2 * of_queries + 2 * of_keys + 4 * self.head_dim + 3 * F
        cotangents = 2 * H + of_queries + 2 * of_keys + 2 * F if kernels else 0
        # The formula keeps scores alone; `xla` also keeps probabilities, and a mask, which takes a quarter of a number.
        scores = {"explicit": 4, "xla": 13, "cudnn": 0}[self.attention] * self.heads * T * T // 4
        kept = layers * (T * (saved + cotangents) + scores)
        if self.rematerialize == "layers":
            # Inputs of layers and, of trained kernels, inputs (that of a half once for each map) and cotangents; of one layer the rest.
            inputs = 5 * H + of_queries + F if kernels else 0
            kept = layers * T * (H + inputs + cotangents) + T * saved + scores
        # Of the layer that runs, what lies between its gate and its product.
        return kept + T * (3 * H + 2 * F + 2 * vocabulary_size)


@declaration
class Bert(Transformer):
    """A post-LayerNorm encoder (Devlin et al. 2019) with a masked-token decoder.

    RoBERTa (Liu et al. 2019) is such an encoder with one segment and `position_offset=2`, DistilBERT (Sanh et al. 2019) one without
    segments. `classifier`: `"pooler"` is (dense, tanh, dropout, output), `"dense"` (dropout, dense, tanh, dropout, output), `"relu"`
    (dense, ReLU, dropout, output). `"linear_tanh"` and `"linear_relu"` are these with the identity in place of the dense map: of the heads
    that transformers loads those with fewest parameters.

    Attributes:
        positions: Rows of the position table: the longest sequence.
        position_offset: Rows of the position table that no token uses; RoBERTa has 2.
        segments: Rows of the segment table; 0 means no such table.
        dropout: Dropout rate in training.
        layer_norm_eps: Constant in LayerNorm's divisor.
        classifier: Head of a classifier: pooler (BERT), dense (RoBERTa), relu (DistilBERT), linear_tanh or linear_relu (one of these whose
            dense map is the identity), or linear (dropout and output alone).
        pool: What the classifier reads: the first token (cls), or the mean over the tokens.
    """

    causal: ClassVar[bool] = False
    gelu: ClassVar[Literal["exact", "tanh"]] = "exact"

    positions: int = 512
    position_offset: int = 0
    segments: int = 2
    dropout: float = 0.0
    layer_norm_eps: float = 1.0e-12
    classifier: Literal["pooler", "dense", "relu", "linear_tanh", "linear_relu", "linear"] = "pooler"
    pool: Literal["cls", "mean"] = "cls"

    def __post_init__(self) -> None:
        check_sizes(self)
        require(0 <= self.segments <= 2, f"model.segments={self.segments}", "a row has at most two segments", "Use 0, 1 or 2")
        require(
            self.position_offset >= 0,
            f"model.position_offset={self.position_offset}",
            "a position before the table does not exist",
            "Use 0 or more",
        )

    def parameter_shapes(self, vocabulary_size: int, *, next_sentence: bool = False, outputs: int = 0) -> Shapes:
        """Returns every parameter's path and shape.

        The head is the masked-LM head (and `next_sentence`'s), or a classifier of `outputs` values.
        """
        H, V = self.width, vocabulary_size
        reason, fix = "the head of masked words has no rows of its own for new tokens", "Use task=classification, or null"
        require(not self.new_rows or outputs > 0, f"model.new_rows={self.new_rows}", reason, fix)
        shapes: Shapes = {
            **self.table_shapes("embeddings/word", "embeddings/new", V),
            "embeddings/position": (self.positions + self.position_offset, H),
            **norm_shapes("embeddings/norm", H),
            **layer_shapes(self, "attention_norm", "output_norm"),
        }
        if self.segments:
            shapes["embeddings/segment"] = (self.segments, H)
        if outputs and self.classifier in ("dense", "relu"):
            return shapes | dense_shapes("classifier/dense", H, H) | dense_shapes("classifier/out", H, outputs)
        if outputs and self.classifier in LINEAR:
            return shapes | dense_shapes("classifier", H, outputs)
        if outputs:
            return shapes | dense_shapes("pooler", H, H) | dense_shapes("classifier", H, outputs)
        shapes |= dense_shapes("mlm/transform", H, H) | norm_shapes("mlm/norm", H) | {"mlm/output_bias": (V,)}
        if not self.tied:
            shapes["mlm/decoder"] = (V, H)
        if next_sentence:
            shapes |= dense_shapes("pooler", H, H) | dense_shapes("next_sentence", H, 2)
        return shapes


@declaration
class Decoder(Transformer):
    """A pre-LayerNorm causal decoder (GPT-2: Radford et al. 2019) whose head has no bias.

    Attributes:
        positions: Rows of the position table: the longest sequence.
        dropout: Dropout rate in training.
        layer_norm_eps: Constant in LayerNorm's divisor.
        gelu: Form of the GELU.
    """

    dropout: float = 0.0
    layer_norm_eps: float = 1.0e-5
    gelu: Literal["exact", "tanh"] = "tanh"

    def __post_init__(self) -> None:
        check_sizes(self)

    def parameter_shapes(self, vocabulary_size: int, *, outputs: int = 0) -> Shapes:
        """Returns every parameter's path and shape: with the next-token head, or a classifier of `outputs` values without bias."""
        H, V = self.width, vocabulary_size
        shapes: Shapes = {
            **self.table_shapes("embeddings/word", "embeddings/new", V),
            "embeddings/position": (self.positions, H),
            **layer_shapes(self, "attention_norm", "feed_forward_norm"),
            **norm_shapes("final_norm", H),
        }
        if outputs:
            return shapes | {"classifier/kernel": (H, outputs)}
        return shapes if self.tied else shapes | self.table_shapes("decoder", "decoder_new", V)


# Classifiers without a dense map before the output.
LINEAR = ("linear", "linear_tanh", "linear_relu")
Model = Bert | Decoder | RotaryDecoder
# The models that an experiment may name: these, and a model from another package.
AnyModel = Model | ExampleModel


def check_sizes(model: Bert | Decoder) -> None:
    """Raises `ConfigError` for a shape that cannot be built."""
    sizes = (model.layers, model.width, model.heads, model.feed_forward, model.positions)
    require(min(sizes) > 0, f"model={model.name}", "sizes must be positive", "Check layers, width, heads, feed_forward, positions")
    require(model.width % model.heads == 0, f"model.heads={model.heads}", f"does not divide width {model.width}", "Use width/64 heads")
    require(0 <= model.dropout < 1, f"model.dropout={model.dropout}", "is not a rate of at least 0 and below 1", "Use 0 <= rate < 1")
    check_attention(model, model.width // model.heads, model.dropout)


def dense_shapes(path: str, inputs: int, outputs: int) -> Shapes:
    """Returns the shapes of kernel and bias of a dense map."""
    return {f"{path}/kernel": (inputs, outputs), f"{path}/bias": (outputs,)}


def norm_shapes(path: str, width: int) -> Shapes:
    """Returns the shapes of gain and offset of a LayerNorm."""
    return {f"{path}/scale": (width,), f"{path}/bias": (width,)}


def layer_shapes(model: Bert | Decoder, *norms: str) -> Shapes:
    """Returns the shapes of all layers' parameters, stacked: four dense maps and the named LayerNorms."""
    H, F = model.width, model.feed_forward
    one = dense_shapes("qkv", H, 3 * H) | dense_shapes("attention_out", H, H) | dense_shapes("up", H, F) | dense_shapes("down", F, H)
    for norm in norms:
        one |= norm_shapes(norm, H)
    return {f"layers/{path}": (model.layers, *shape) for path, shape in one.items()}


# New rows, by path, and the rows that they follow.
NEW_ROWS = {"embeddings/new": "embeddings/word", "decoder_new": "decoder"}


def grown(count: int, rows: int) -> dict[str, int]:
    """Returns the fields of a model whose table has a row for each of `count` tokens, `rows` of them a checkpoint's.

    Raises `ConfigError` without a new token.
    """
    reason = f"the tokenizer has {count} tokens, and the checkpoint's table already has {rows} rows"
    require(count > rows, "model.new_tokens=mean", reason, "Leave it out, and train the rows that the tokens have")
    return {"vocabulary_size": count, "new_rows": count - rows}


def with_means(leaves: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Returns a checkpoint's parameters with the new rows that `shapes` has, each the mean of the rows before them."""
    new = {path: np.mean(leaves[old], axis=0, dtype=np.float64) for path, old in NEW_ROWS.items() if path in shapes}
    return {**leaves, **{path: np.tile(mean.astype(np.float32), (shapes[path][0], 1)) for path, mean in new.items()}}


def joined(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns parameters in which each table has its new rows."""
    whole = {old: np.concatenate([leaves[old], leaves[path]]) for path, old in NEW_ROWS.items() if path in leaves}
    return {path: leaf for path, leaf in leaves.items() if path not in NEW_ROWS} | whole
