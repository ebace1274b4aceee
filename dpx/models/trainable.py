"""Which parameters of a model are trained: selections by path, and the two trees into which they divide its parameters.

`split` returns (trainable, frozen), nested dicts that `dpx.clipping.frozen.merged` combines again, for the loss; `whole` converts that
to the model's ordinary parameters, for a file or another program. Pure functions of paths and shapes.

Layers are stacked on a leading axis, so the top k of L layers do not have separate paths. They keep the name `layers`, as stacks
[k, ...]; the others are frozen, in a separate stack `layers_below` [L - k, ...], which a model runs first, forward only.
"""

import difflib
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from dpx.clipping.groups import LAYERS
from dpx.declaration import ConfigError, require
from dpx.parameter_path import path_name

BELOW = "layers_below"


class Selection(NamedTuple):
    """Parameters by path: each of `parts` is (its name in an error, the paths it picks). `top`: how many layers from the top, or all."""

    parts: tuple[tuple[str, Callable[[str], bool]], ...]
    top: int | None = None

    def picks(self, path: str) -> bool:
        return any(is_picked(path) for _, is_picked in self.parts)


def _is_above(path: str) -> bool:
    return path.split("/")[0] not in ("embeddings", LAYERS)


def _is_bias(path: str) -> bool:
    return path.split("/")[-1] in ("bias", "output_bias")


def _is_output(path: str) -> bool:
    names = path.split("/")
    return names[0] == "classifier" and names[1] in ("kernel", "bias", "out")


def top(layers: int) -> Selection:
    """The top layers, and the head."""
    require(layers > 0, f"top {layers} layers", "is not a number of layers", "Use 1 or more, or the selection last_layer")
    return Selection(((f"top {layers} layers", lambda path: _is_above(path) or path.split("/")[0] == LAYERS),), layers)


def matching(*patterns: str) -> Selection:
    """Paths such as "layers/qkv/bias". In a pattern * matches any part of a name, and ** any number of names."""
    return Selection(tuple((pattern, lambda path, pattern=pattern: _matches(pattern.split("/"), path.split("/"))) for pattern in patterns))


def either(*selections: Selection) -> Selection:
    """What any of the selections picks; a selection with `top` picks nothing in the layers below its top ones."""
    tops = sorted({selection.top for selection in selections if selection.top is not None})
    require(len(tops) < 2, f"top {tops} layers", "are two numbers", "Choose one")
    return Selection(tuple(part for selection in selections for part in selection.parts), tops[0] if tops else None)


def _matches(pattern: list[str], names: list[str]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(_matches(pattern[1:], names[start:]) for start in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _matches(pattern[1:], names[1:])


ALL = Selection((("all", lambda path: True),))
# Of dense maps, LayerNorms and the decoder (Ben Zaken et al. 2022; with privacy: Bu et al. 2022).
BIAS = Selection((("bias", _is_bias),))
# The head: everything above the layers. The table of a tied decoder is an embedding, and is frozen.
LAST_LAYER = Selection((("last_layer", _is_above),))
# The last map of a classifier: what it reads is a function of the text and of frozen parameters alone.
OUTPUT = Selection((("output", _is_output),))
# Adapters (lora.py), and only their second factor.
LORA = matching("layers/lora/*/a", "layers/lora/*/b")
LORA_FFA = matching("layers/lora/*/b")


def split(params: Any, selection: Selection) -> tuple[Any, Any]:
    """(trainable, frozen): what `selection` picks of a model's parameters, and the rest.

    Raises `ConfigError` for a part of the selection that picks nothing, naming the nearest paths.
    """
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for name, is_picked in selection.parts:
        if not any(map(is_picked, paths)):
            nearest = ", ".join(difflib.get_close_matches(name, paths, 3, 0.0))
            raise ConfigError(name, "picks no parameter", f"The nearest are {nearest}")
    if selection.top is not None:
        params = _cut(params, selection.top)
    leaves = flatten_dict(params, sep="/")
    trained = {path for path in leaves if selection.picks(path) and not _is_constant(path)}
    trainable = {path: leaf for path, leaf in leaves.items() if path in trained}
    frozen = {path: leaf for path, leaf in leaves.items() if path not in trained}
    return unflatten_dict(trainable, sep="/"), unflatten_dict(frozen, sep="/")


def _cut(params: Any, count: int) -> Any:
    """Gives the layers below the top `count` a separate name, which no selection picks."""
    layers = jax.tree.leaves(params.get(LAYERS, {}))
    have = layers[0].shape[0] if layers else 0
    require(count <= have, f"top {count} layers", f"are more than the {have} there are", "Choose fewer")
    if count == have:
        return params
    below, above = (
        jax.tree.map(lambda leaf, part=part: leaf[part], params[LAYERS]) for part in (slice(have - count), slice(have - count, have))
    )
    return params | {LAYERS: above, BELOW: below}


def _is_constant(path: str) -> bool:
    """Whether no selection trains it: a layer below the trained ones, and the factors by which adapters are multiplied."""
    return path.split("/")[0] == BELOW or any(fnmatchcase(path, f"*/lora/*/{name}") for name in ("scale", "dropout"))


def whole(params: Any) -> Any:
    """The model's ordinary parameters: layers in one stack again."""
    if BELOW not in params:
        return params
    rest = {name: leaf for name, leaf in params.items() if name != BELOW}
    return rest | {LAYERS: jax.tree.map(lambda below, above: jnp.concatenate([below, above]), params[BELOW], params[LAYERS])}
