"""Checks the declared arguments of one of optax's functions against its signature, with errors in the user's terms.

Optax's annotations are wide (a number may be an array, a schedule or a flag), and a config holds only numbers, flags, texts and lists: the
kinds of values that an argument takes are found from its annotation together with its default.
"""

import difflib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dpx.declaration import ConfigError, require

LEARNING_RATE = "learning_rate"
_PATH = "optimizer.arguments"
_TYPE = "the name of a type, such as bfloat16"

# The name of the mask in a config.
BERT = "bert"

# Official BERT code exempts LayerNorm parameters and every bias from decay.
_EXEMPT = ("bias", "scale", "output_bias")


def decay_mask(params: Any) -> Any:
    """Returns true for each parameter that weight decay applies to under the mask `bert`: all but LayerNorm parameters and biases.

    A parameter may be a leaf of `params`, or a tuple of its layers.
    """

    def is_decayed(path: Any, _: Any) -> bool:
        return next((key.key for key in reversed(path) if isinstance(key, jax.tree_util.DictKey)), None) not in _EXEMPT

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def checked(function: Callable[..., Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with which to call `function`. Raises `ConfigError` for an unknown, a missing or a mistyped argument."""
    parameters = {name: one for name, one in inspect.signature(function).parameters.items() if name != LEARNING_RATE}
    for name in declared:
        require(name in parameters, f"{_PATH}.{name}", "unknown key", nearest(name, parameters, f"{_PATH}."))
    for name, one in parameters.items():
        is_needed = one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        fix = f"Add {_PATH}.{name}=..." if _kinds(one) else "A config cannot hold such a value: use another optimiser"
        require(not is_needed or name in declared, f"{_PATH}.{name}", "no value given", fix)
    return {name: _value(parameters[name], value) for name, value in declared.items()}


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns the fix for an unknown name: the known name that is closest to it, or all known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"Did you mean {prefix}{close[0]}?" if close else f"Known here: {', '.join(known)}"


def _parts(hint: Any) -> list[Any]:
    """Returns the alternatives of a union, or the hint itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [part for argument in typing.get_args(hint) for part in _parts(argument)]
    return [hint]


def _is_mask(name: str) -> bool:
    return name == "mask" or name.endswith("_mask")


def _kinds(parameter: inspect.Parameter) -> tuple[str, ...]:
    """Returns the kinds of values that an argument takes, as words for a message; empty if a config cannot hold such a value."""
    parts, default, name = _parts(parameter.annotation), parameter.default, parameter.name
    texts = tuple(value for part in parts if typing.get_origin(part) is typing.Literal for value in typing.get_args(part))
    is_flag = isinstance(default, bool) or parts == [bool]
    is_number = not is_flag and (float in parts or type(default) is float)
    found = {
        "true or false": is_flag,
        "a whole number": not is_flag and not is_number and (int in parts or type(default) is int),
        "a number": is_number,
        BERT: _is_mask(name),
        _TYPE: "dtype" in name,
        " or ".join(texts) or "text": bool(texts) or (str in parts and "dtype" not in name),
        "a list": any(typing.get_origin(part) in (tuple, list) for part in parts),
        "null": default is None or type(None) in parts,
    }
    return tuple(word for word, is_taken in found.items() if is_taken)


def _value(parameter: inspect.Parameter, value: Any) -> Any:
    """Returns `value` as optax takes it. Raises `ConfigError` if it is of another kind."""
    kinds, shown = _kinds(parameter), f"{_PATH}.{parameter.name}={value}"
    is_number = type(value) in (int, float)
    require(not is_number or math.isfinite(value), shown, "not a finite number", "Correct the value")
    fits = {
        "true or false": isinstance(value, bool),
        "a whole number": type(value) is int,
        "a number": is_number,
        BERT: value == BERT,
        _TYPE: isinstance(value, str) and _is_type(value),
        "text": isinstance(value, str),
        "a list": isinstance(value, list | tuple),
        "null": value is None,
    }
    if not any(fits.get(kind, isinstance(value, str) and value in kind.split(" or ")) for kind in kinds):
        raise ConfigError(shown, f"expected {' or '.join(kinds) or 'a value that a config cannot hold'}", _mend(kinds))
    if _is_mask(parameter.name) and value == BERT:
        return decay_mask
    if type(value) is int and type(parameter.default) is float:
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def _mend(kinds: tuple[str, ...]) -> str:
    return "Leave it out" if kinds in ((), ("null",)) else "Correct the value"


def _is_type(value: str) -> bool:
    try:
        jnp.dtype(value)
    except TypeError:
        return False
    return True
