"""Names a parameter by its path in a tree, for noise keys, layouts, selections and error messages."""

from typing import Any


def path_name(path: tuple[Any, ...]) -> str:
    """Returns the name of jax's key path, such as `layers/qkv/kernel`, through dictionaries, sequences and records."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
