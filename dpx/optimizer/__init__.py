"""Optimisers: what makes an update of the parameters from a noisy gradient. Declarations import no jax."""

from dpx.optimizer.declarations import Adam as Adam
from dpx.optimizer.declarations import Optax as Optax

Optimizer = Adam | Optax
