"""Declares `mechanism=dp_sgd`: independent Gaussian noise on every step's clipped sum.

Declares `mechanism=none`: training without privacy.
"""

from typing import Any, ClassVar, Literal

from dpx.declaration import declaration
from dpx.mechanism.mechanism_protocol import Mechanism, NoisySum
from dpx.randomness import RootSecret


class GaussianSum(Mechanism):
    """The base class of mechanisms that add independent Gaussian noise once to the sum, whatever arrays it is of."""

    def draw(self, secret: RootSecret, step: int, params: Any, noise_multiplier: float, clipping_norm: float, strategy: Any) -> Any:
        """Returns keys of the slices of every parameter, uint32 [S, 2]."""
        from dpx.mechanism import noise

        return noise.slice_keys(secret, step, params)

    def noisy_sum(self, total: Any, drawn: Any, deviation: Any, state: Any, clipping_norm: float) -> NoisySum:
        import jax
        import jax.numpy as jnp

        from dpx.mechanism import noise

        noisy, squares = noise.add_noise(total, drawn, deviation)
        return NoisySum(total, noisy, jnp.sum(jnp.stack(jax.tree.leaves(squares))), state)


@declaration
class DpSgd(GaussianSum):
    """Adds Gaussian noise once for each logical batch to the sum of clipped per-example gradients (Abadi et al. 2016).

    Any optimiser may follow.
    """

    name: Literal["dp_sgd"] = "dp_sgd"
    is_independent_gaussian: ClassVar[bool] = True

    def ledger_fields(self) -> dict[str, Any]:
        return {"noise": "gaussian"}


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
