"""Optimisers: what makes an update of the parameters from a noisy gradient. Declarations import no jax."""

from dpx.optimizer.adam import Adam as Adam
from dpx.optimizer.named import Optax as Optax

Optimizer = Adam | Optax
