"""Loads the weights of a run that another run starts from, on the host and in the form that the new run trains."""

from typing import Any

import jax
import numpy as np

from dpx.audit.canary_objective import CANARIES
from dpx.clipping.trained_and_frozen import merged
from dpx.declaration import require
from dpx.files.orbax_checkpoints import read_together
from dpx.files.weights import FROZEN, Leaves, by_path
from dpx.init.parent import Parent
from dpx.models.lora import merge_adapters
from dpx.models.trainable import whole
from dpx.models.trained import Adapters, Trained


def parameters_of(parent: Parent, train: Trained) -> Leaves:
    """Returns the weights that the parent released, or its checkpoint merged with its frozen parameters.

    Adapters are kept if `train` has the same ones; else they are merged into the weights that they adapt. Raises `ConfigError` if a file is
    cut short or is not what was released.
    """
    tree = _checkpoint(parent) if parent.step else read_together(parent.place)
    if isinstance(tree.get("layers"), dict) and "lora" in tree["layers"] and not is_adapted_alike(parent.train, train):
        tree = jax.tree.map(np.asarray, merge_adapters(tree))
    return by_path(tree)


def _checkpoint(parent: Parent) -> Any:
    assert parent.private is not None
    params = {name: leaf for name, leaf in read_together(parent.place, "params").items() if name != CANARIES}
    if parent.train.is_all:
        return params
    stored = parent.private / FROZEN
    require(stored.is_dir(), stored, "the parent's frozen parameters are missing", "Restore it, or begin from its released weights")
    return jax.tree.map(np.asarray, whole(merged(params, read_together(stored))))


def is_adapted_alike(one: Trained, other: Trained) -> bool:
    """Returns whether two runs have adapters of the same form."""
    if not isinstance(one, Adapters) or not isinstance(other, Adapters):
        return False
    return _form(one) == _form(other)


def _form(adapters: Adapters) -> tuple[Any, ...]:
    # The dropout rate is stored beside the factors: factors of a run with another rate would also load that rate.
    return adapters.rank, adapters.alpha, sorted(adapters.targets), adapters.dropout
