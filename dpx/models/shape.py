"""Model shapes as declared, and what follows from them by arithmetic: parameters and FLOPs. No jax."""

import math
from typing import Literal

from dpx.declaration import declaration, require


@declaration
class Bert:
    """A post-LayerNorm BERT encoder (Devlin et al. 2019) with a masked-token decoder tied to the word embedding.

    `dtype` is the compute type; parameters, sums, norms and noise are float32 always. `vocabulary_size=None` takes the data's.
    """

    name: str
    layers: int
    width: int
    heads: int
    feed_forward: int
    positions: int = 512
    segments: int = 2
    vocabulary_size: int | None = None
    dropout: float = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    layer_norm_eps: float = 1.0e-12
    initialiser_range: float = 0.02

    def __post_init__(self) -> None:
        sizes = (self.layers, self.width, self.heads, self.feed_forward)
        require(min(sizes) > 0, f"model={self.name}", "sizes must be positive", "Check layers, width, heads, feed_forward")
        require(self.width % self.heads == 0, f"model.heads={self.heads}", f"does not divide width {self.width}", "Use width/64 heads")
        require(0 <= self.dropout < 1, f"model.dropout={self.dropout}", "not a rate", "Use 0 <= rate < 1")

    def parameter_shapes(self, vocabulary_size: int, *, next_sentence: bool) -> dict[str, tuple[int, ...]]:
        """Every parameter's path and shape; encoder layers are stacked on a leading axis. Pooler, classifier: with `next_sentence`."""
        L, H, F, V = self.layers, self.width, self.feed_forward, vocabulary_size
        shapes: dict[str, tuple[int, ...]] = {
            "embeddings/word": (V, H),
            "embeddings/position": (self.positions, H),
            "embeddings/segment": (self.segments, H),
            "embeddings/norm/scale": (H,),
            "embeddings/norm/bias": (H,),
            "layers/qkv/kernel": (L, H, 3 * H),
            "layers/qkv/bias": (L, 3 * H),
            "layers/attention_out/kernel": (L, H, H),
            "layers/attention_out/bias": (L, H),
            "layers/attention_norm/scale": (L, H),
            "layers/attention_norm/bias": (L, H),
            "layers/up/kernel": (L, H, F),
            "layers/up/bias": (L, F),
            "layers/down/kernel": (L, F, H),
            "layers/down/bias": (L, H),
            "layers/output_norm/scale": (L, H),
            "layers/output_norm/bias": (L, H),
            "mlm/transform/kernel": (H, H),
            "mlm/transform/bias": (H,),
            "mlm/norm/scale": (H,),
            "mlm/norm/bias": (H,),
            "mlm/output_bias": (V,),
        }
        if next_sentence:
            shapes |= {
                "pooler/kernel": (H, H),
                "pooler/bias": (H,),
                "next_sentence/kernel": (H, 2),
                "next_sentence/bias": (2,),
            }
        return shapes

    def parameters(self, vocabulary_size: int, *, next_sentence: bool) -> int:
        """Exact number of trained parameters."""
        return sum(math.prod(shape) for shape in self.parameter_shapes(vocabulary_size, next_sentence=next_sentence).values())


Model = Bert
