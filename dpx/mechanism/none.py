"""Declares `mechanism=none`: training without privacy."""

from typing import Any, ClassVar, Literal

from dpx.declaration import declaration
from dpx.mechanism.protocol import Mechanism, NoisySum


@declaration
class NoPrivacy(Mechanism):
    """Trains without clipping and noise; the statement says `not_private`."""

    name: Literal["none"] = "none"
    is_private: ClassVar[bool] = False

    def draw(self, *_: Any) -> None:
        """Returns nothing, because this mechanism adds no noise."""

    def noisy_sum(self, total: Any, drawn: Any, deviation: Any, state: Any, clipping_norm: float) -> NoisySum:
        import jax.numpy as jnp

        return NoisySum(total, total, jnp.float32(0), state)
