"""Updates the parameters by a noisy gradient, as the optimiser was declared; the learning rate is given at each step.

It is post-processing: it reads the noisy gradient, its own state and the parameters, all of which the privacy statement covers.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh
from jaxtyping import Array, Float

from dpx.audit.canaries import CANARIES
from dpx.clipping.groups import LAYERS
from dpx.optimizer import Adam, Optimizer
from dpx.optimizer.from_optax import BERT, LEARNING_RATE, decay_mask
from dpx.optimizer.from_optax import transformation as of_optax
from dpx.processes.mesh import Mesh
from dpx.training import sharding


class Update(NamedTuple):
    """The functions of an optimiser.

    `init` makes the optimiser's state from parameters; `apply` makes the next parameters and the next state from (parameters, state, noisy
    gradient, learning rate). Both run under jit.
    """

    init: Callable[[Any], Any]
    apply: Callable[[Any, Any, Any, Float[Array, ""]], tuple[Any, Any]]


def make_update(optimizer: Optimizer) -> Update:
    """Returns the update that `optimizer` declares.

    Canaries (if any) are updated by the unchanged noisy gradient, whatever the optimiser. An optimiser of optax gets each layer of a stack
    as a separate parameter, so that what it computes for one parameter (a trust ratio, a factored moment) is of one layer; it does not get
    the canaries, which would change what it computes over all parameters.

    Raises `ConfigError` for an optimiser of optax that cannot be used (`dpx.optimizer.from_optax`).
    """
    if isinstance(optimizer, Adam):
        adam = transformation(optimizer)

        def moved_by_adam(params: Any, moments: Any, gradient: Any, learning_rate: Float[Array, ""]) -> tuple[Any, Any]:
            direction, moments = adam.update(gradient, moments, params)
            return with_canaries(apply(params, direction, learning_rate), params, gradient), moments

        return Update(adam.init, moved_by_adam)
    transform = of_optax(optimizer.name, optimizer.arguments)

    def init(params: Any) -> Any:
        own = _by_layer(_without_canaries(params))
        return transform.init(own) if own else ()

    def moved(params: Any, moments: Any, gradient: Any, learning_rate: Float[Array, ""]) -> tuple[Any, Any]:
        own, rest = _without_canaries(params), {name: leaf for name, leaf in params.items() if name == CANARIES}
        if own:
            parts = _by_layer(own)
            moments = moments._replace(hyperparams=moments.hyperparams | {LEARNING_RATE: learning_rate})
            updates, moments = transform.update(_by_layer(_without_canaries(gradient)), moments, parts)
            stepped: Any = optax.apply_updates(parts, updates)
            own = _stacked(stepped)
        return with_canaries(own | rest, params, gradient), moments

    return Update(init, moved)


def transformation(optimizer: Adam) -> optax.GradientTransformation:
    """Returns Adam with decoupled weight decay: m_hat / (sqrt(v_hat) + eps) + weight_decay * theta (Anil et al. 2021, Algorithm 1).

    The caller multiplies by the learning rate (`apply`).
    """
    return optax.chain(
        optax.scale_by_adam(b1=optimizer.beta1, b2=optimizer.beta2, eps=optimizer.eps),
        optax.add_decayed_weights(optimizer.weight_decay, mask=decay_mask if optimizer.decay_mask == BERT else None),
    )


def apply(params: Any, direction: Any, learning_rate: Float[Array, ""]) -> Any:
    """Returns theta - eta * direction, leaf by leaf."""
    return jax.tree.map(lambda p, d: p - learning_rate * d.astype(jnp.float32), params, direction)


def _without_canaries(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: leaf for name, leaf in tree.items() if name != CANARIES}


def _by_layer(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns `tree` with every stack [L, ...] under `layers` as a tuple of L arrays."""
    if LAYERS not in tree:
        return tree
    return tree | {LAYERS: jax.tree.map(lambda leaf: tuple(leaf[layer] for layer in range(leaf.shape[0])), tree[LAYERS])}


def _stacked(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns the tree for which `_by_layer` returned `tree`."""
    if LAYERS not in tree:
        return tree
    return tree | {LAYERS: jax.tree.map(jnp.stack, tree[LAYERS], is_leaf=lambda node: isinstance(node, tuple))}


def with_canaries(moved: Any, before: Any, gradient: Any) -> Any:
    """Returns `moved`, except that canaries (if any) are updated from `before` by the unchanged released gradient, at rate 1."""
    if CANARIES not in before:
        return moved
    return moved | {CANARIES: jax.tree.map(jnp.subtract, before[CANARIES], gradient[CANARIES])}


def state_bytes(optimizer: Optimizer, trained: Any, mesh: Mesh) -> int:
    """Returns the bytes of the optimiser's state on one device of `mesh`. Allocates nothing.

    `trained` is a tree of the trained parameters' shapes.
    """
    state = jax.eval_shape(make_update(optimizer).init, trained)
    devices = AbstractMesh((mesh.data, mesh.fsdp, mesh.tensor), ("data", "fsdp", "tensor"))
    stored = sharding.storage_shardings(state, devices)
    parts = zip(jax.tree.leaves(state), jax.tree.leaves(stored), strict=True)
    return sum(math.prod(layout.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, layout in parts)
