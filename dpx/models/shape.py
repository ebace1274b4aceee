"""Declares model shapes, and computes the parameters that follow from them by arithmetic. It imports no jax.

Shape legend: V vocabulary, H width, F feed-forward, L layers; layers are stacked on a leading axis.
"""

from typing import ClassVar, Literal

from dpx.declaration import declaration, require
from dpx.models.model_protocol import ExampleModel, Transformer, check_attention
from dpx.models.model_protocol import Shapes as Shapes
from dpx.models.model_protocol import count as count
from dpx.models.rotary import RotaryDecoder


@declaration
class Bert(Transformer):
    """A post-LayerNorm encoder (Devlin et al. 2019) with a masked-token decoder.

    RoBERTa (Liu et al. 2019) is such an encoder with one segment and `position_offset=2`, DistilBERT (Sanh et al. 2019) one without
    segments. `classifier`: `"pooler"` is (dense, tanh, dropout, output), `"dense"` (dropout, dense, tanh, dropout, output), `"relu"`
    (dense, ReLU, dropout, output).

    Attributes:
        positions: Rows of the position table: the longest sequence.
        position_offset: Rows of the position table that no token uses; RoBERTa has 2.
        segments: Rows of the segment table; 0 means no such table.
        dropout: Dropout rate in training.
        layer_norm_eps: Constant in LayerNorm's divisor.
        classifier: Head of a classifier: pooler (BERT), dense (RoBERTa), relu (DistilBERT), or linear (dropout and output alone).
        pool: What the classifier reads: the first token (cls), or the mean over the tokens.
    """

    causal: ClassVar[bool] = False
    gelu: ClassVar[Literal["exact", "tanh"]] = "exact"

    positions: int = 512
    position_offset: int = 0
    segments: int = 2
    dropout: float = 0.0
    layer_norm_eps: float = 1.0e-12
    classifier: Literal["pooler", "dense", "relu", "linear"] = "pooler"
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
        shapes: Shapes = {
            "embeddings/word": (V, H),
            "embeddings/position": (self.positions + self.position_offset, H),
            **norm_shapes("embeddings/norm", H),
            **layer_shapes(self, "attention_norm", "output_norm"),
        }
        if self.segments:
            shapes["embeddings/segment"] = (self.segments, H)
        if outputs and self.classifier in ("dense", "relu"):
            return shapes | dense_shapes("classifier/dense", H, H) | dense_shapes("classifier/out", H, outputs)
        if outputs and self.classifier == "linear":
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
            "embeddings/word": (V, H),
            "embeddings/position": (self.positions, H),
            **layer_shapes(self, "attention_norm", "feed_forward_norm"),
            **norm_shapes("final_norm", H),
        }
        if outputs:
            return shapes | {"classifier/kernel": (H, outputs)}
        return shapes if self.tied else shapes | {"decoder": (V, H)}


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
