"""Optimisers, which update the parameters by a noisy gradient. Declarations import no jax."""

from dpx.optimizer.declared_optimizer import Adam as Adam
from dpx.optimizer.declared_optimizer import Optax as Optax

Optimizer = Adam | Optax
