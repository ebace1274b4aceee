"""The name of a parameter's place in a tree, used for noise keys, layouts, selections and error messages."""

from typing import Any


def path_name(path: tuple[Any, ...]) -> str:
    """`layers/qkv/kernel` of jax's key path, through dictionaries, sequences and records."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
