"""`mechanism=echo`: every clipped sum is released twice, each time with independent noise, and the mean of both is used."""

import math
from typing import Any

from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent

from dpx.declaration import declaration, require
from dpx.mechanism.mechanism_protocol import Declared, Mechanism, NoisySum
from dpx.randomness import RootSecret


@declaration
class Echo(Mechanism):
    """Two Gaussian releases at sqrt(2) times the deviation: their mean has noise of the deviation that was asked for."""

    name: str = "echo"

    def ledger_fields(self) -> dict[str, Any]:
        """The deviation of the mean, for the tables; what is charged is `event`."""
        return {"noise": "gaussian"}

    def check(self, declared: Declared) -> None:
        """Under `replace_one` one example moves the sum by twice the clipping norm, which the event below does not say."""
        adjacency = declared.privacy.adjacency
        require(adjacency != "replace_one", f"privacy.adjacency={adjacency}", "an echo is charged for half of that", "Use zero_out")

    def event(self, noise_multiplier: float, adjacency: str) -> DpEvent:
        """Both releases."""
        once = GaussianDpEvent(math.sqrt(2) * noise_multiplier)
        return ComposedDpEvent([once, once])

    def draw(self, secret: RootSecret, step: int, params: Any, noise_multiplier: float, clipping_norm: float, strategy: Any) -> Any:
        """Two keys for every parameter, uint32 [2, 2], under purposes that nothing else uses."""
        import jax
        import numpy as np

        from dpx.randomness import path_name

        def keys(path: Any, leaf: Any) -> np.ndarray:
            return np.stack([secret.key(purpose, step, path_name(path)) for purpose in ("echo_first", "echo_second")])

        return jax.tree_util.tree_map_with_path(keys, params)

    def noisy_sum(self, total: Any, drawn: Any, deviation: Any, state: Any, clipping_norm: float) -> NoisySum:
        import jax
        import jax.numpy as jnp

        from dpx.mechanism.noise import gaussian

        def mean(leaf: Any, keys: Any) -> Any:
            once, again = (gaussian(key, 1, leaf.size).reshape(leaf.shape) for key in keys)
            return deviation * (once + again) / jnp.sqrt(2.0)

        noise = jax.tree.map(mean, total, drawn)
        squares = sum((jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(noise)), jnp.float32(0))
        return NoisySum(total, jax.tree.map(jnp.add, total, noise), squares, state)


@declaration
class Mute(Mechanism):
    """A mechanism that forgot to say what it costs: refused before anything is drawn."""

    name: str = "mute"
