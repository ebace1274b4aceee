"""The optimiser's update as an optax transformation; the learning rate is given at each step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from dpx.optimizer import Adam

# The parameter of an audit's gradient canaries (`dpx.audit.objective`), in addition to the model's parameters.
CANARIES = "canaries"

# Official BERT code exempts LayerNorm parameters and every bias from decay.
_EXEMPT = ("bias", "scale", "output_bias")


def decay_mask(params: Any) -> Any:
    """True where weight decay applies under `decay_mask="bert"`: everything but LayerNorm parameters and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in _EXEMPT, params)


def transformation(optimizer: Adam) -> optax.GradientTransformation:
    """Adam with decoupled weight decay: m_hat / (sqrt(v_hat) + eps) + weight_decay * theta (Anil et al. 2021, Algorithm 1).

    The caller multiplies by the learning rate (`apply`)."""
    return optax.chain(
        optax.scale_by_adam(b1=optimizer.beta1, b2=optimizer.beta2, eps=optimizer.eps),
        optax.add_decayed_weights(optimizer.weight_decay, mask=decay_mask if optimizer.decay_mask == "bert" else None),
    )


def apply(params: Any, direction: Any, learning_rate: Float[Array, ""]) -> Any:
    """theta - eta * direction, leaf by leaf."""
    return jax.tree.map(lambda p, d: p - learning_rate * d.astype(jnp.float32), params, direction)


def with_canaries(moved: Any, before: Any, gradient: Any) -> Any:
    """`moved`, except that canaries (if any) are updated from `before` by the unchanged released gradient, at rate 1."""
    if CANARIES not in before:
        return moved
    return moved | {CANARIES: jax.tree.map(jnp.subtract, before[CANARIES], gradient[CANARIES])}
