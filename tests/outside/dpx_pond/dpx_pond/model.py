"""`model=brook`: plain JAX for one example, with nothing of dpx in it.

T tokens, V vocabulary, H width.
"""

from typing import Any, ClassVar, Literal

from dpx.declaration import declaration, require
from dpx.models.model_protocol import ExampleModel


@declaration
class Brook(ExampleModel):
    """A running mean of the words so far, two products, and a head tied to the word table."""

    causal: ClassVar[bool] = True

    width: int
    name: str = "brook"
    positions: int = 128
    dtype: Literal["float32", "bfloat16"] = "float32"
    vocabulary_size: int | None = None

    def __post_init__(self) -> None:
        require(self.width > 0, f"model.width={self.width}", "sizes must be positive", "Use 1 or more")

    def init(self, key: Any, vocabulary_size: int, outputs: int) -> Any:
        import jax

        H = self.width
        shapes = {"word": (vocabulary_size, H), "mix": (H, H), "out": (H, outputs or H)}
        return {name: 0.1 * jax.random.normal(jax.random.fold_in(key, place), shape) for place, (name, shape) in enumerate(shapes.items())}

    def token_logits(self, params: Any, tokens_T: Any, length: Any) -> Any:
        return self._hidden(params, tokens_T) @ params["out"] @ params["word"].T

    def class_logits(self, params: Any, tokens_T: Any, segment_T: Any, length: Any) -> Any:
        return self._hidden(params, tokens_T)[length - 1] @ params["out"]

    def _hidden(self, params: Any, tokens_T: Any) -> Any:
        import jax.numpy as jnp

        word_TH = params["word"][tokens_T]
        mean_TH = jnp.cumsum(word_TH, axis=0) / jnp.arange(1, len(tokens_T) + 1)[:, None]
        return jnp.tanh((word_TH + mean_TH) @ params["mix"])
