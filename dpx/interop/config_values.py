"""Reads values of a checkpoint's `config.json`, and names the sizes that all families have.

Each problem is one line that names the file, the key and the value.
"""

import math
from collections.abc import Mapping
from typing import Any

from dpx.declaration import require

Config = Mapping[str, Any]
_FIX = "Correct the value, or copy the file again"
# The names that families give a model's sizes; other families have the usual names.
_USUAL = {"layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads"}
_USUAL |= {"feed_forward": "intermediate_size", "positions": "max_position_embeddings"}
_SIZES = {
    "distilbert": _USUAL | {"layers": "n_layers", "width": "dim", "heads": "n_heads", "feed_forward": "hidden_dim"},
    # Its `n_inner` may be null.
    "gpt2": {"layers": "n_layer", "width": "n_embd", "heads": "n_head", "positions": "n_positions"},
}


def whole(config: Config, key: str, where: str, usual: int | None = None, least: int = 1) -> int:
    """Returns a size. Raises `KeyError` if it is missing and has no `usual` value, `ConfigError` if it is not a whole number or below
    `least`."""
    value = config[key] if usual is None else config.get(key, usual)
    is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(is_whole, where, f"has {key}={value!r}, which is not a whole number of {least} or more", _FIX)
    return value


def number(config: Config, key: str, where: str, usual: float) -> float:
    value = config.get(key, usual)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    require(is_number, where, f"has {key}={value!r}, which is not a number of 0 or more", _FIX)
    return float(value)


def flag(config: Config, key: str, where: str, usual: bool) -> bool:
    value = config.get(key, usual)
    require(isinstance(value, bool), where, f"has {key}={value!r}, which is neither true nor false", _FIX)
    return value


def require_values(config: Config, where: str, **expected: Any) -> None:
    """Raises `ConfigError` for a key that asks for another value than the only one that dpx computes; a missing key is accepted."""
    for key, value in expected.items():
        reason = f"has {key}={config.get(key)}, but dpx supports only {value}"
        require(config.get(key, value) in (value, None), where, reason, "Use another checkpoint")


def read_sizes(config: Config, where: str, *, tied: bool) -> dict[str, Any]:
    """Returns the fields that all models have; `tied` is the family's value if the config does not say."""
    family = config["model_type"]
    sizes = {name: whole(config, theirs, where) for name, theirs in _SIZES.get(family, _USUAL).items()}
    return {
        "name": f"{family}_{sizes['layers']}x{sizes['width']}",
        **sizes,
        "vocabulary_size": whole(config, "vocab_size", where),
        "initialiser_range": number(config, "initializer_range", where, 0.02),
        "tied": flag(config, "tie_word_embeddings", where, tied),
    }


def written_sizes(model: Any, family: str) -> dict[str, Any]:
    """Returns the sizes of `model` under the names of its family."""
    return {theirs: getattr(model, name) for name, theirs in _SIZES.get(family, _USUAL).items()}
