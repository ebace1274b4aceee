"""`mechanism=none`: plain training, which promises nothing."""

from typing import Any, ClassVar, Literal

from dpx.declaration import declaration
from dpx.mechanism.protocol import Mechanism, NoisySum


@declaration
class NoPrivacy(Mechanism):
    """Plain training: no clipping and no noise; the run is stamped `not_private`."""

    name: Literal["none"] = "none"
    is_private: ClassVar[bool] = False

    def draw(self, *_: Any) -> None:
        """Nothing."""

    def noisy_sum(self, total: Any, drawn: Any, deviation: Any, state: Any, clipping_norm: float) -> NoisySum:
        import jax.numpy as jnp

        return NoisySum(total, total, jnp.float32(0), state)
