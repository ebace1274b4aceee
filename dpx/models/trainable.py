"""Which parameters of a model are trained: selections by path, and the two trees that they make of its parameters.

`split` gives (trainable, frozen), nested dicts that `dpx.clipping.frozen.merged` makes one again, for the loss; `whole` makes the
model's ordinary parameters of that, for a file or another program. Pure functions of paths and shapes.

Layers are stacked on a leading axis, so that the top k of L layers have no path of their own. They keep the name `layers`, as stacks
[k, ...], and the others rest apart, as `layers_below` [L - k, ...], which a model runs first, forward only.
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
    """Parameters by path: each of `parts` is (what a refusal calls it, which paths it picks). `top`: of the layers only so many, or all."""

    parts: tuple[tuple[str, Callable[[str], bool]], ...]
    top: int | None = None

    def picks(self, path: str) -> bool:
        return any(is_picked(path) for _, is_picked in self.parts)


def _is_above(path: str) -> bool:
    return path.split("/")[0] not in ("embeddings", LAYERS)


def _is_bias(path: str) -> bool:
    return path.split("/")[-1] in ("bias", "output_bias")


def top(layers: int) -> Selection:
    """The top layers, and the head."""
    require(layers > 0, f"top {layers} layers", "is no number of layers", "Use 1 or more, or the selection last_layer")
    return Selection(((f"top {layers} layers", lambda path: _is_above(path) or path.split("/")[0] == LAYERS),), layers)


def matching(*patterns: str) -> Selection:
    """Paths such as "layers/qkv/bias". In a pattern * stands for any part of a name, and ** for any number of names."""
    return Selection(tuple((pattern, lambda path, pattern=pattern: _matches(pattern.split("/"), path.split("/"))) for pattern in patterns))


def either(*selections: Selection) -> Selection:
    """What any of them picks; of layers below the `top` ones of a selection among them, nothing."""
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
# The head: whatever stands above the layers. Of a tied decoder the table is an embedding, and rests.
LAST_LAYER = Selection((("last_layer", _is_above),))
# Adapters (lora.py), and of their factors the second alone.
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
    """Layers below the top `count` under a name of their own, which no selection picks."""
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
    """Whether no selection trains it: a layer below those, and what adapters are multiplied by."""
    return path.split("/")[0] == BELOW or any(fnmatchcase(path, f"*/lora/*/{name}") for name in ("scale", "dropout"))


def whole(params: Any) -> Any:
    """The model's ordinary parameters: layers in one stack again."""
    if BELOW not in params:
        return params
    rest = {name: leaf for name, leaf in params.items() if name != BELOW}
    return rest | {LAYERS: jax.tree.map(lambda below, above: jnp.concatenate([below, above]), params[BELOW], params[LAYERS])}
