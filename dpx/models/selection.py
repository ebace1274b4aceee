"""Selects parameters by path. It holds functions of names alone, without jax, so that a declaration is checked before jax starts."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import NamedTuple

from dpx.declaration import require

LAYERS = "layers"


class Selection(NamedTuple):
    """A selection of parameters by path.

    Each of `parts` is (its name in an error, a function that tells whether it selects a path). `top` is the number of layers from the top,
    or all.
    """

    parts: tuple[tuple[str, Callable[[str], bool]], ...]
    top: int | None = None

    def picks(self, path: str) -> bool:
        """Returns whether any part selects the parameter at `path`."""
        return any(is_picked(path) for _, is_picked in self.parts)


def _is_above(path: str) -> bool:
    return path.split("/")[0] not in ("embeddings", LAYERS)


def _is_bias(path: str) -> bool:
    return path.split("/")[-1] in ("bias", "output_bias")


def _is_output(path: str) -> bool:
    names = path.split("/")
    return names[0] == "classifier" and names[1] in ("kernel", "bias", "out")


def top(layers: int) -> Selection:
    """Selects the top layers, and the head."""
    require(layers > 0, f"top {layers} layers", "is not a number of layers", "Use 1 or more, or the selection last_layer")
    return Selection(((f"top {layers} layers", lambda path: _is_above(path) or path.split("/")[0] == LAYERS),), layers)


def matching(*patterns: str) -> Selection:
    """Selects paths such as "layers/qkv/bias". In a pattern * matches any part of a name, and ** any number of names."""
    return Selection(tuple((pattern, lambda path, pattern=pattern: _matches(pattern.split("/"), path.split("/"))) for pattern in patterns))


def either(*selections: Selection) -> Selection:
    """Selects what any of the selections selects; a selection with `top` selects nothing in the layers below its top ones."""
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
