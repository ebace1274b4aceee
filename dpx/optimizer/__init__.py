"""Optimisers, which update the parameters by a noisy gradient. Declarations import no jax."""

from dpx.optimizer.declarations import Adam as Adam
from dpx.optimizer.declarations import Optax as Optax

Optimizer = Adam | Optax
