"""Divides the parameters of a model into trained and frozen parameters, in two trees.

`split` returns (trainable, frozen), nested dicts that `dpx.clipping.readers.merged` combines again, for the loss; `whole`
converts that to the model's ordinary parameters, for a file or another program. Pure functions of paths and shapes.

Layers are stacked on a leading axis, so the top k of L layers do not have separate paths. They keep the name `layers`, as stacks
[k, ...]; the others are frozen, in a separate stack `layers_below` [L - k, ...], which a model runs first, forward only.
"""

import difflib
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from dpx.declaration import ConfigError, require
from dpx.models.trained import LAYERS, Selection
from dpx.randomness import path_name

BELOW = "layers_below"


def split(params: Any, selection: Selection) -> tuple[Any, Any]:
    """Returns (trainable, frozen): the parameters that `selection` selects, and all others.

    Raises `ConfigError` for a part of the selection that selects nothing; the error names the nearest paths.
    """
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for name, is_picked in selection.parts:
        if not any(map(is_picked, paths)):
            nearest = ", ".join(difflib.get_close_matches(name, paths, 3, 0.0))
            raise ConfigError(name, "matches no parameter", f"The nearest are {nearest}")
    if selection.top is not None:
        # The layers below the top ones get a separate name, which no selection selects.
        layers, count = jax.tree.leaves(params.get(LAYERS, {})), selection.top
        have = layers[0].shape[0] if layers else 0
        require(count <= have, f"top {count} layers", f"is too many: the model has {have} layers", "Choose at most that number")
        if count < have:
            parts = {BELOW: slice(have - count), LAYERS: slice(have - count, have)}
            params = params | {name: jax.tree.map(lambda leaf, part=part: leaf[part], params[LAYERS]) for name, part in parts.items()}
    leaves = flatten_dict(params, sep="/")
    # Factors that multiply adapters are constants.
    never = (f"{BELOW}/*", "*/lora/*/scale", "*/lora/*/dropout")
    trained = {path for path in leaves if selection.picks(path) and not any(fnmatchcase(path, one) for one in never)}
    trainable = {path: leaf for path, leaf in leaves.items() if path in trained}
    frozen = {path: leaf for path, leaf in leaves.items() if path not in trained}
    return unflatten_dict(trainable, sep="/"), unflatten_dict(frozen, sep="/")


def whole(params: Any) -> Any:
    """Returns the model's ordinary parameters, with all layers in one stack."""
    if BELOW not in params:
        return params
    rest = {name: leaf for name, leaf in params.items() if name != BELOW}
    return rest | {LAYERS: jax.tree.map(lambda below, above: jnp.concatenate([below, above]), params[BELOW], params[LAYERS])}
